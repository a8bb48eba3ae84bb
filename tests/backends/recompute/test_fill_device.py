"""Blocks that move to the device after the first step: nothing changes in what is trained, and a device that they fill
too far, or that takes none, is told of. How many may stay is measured on GPUs; here it is given."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch

from ds_zo.streaming import allocator, block_store
from ds_zo.streaming.host_store import HostStore
from tests.helpers.lomo_runs import batches, lively, start, streamed, train, weights_of
from tests.helpers.weights import assert_equal
from tests.helpers.zo_runs import log_lines

pytestmark = pytest.mark.usefixtures("single_process")


def _given(monkeypatch: pytest.MonkeyPatch, num_resident: int) -> None:
    monkeypatch.setattr(block_store, "residents_after_a_step", lambda *args, **kwargs: (num_resident, "given"))


def _trained(kind: str, *, fills: bool) -> tuple[dict[str, torch.Tensor], int, list[str]]:
    """Weights, how many blocks stay, and what was logged."""
    # With an interval given, no device is timed to find one, for which buffers would be made once more.
    stored = {"wire_dtype": "bf16", "master": "split", "writeback_interval": 16} if kind == "ZO" else {}
    engine: Any = start(streamed(kind, stream={"resident_blocks": 0, **stored}, lr=1e-3), lively("llama"))
    backend = engine.backend
    store = backend.store.blocks if kind == "ZO" else backend.blocks.store
    store.may_fill_device = fills
    with log_lines(logging.INFO) as lines:
        train(engine, batches("llama", 4))
    num_resident = store.num_resident
    engine.destroy()
    return weights_of(engine.module), num_resident, lines


@pytest.mark.parametrize("kind", ["ZO", "LOMO"])
def test_a_step_that_waits_for_memory_is_told_of_once(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _given(monkeypatch, 1)
    expected, num_resident, _ = _trained(kind, fills=False)
    assert num_resident == 0
    for retries, num_lines in (([2, 2], 0), ([2, 5], 1)):
        counts = iter(retries)  # the allocator's, when blocks have moved and after the step that follows
        monkeypatch.setattr(allocator, "num_retries", lambda device, counts=counts: next(counts))
        found, num_resident, lines = _trained(kind, fills=True)
        waits = [line for line in lines if "had to stop" in line]
        assert len(waits) == num_lines and num_resident == 1
        assert all("stop 3 times" in line and "ds_zo.stream.device_memory_gb" in line for line in waits)
        assert_equal(found, expected)


@pytest.mark.parametrize("kind", ["ZO", "LOMO"])
def test_a_device_that_is_full_keeps_fewer_blocks_and_says_so(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    copy, runtime = HostStore.copy_whole, block_store.Runtime
    expected, _, _ = _trained(kind, fills=False)

    def fails_at(work: Callable[..., Any], calls: set[int]) -> Callable[..., Any]:
        count = itertools.count()

        def called(*args: Any, **kwargs: Any) -> Any:
            if next(count) in calls:
                raise torch.OutOfMemoryError("full")
            return work(*args, **kwargs)

        return called

    # Which copies of blocks find no room, and which makings of buffers: the first is that of `initialize`.
    for wanted, copies, makings, left in ((0, (), (), 0), (2, {1}, (), 1), (3, (), {1}, 2), (3, {0}, (), 0)):
        _given(monkeypatch, wanted)
        monkeypatch.setattr(HostStore, "copy_whole", fails_at(copy, set(copies)))
        monkeypatch.setattr(block_store, "Runtime", fails_at(runtime, set(makings)))
        found, num_resident, lines = _trained(kind, fills=True)
        assert num_resident == left
        said = [line for line in lines if "(given)" in line]
        assert len(said) == 1
        assert (
            "all 3 blocks stay streamed"
            if not wanted
            else f"{wanted} of 3 blocks were moved there (given): {left} blocks are resident"
        ) in said[0]
        assert_equal(found, expected)

    monkeypatch.setattr(HostStore, "copy_whole", fails_at(copy, {0}))
    monkeypatch.setattr(block_store, "Runtime", fails_at(runtime, {1}))
    with pytest.raises(RuntimeError, match="has no memory left for the buffers"):
        _trained(kind, fills=True)
