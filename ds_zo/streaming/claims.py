"""Keeps the bytes of units for a writer while training continues.

[Note: replaced buffers] The host buffer of a streamed unit changes only when a fold is sent back, and then as a whole.
So a unit that waits to be written is not copied. If a fold comes first, the writer keeps the buffer, and the fold goes
to a spare buffer, which becomes the unit's own. A buffer that was written becomes a spare. Training reads and writes
the same bytes at the same steps as without a save.

Extra host memory has two parts. One is the buffers of blocks that fold while they wait: at most one more copy of the
streamed blocks, kept for the next save. The other is a copy of the units on the device (embeddings, head, resident
blocks), which fold in place.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import torch

from ds_zo.streaming.host_store import HostStore
from ds_zo.streaming.streams import DONE, Event, Streams
from ds_zo.streaming.units import Unit


class Claim:
    """The bytes of one unit at the time of the save, until they are written."""

    def __init__(
        self,
        unit: Unit,
        store_buffer: torch.Tensor,
        low: torch.Tensor | None,
        *,
        ready: Sequence[Event],
        finish: Callable[[Claim], None],
    ) -> None:
        """`ready`: events after which the bytes are in the buffers. `finish` is called when they are written."""
        self.unit = unit
        self.store_buffer, self.low = store_buffer, low
        self.done = False
        self.released: list[torch.Tensor] = []
        """Buffers that belong to no unit. They become spares when this claim is written."""
        self._ready = ready
        self._finish = finish

    def buffers(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The unit's stored bytes and its low plane, once they are complete. Any thread may call it."""
        for event in self._ready:
            event.synchronize()
        return self.store_buffer, self.low

    def written(self) -> None:
        """Ends the claim, whether its bytes were written or not."""
        self._finish(self)


class Claims:
    """All claims on a model's units, and the spare buffers that units and claims exchange."""

    def __init__(self, store: HostStore, *, streams: Streams, swaps: bool = True) -> None:
        """With `swaps` False streamed units are copied too: other processes use their buffers, which can't be
        replaced."""
        self._store = store
        self._streams = streams
        self._swaps = swaps
        self._lock = threading.Lock()
        self._idle = threading.Condition(self._lock)
        self._unwritten: dict[int, Claim] = {}
        self._spares: dict[int, list[torch.Tensor]] = {}

    def claim(self, unit: Unit) -> Claim:
        """Keeps the unit's present bytes until they are written. The thread that trains calls it."""
        copied: list[torch.Tensor] = []
        store_buffer = unit.store_buffer if unit.streamed and self._swaps else self._copy(unit.store_buffer, copied)
        low = unit.low_buffer
        if low is not None and not (unit.low_streamed and self._swaps):
            low = self._copy(low, copied)
        landed = unit.written_back if unit.streamed or unit.low_streamed else DONE
        done_copying = self._streams.compute.recorded() if copied and not unit.streamed else DONE
        claim = Claim(unit, store_buffer, low, ready=(landed, done_copying), finish=self._finish)
        claim.released += copied
        with self._lock:
            self._unwritten[id(unit)] = claim
        return claim

    def before_overwrite(self, unit: Unit, *, weights: bool, low: bool) -> None:
        """Gives the unit spare buffers where a fold is about to overwrite claimed ones: its stored bytes (`weights`),
        its low plane (`low`) or both. See [Note: replaced buffers]."""
        with self._lock:
            claim = self._unwritten.get(id(unit))
            if claim is None:
                return
            new_store, new_low = unit.store_buffer, unit.low_buffer
            if weights and claim.store_buffer is unit.store_buffer:
                claim.released.append(unit.store_buffer)
                new_store = self._spare(unit.store_buffer.numel())
            if low and unit.low_buffer is not None and claim.low is unit.low_buffer:
                claim.released.append(unit.low_buffer)
                new_low = self._spare(unit.low_buffer.numel())
        if new_store is not unit.store_buffer or new_low is not unit.low_buffer:
            unit.assign_buffers(new_store, new_low, streamed=unit.streamed, low_streamed=unit.low_streamed)

    def wait(self) -> None:
        """Waits until every claim is written. Call it before anything but a fold rewrites stored bytes."""
        with self._idle:
            self._idle.wait_for(lambda: not self._unwritten)

    def _finish(self, claim: Claim) -> None:
        with self._idle:
            if claim.done:
                return
            claim.done = True
            for buffer in claim.released:
                self._spares.setdefault(buffer.numel(), []).append(buffer)
            if self._unwritten.get(id(claim.unit)) is claim:
                del self._unwritten[id(claim.unit)]
            self._idle.notify_all()

    def _copy(self, buffer: torch.Tensor, copied: list[torch.Tensor]) -> torch.Tensor:
        """Copies on the stream that trains, so that the next fold runs after the copy."""
        with self._lock:
            spare = self._spare(buffer.numel())
        spare.copy_(buffer, non_blocking=True)
        copied.append(spare)
        return spare

    def _spare(self, nbytes: int) -> torch.Tensor:
        spares = self._spares.get(nbytes)
        return spares.pop() if spares else self._store.take(nbytes)
