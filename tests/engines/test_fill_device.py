"""Blocks that move to the device after the first step: nothing changes in what is trained, and a device that they fill
too far is told of. How many may stay is measured on GPUs; here it is given."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from lomo_runs import assert_equal, batches, lively, start, streamed, train, weights_of
from zo_runs import log_lines

from ds_zo.engines import homes, lomo_homes
from ds_zo.streaming import allocator

pytestmark = pytest.mark.usefixtures("single_process")


@pytest.mark.parametrize("kind", ["ZO", "LOMO"])
def test_a_step_that_waits_for_memory_is_told_of_once(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (homes, lomo_homes):
        monkeypatch.setattr(module, "residents_after_a_step", lambda *args, **kwargs: (1, "given"))

    def trained(retries: list[int]) -> tuple[dict[str, torch.Tensor], list[str]]:
        """`retries`: the allocator's counts, when blocks have moved and after the step that follows; none: they do
        not move."""
        engine: Any = start(streamed(kind, stream={"resident_blocks": 0}, lr=1e-3), lively("llama"))
        backend, counts = engine.backend, iter(retries)
        monkeypatch.setattr(allocator, "num_retries", lambda device: next(counts))
        if kind == "ZO":
            backend.homes.may_fill_device = bool(retries)
        else:
            backend._homes._may_fill = bool(retries)
        with log_lines(logging.WARNING) as lines:
            train(engine, batches("llama", 4))
        placement = (backend.homes if kind == "ZO" else backend._homes).placement
        assert sum(not unit.streamed for unit in placement.blocks) == bool(retries)
        engine.destroy()
        return weights_of(engine.module), [line for line in lines if "had to stop" in line]

    expected, _ = trained([])
    for retries, num_lines in (([2, 2], 0), ([2, 5], 1)):
        found, lines = trained(retries)
        assert len(lines) == num_lines
        assert all("stop 3 times" in line and "ds_zo.stream.device_memory_gb" in line for line in lines)
        assert_equal(found, expected)
