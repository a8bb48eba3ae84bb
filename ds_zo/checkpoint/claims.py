"""Units that are being saved while training goes on.

[Note: swap on fold] A streamed unit's home changes only when a fold is sent back, and then as a whole. So a unit that
waits to be written is not copied: if a fold comes first, its home is left to the writer and the fold lands in a spare
buffer, which is the unit's home from then on. What was written becomes a spare. Training sees the same bytes at the
same steps as without a save. Extra host memory: the homes of the blocks that fold while they wait, at most one more
copy of the streamed blocks, kept for the next save; and a copy of what lives on the device (edges, resident blocks),
which folds in place.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping

import torch

from ds_zo.checkpoint.layout import describe, unit_key, unit_tensors
from ds_zo.checkpoint.snapshot import Piece
from ds_zo.streaming.host_store import HostStore
from ds_zo.streaming.units import Unit


class Claim:
    """One unit's bytes of one moment, until they are written."""

    def __init__(self, unit: Unit, home: torch.Tensor, low: torch.Tensor | None, *, ready: Callable[[], None]) -> None:
        self.unit = unit
        self.store_buffer, self.low = home, low
        self.done = False
        self.orphans: list[torch.Tensor] = []
        """Buffers that are no unit's any more: spares as soon as this is done."""
        self._ready = ready

    def tensors(self) -> Mapping[str, torch.Tensor]:
        self._ready()
        return unit_tensors(self.unit, self.store_buffer, self.low)


class Claims:
    """All claims on a model's units, and the spare buffers that go round."""

    def __init__(self, store: HostStore, *, swaps: bool = True) -> None:
        """`swaps` False copies streamed units too: their homes are not this process's alone to replace."""
        self._store = store
        self._swaps = swaps
        self._lock = threading.Lock()
        self._idle = threading.Condition(self._lock)
        self._open: dict[int, Claim] = {}
        self._spares: dict[int, list[torch.Tensor]] = {}

    def claim(self, unit: Unit) -> Piece:
        """Holds the unit's bytes of this moment. From the thread that trains."""
        copied: list[torch.Tensor] = []
        home = unit.store_buffer if unit.streamed and self._swaps else self._copy(unit.store_buffer, copied)
        low = unit.low_buffer
        if low is not None and not (unit.low_streamed and self._swaps):
            low = self._copy(low, copied)
        landed = unit.written_back if unit.streamed or unit.low_streamed else None
        done_copying = torch.cuda.Event() if copied and unit.store_buffer.is_cuda else None
        if done_copying is not None:
            done_copying.record()

        def ready() -> None:
            for event in (landed, done_copying):
                if event is not None:
                    event.synchronize()

        claim = Claim(unit, home, low, ready=ready)
        claim.orphans += copied
        with self._lock:
            self._open[id(unit)] = claim
        return Piece(
            claim.tensors, unit.nbytes + unit.low_nbytes, unit_key(describe(unit)), written=lambda: self._finish(claim)
        )

    def before_overwrite(self, unit: Unit, *, weights: bool, low: bool) -> None:
        """A fold is about to be sent back to the unit's home, its low plane or both. See [Note: swap on fold]."""
        with self._lock:
            claim = self._open.get(id(unit))
            if claim is None:
                return
            new_home, new_low = unit.store_buffer, unit.low_buffer
            if weights and claim.store_buffer is unit.store_buffer:
                claim.orphans.append(unit.store_buffer)
                new_home = self._spare(unit.store_buffer.numel())
            if low and unit.low_buffer is not None and claim.low is unit.low_buffer:
                claim.orphans.append(unit.low_buffer)
                new_low = self._spare(unit.low_buffer.numel())
        if new_home is not unit.store_buffer or new_low is not unit.low_buffer:
            unit.assign_buffers(new_home, new_low, streamed=unit.streamed, low_streamed=unit.low_streamed)

    def wait(self) -> None:
        """Until every claim is written: before homes are rewritten by anything but a fold."""
        with self._idle:
            self._idle.wait_for(lambda: not self._open)

    def _finish(self, claim: Claim) -> None:
        with self._idle:
            if claim.done:
                return
            claim.done = True
            for buffer in claim.orphans:
                self._spares.setdefault(buffer.numel(), []).append(buffer)
            if self._open.get(id(claim.unit)) is claim:
                del self._open[id(claim.unit)]
            self._idle.notify_all()

    def _copy(self, buffer: torch.Tensor, copied: list[torch.Tensor]) -> torch.Tensor:
        """On the stream that trains, so that the next fold comes after it."""
        with self._lock:
            spare = self._spare(buffer.numel())
        spare.copy_(buffer, non_blocking=True)
        copied.append(spare)
        return spare

    def _spare(self, nbytes: int) -> torch.Tensor:
        spares = self._spares.get(nbytes)
        return spares.pop() if spares else self._store.take(nbytes)
