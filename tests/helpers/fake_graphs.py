"""CUDA graphs on the CPU: a recording changes no stored weight, and a replay runs the recorded work again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import ds_zo.backends.zo.backend
from ds_zo.backends.zo import cuda_graphs


class FakeGraph:
    """The recorded work. `num_replays` counts its runs."""

    def __init__(self, work: Callable[[], None]) -> None:
        self._work = work
        self.num_replays = 0

    def replay(self) -> None:
        self.num_replays += 1
        self._work()


def _capture(self: cuda_graphs.BlockGraphs, work: Callable[[], None]) -> FakeGraph:
    """Runs the work, which finds out what it returns, and undoes its effect on memory."""
    units = self._block_store.placement.units
    buffers = [b for unit in units for b in (unit.store_buffer, unit.low_buffer) if b is not None]
    buffers.append(self._block_store.materialiser.scratch)
    before = [buffer.clone() for buffer in buffers]
    versions = [unit.version for unit in units]
    try:
        work()
    finally:
        for buffer, value in zip(buffers, before, strict=True):
            buffer.copy_(value)
    assert versions == [unit.version for unit in units], "a recording must not count its kernels as run"
    return FakeGraph(work)


def _run_watched(call: Callable[[], Any], device: torch.device) -> tuple[Any, str | None]:
    before = torch.get_rng_state()
    result = call()
    return result, None if torch.equal(before, torch.get_rng_state()) else "draws random numbers"


def use_fake_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets engines on the CPU record graphs as on a GPU."""
    monkeypatch.setattr(ds_zo.backends.zo.backend, "can_record", lambda device: True)
    monkeypatch.setattr(cuda_graphs, "_run_watched", _run_watched)
    monkeypatch.setattr(cuda_graphs.BlockGraphs, "_capture", _capture)
