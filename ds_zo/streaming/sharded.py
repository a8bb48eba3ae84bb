"""The runtime of a machine's ranks that keep one host store together.

[Note: one order of gathers] In a pass that all ranks make, a block comes to each device as the ranks' pieces: a rank
uploads its own over its own link, an all-gather brings the rest. Ranks must gather the same blocks in the same order
whatever their forwards do, so the order is fixed when the pass starts, by the model and the step alone. A block that
this rank's forward skips is gathered nevertheless, and folded if that is due, since the others count on its piece; one
that it visits again, or out of turn, is read from shared memory by this rank alone. When the pass is over every rank
has made all of its gathers, and those of the first blocks of the next pass.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ds_zo.streaming.node import explain_lost_rank
from ds_zo.streaming.runtime import Runtime
from ds_zo.streaming.shared_store import RanksStore, SharedStore
from ds_zo.streaming.slots import Slot
from ds_zo.streaming.units import Unit


@dataclass(frozen=True)
class _Gather:
    number: int
    low: bool
    """With the low plane: the unit folds in this pass."""


class ShardedRuntime(Runtime):
    """See the module's docstring. Passes that were not announced by `join`, and visits outside passes, are this rank's
    alone."""

    def __init__(self, units: Sequence[Unit], device: torch.device, *, store: RanksStore, **settings: Any) -> None:
        self._store = store
        self._partition = store.partition
        self._joined: bool | None = None
        """Whether the next pass is made by all ranks, and if so, whether another like it follows."""
        self._is_collective = False
        self._to_gather: deque[_Gather] = deque()
        self._to_gather_ahead: deque[int] = deque()
        self._ahead: set[int] = set()
        """What the last pass has gathered for the next."""
        self.fold_skipped: Callable[[Unit, Slot], None] = lambda unit, slot: None
        """Folds a unit that was gathered but that no pass visits."""
        self.bytes_wire = 0
        """Sent to other ranks."""
        super().__init__(units, device, **settings)
        own = device.type == "cuda" and self._overlap
        self._own_gathered = torch.cuda.Stream(device) if own else None
        self._met = torch.cuda.Event() if device.type == "cuda" else None
        store.node.streams += [s for s in (self._own_up, self._own_down, self._own_gathered) if s is not None]

    def _slot_nbytes(self, nbytes: int) -> int:
        return self._partition.padded_nbytes(nbytes)

    def announce_collective_pass(self, *, ahead: bool) -> None:
        self._joined = ahead

    def start(
        self,
        order: Sequence[Unit],
        *,
        downloads: Collection[Unit] = (),
        lows: Sequence[Unit] = (),
        then: Sequence[Unit] | None = None,
    ) -> None:
        joined, self._joined = self._joined, None
        if joined is None:
            super().start(order, downloads=downloads, then=then)
            return
        numbers = [self._number[id(unit)] for unit in order if unit.streamed]
        folding = {self._number[id(unit)] for unit in downloads if unit.low_streamed}
        gathered = self._ahead if joined else set()
        for number in sorted(gathered):
            self._upload_evicted(number)
        self._reclaim_low_slots(keep=())
        for slot in self.slots:  # what this rank alone may have kept would let it gather later than the others
            if slot.unit is not None and self._number[id(slot.unit)] not in gathered:
                slot.invalidate()
        self._to_gather = deque(_Gather(n, n in folding) for n in numbers if n not in gathered)
        if joined:
            self._ahead = set()
            self._to_gather_ahead = deque(numbers[: len(self.slots)] if self._overlap else ())
        self._meet(numbers)
        self._is_collective = True
        lows = [self.units[number] for number in numbers if number in gathered and number in folding]
        for unit in lows:
            self._gather_low(unit)
        super().start(order, downloads=downloads, lows=lows, then=then if joined else ())

    def finish(self) -> None:
        try:
            if self._is_collective:
                for slot in self.slots:
                    self._fold_if_due(slot)
                while self._to_gather:
                    self._gather_next(self.slots[0])
                    self._fold_if_due(self.slots[0])
                while self._to_gather_ahead:
                    self._gather_one_ahead(self._slot_for(self._to_gather_ahead[0]))
        finally:
            self._is_collective = False
            self._to_gather.clear()
            self._to_gather_ahead.clear()
            super().finish()

    def host_wait(self, unit: Unit) -> None:
        super().host_wait(unit)
        if unit.streamed:
            self._store.wait(self._number[id(unit)])

    def wait_for_copies(self) -> None:
        """Not here: a gather whose other ranks are gone never ends. What the current stream does next follows them."""
        self.forget()

    # Uploads

    def _upload(self, number: int, slot: Slot) -> None:
        if self._is_collective:
            self._fold_if_due(slot)
            if any(gather.number == number for gather in self._to_gather):
                while self._to_gather[0].number != number:
                    self._gather_next(slot)
                    self._fold_if_due(slot)
                self._gather_next(slot)
                return
            if not self._to_gather and self._to_gather_ahead and self._to_gather_ahead[0] == number:
                self._gather_one_ahead(slot)
                return
        self._store.wait(number)
        super()._upload(number, slot)

    def _upload_low(self, unit: Unit) -> Slot:
        self._store.wait(self._number[id(unit)])
        return super()._upload_low(unit)

    def _copy_up(self, slot: Slot, home: torch.Tensor, stream: torch.cuda.Stream | None) -> None:
        self._wait_until_free(slot)
        assert isinstance(self._store, SharedStore)
        self._store.copy_whole(slot.buffer[: home.numel()], home)

    def _gather_next(self, slot: Slot) -> None:
        gather = self._to_gather.popleft()
        unit = self.units[gather.number]
        self._gather(unit, slot, unit.store_buffer, unit.nbytes)
        if gather.low:
            self._gather_low(unit)

    def _gather_one_ahead(self, slot: Slot) -> None:
        number = self._to_gather_ahead.popleft()
        self._ahead.add(number)
        self._gather(self.units[number], slot, self.units[number].store_buffer, self.units[number].nbytes)

    def _upload_evicted(self, number: int) -> None:
        """What was gathered ahead and has left its slot since, as this rank read other blocks. Before `_meet`: after
        it, the others may be writing back the block that this one reads."""
        slot = self._slot_for(number)
        if slot.unit is not self.units[number] or not self._is_current(slot):
            self._store.wait(number)
            super()._upload(number, slot)

    def _slot_for(self, number: int) -> Slot:
        """One that holds it, or else one that holds nothing that was gathered ahead."""
        held = [None if slot.unit is None else self._number[id(slot.unit)] for slot in self.slots]
        if number in held:
            return self.slots[held.index(number)]
        return next(slot for slot, there in zip(self.slots, held, strict=True) if there not in self._ahead)

    def _gather_low(self, unit: Unit) -> None:
        assert unit.low_buffer is not None
        slot = self._low_pool.popleft()  # there are as many as slots for units in flight
        self._low_ahead[self._number[id(unit)]] = slot
        self._gather(unit, slot, unit.low_buffer, unit.low_nbytes)

    def _gather(self, unit: Unit, slot: Slot, home: torch.Tensor, nbytes: int) -> None:
        for event in (slot.drained, unit.written_back):
            self._wait(self._up, event)
        self._wait_until_free(slot)
        own = self._store.own(home, nbytes)
        begin = self._partition.begin(nbytes)
        with self._on(self._up):
            slot.take(unit)
            slot.buffer[begin : begin + own.numel()].copy_(own, non_blocking=True)
            with explain_lost_rank(self.device):
                gathering = self._store.node.gather(slot.buffer[: self._slot_nbytes(nbytes)])
        with self._on(self._gathered), explain_lost_rank(self.device):
            for work in gathering:
                work.wait()
        self._record(slot.filled, self._gathered)
        slot.version = unit.version
        self.bytes_up += own.numel()
        self.bytes_wire += self._partition.piece_nbytes(nbytes) * (self._partition.size - 1)

    def _fold_if_due(self, slot: Slot) -> None:
        """A unit that was gathered and not visited leaves its slot."""
        unit = slot.unit
        if unit is None or not self._is_current(slot) or self._number[id(unit)] not in self._downloads:
            return
        self._wait(self._compute, slot.filled)
        self.fold_skipped(unit, slot)
        slot.invalidate()

    def _wait_until_free(self, slot: Slot) -> None:
        """Of a download out of it, and of a gather into it that nobody waited for."""
        self._wait(self._up, slot.filled)
        if slot.is_saving:
            self._wait(self._up, slot.saved[0])
            slot.is_saving = False

    # Downloads

    def _download(self, unit: Unit, slot: Slot | None, low: Slot | None) -> None:
        with self._on(self._down):
            for used, home, nbytes in ((slot, unit.store_buffer, unit.nbytes), (low, unit.low_buffer, unit.low_nbytes)):
                if used is None or home is None:
                    continue
                self._wait(self._down, used.drained)
                own = self._store.own(home, nbytes)
                begin = self._partition.begin(nbytes)
                own.copy_(used.buffer[begin : begin + own.numel()], non_blocking=True)
                self._record(used.saved[0], self._down)
                used.is_saving = True
                self.bytes_down += own.numel()
            self._store.mark_written_back(self._number[id(unit)])
        if slot is not None:
            unit.version = slot.version
        if self._down is not None:
            unit.written_back = unit.written_back or torch.cuda.Event()
            unit.written_back.record(self._down)

    def _meet(self, order: Sequence[int]) -> None:
        """No piece is written back before every rank has begun the pass: until then one may be reading whole blocks by
        itself."""
        with self._on(self._up):
            self._store.node.meet()
        self._record(self._met, self._up)
        self._wait(self._down, self._met)

    @property
    def _up_low(self) -> torch.cuda.Stream | None:
        """Whole low planes are read where `_meet` comes after them."""
        return self._up

    @property
    def _gathered(self) -> torch.cuda.Stream | None:
        """Waits for gathers, so that the next block's upload need not."""
        return self._own_gathered if self._overlap else self._compute
