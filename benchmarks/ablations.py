"""Features of streamed ZO that a case switches off, one at a time: the rows of the paper's Tables 2 and 5.

A case names them under `without`. They exist here alone: no JSON switches them off.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from benchmarks.raw_buffer import RawBuffer
from ds_zo.backends.zo.block_store import ZOBlockStore
from ds_zo.streaming.runtime import Slot
from ds_zo.streaming.streams import Streams
from ds_zo.streaming.units import Unit


class FreshSlot(Slot):
    """A slot that allocates its memory at each upload and frees the earlier one, outside PyTorch's caching
    allocator."""

    def __init__(self, nbytes: int, streams: Streams) -> None:
        super().__init__(nbytes, streams)
        self._device = device = streams.device
        self._size = nbytes
        self._raw: RawBuffer | None = None
        self.buffer = torch.empty(0, dtype=torch.uint8, device=device)

    def take(self, unit: Unit) -> None:
        super().take(unit)
        if self._device.type != "cuda":
            self.buffer = torch.empty(self._size, dtype=torch.uint8)
            return
        if self._raw is not None:
            self._raw.free()
        self._raw = RawBuffer(self._size, self._device)
        self.buffer = torch.as_tensor(self._raw, device=self._device)


def _allocate_at_each_upload(store: ZOBlockStore) -> None:
    """Replaces the slots. A store makes slots anew after the first step, which chooses its interval."""
    slots = store.runtime.slots
    for i, slot in enumerate(slots):
        if not isinstance(slot, FreshSlot):
            nbytes = slot.buffer.numel()
            slot.buffer = torch.empty(0, dtype=torch.uint8, device=store.device)
            slots[i] = FreshSlot(nbytes, store.streams)


def _update_in_own_sweep(store: ZOBlockStore) -> None:
    """Applies the last step's update apart from the next forward. Blocks are uploaded and written back for it."""
    store.materialiser.fold_now(*store.placement.units)


_WITHOUT: dict[str, Callable[[ZOBlockStore], None]] = {
    "reuse_buffers": _allocate_at_each_upload,
    "fuse_update": _update_in_own_sweep,
}


def ablate(engine: Any, without: Sequence[str]) -> None:
    """Switches features off in an engine that has not trained yet: now, and again after each step."""
    step = engine.step

    def switch_off() -> None:
        for feature in without:
            _WITHOUT[feature](engine.backend.block_store)

    def step_without() -> None:
        step()
        switch_off()

    switch_off()
    engine.step = step_without
