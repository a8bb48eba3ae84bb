"""Host memory that ranks share, where one rank alone may pin no memory."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ds_zo.streaming.node import RankPartition
from ds_zo.streaming.shared_store import SharedStore

CUDA, NBYTES = torch.device("cuda"), 3 * 4096


class Refusing(SharedStore):
    """A store whose rank may pin one buffer besides the header."""

    def _register(self, buffer: torch.Tensor) -> bool:
        self._pin = self._pin and len(self._registered) < 2
        self._registered += [buffer] if self._pin else []
        return self._pin


def test_a_rank_that_may_not_pin_meets_the_others_at_every_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other ranks, which may, would else wait for it, or zero what it has stored."""
    zeros = torch.zeros
    monkeypatch.setattr(torch, "zeros", lambda *sizes, device, **kw: zeros(*sizes, **kw))
    met: list[int] = []
    node: Any = SimpleNamespace(size=2, partition=RankPartition(1, 2), barrier=lambda: met.append(1))
    memory: Any = SimpleNamespace(tensor=torch.full((64 * 4096,), 7, dtype=torch.uint8))
    store = Refusing(node, memory, num_units=3, device=CUDA, pin=True)
    buffers = [store.take(NBYTES) for _ in range(3)]
    assert store.pinned_nbytes == NBYTES // 2 and len(store._pinned) == 1
    assert len(met) == 3
    assert not any(buffer[store.partition.shard(NBYTES)].any() for buffer in buffers)
    store._registered.clear()  # nothing is to be unpinned without CUDA
