"""Features of streamed ZO that a case switches off, one at a time: the rows of the paper's Tables 2 and 5.

A case names them under `without`. They exist here alone: no JSON switches them off.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import deepspeed
import torch

from benchmarks.raw_buffer import RawBuffer
from ds_zo.backends.zo.store import ZOStore
from ds_zo.streaming.slot import Slot
from ds_zo.streaming.streams import Streams, made_by, of_device
from ds_zo.streaming.units import Unit


class FreshSlot(Slot):
    """A slot that allocates its memory at each upload and frees the earlier one, outside PyTorch's caching
    allocator."""

    def __init__(self, nbytes: int, streams: Streams) -> None:
        super().__init__(nbytes, streams)
        self._size = nbytes
        self._free: Callable[[], object] = lambda: None
        self.buffer = torch.empty(0, dtype=torch.uint8, device=streams.device)

    def take(self, unit: Unit) -> None:
        super().take(unit)
        device = self.buffer.device
        self._free()
        if device.type == "cuda":
            raw = RawBuffer(self._size, device)
            self.buffer, self._free = torch.as_tensor(raw, device=device), raw.free
        else:
            self.buffer = torch.empty(self._size, dtype=torch.uint8)


def _allocate_at_each_upload(store: ZOStore) -> None:
    """Replaces the slots. A store makes slots anew after the first step, which chooses its interval."""
    for i, slot in enumerate(store.blocks.runtime.slots):
        if not isinstance(slot, FreshSlot):
            nbytes = slot.buffer.numel()
            slot.buffer = torch.empty(0, dtype=torch.uint8, device=store.blocks.device)
            store.blocks.runtime.slots[i] = FreshSlot(nbytes, store.blocks.streams)


def _update_in_own_sweep(store: ZOStore) -> None:
    """Applies the last step's update apart from the next forward. Blocks are uploaded and written back for it."""
    store.materialiser.fold_now(*store.blocks.placement.units)


_AT_EACH_STEP: dict[str, Callable[[ZOStore], None]] = {
    "reuse_buffers": _allocate_at_each_upload,
    "fuse_update": _update_in_own_sweep,
}


def in_turn() -> AbstractContextManager[None]:
    """Context whose engines copy and compute blocks one after the other, in one slot."""
    return made_by(partial(of_device, overlap=False))


def initialize(without: Sequence[str], **arguments: Any) -> Any:
    """The engine of `deepspeed.initialize`, without these features."""
    with in_turn() if "overlap" in without else nullcontext():
        engine: Any = deepspeed.initialize(**arguments)[0]
    step, switches = engine.step, [_AT_EACH_STEP[feature] for feature in without if feature != "overlap"]

    def switch_off() -> None:
        for switch in switches:
            switch(engine.backend.store)

    def step_without() -> None:
        step()
        switch_off()

    if switches:
        switch_off()
        engine.step = step_without
    return engine
