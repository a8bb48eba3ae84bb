"""The runtime for ranks that store the blocks together, each rank one shard of every block.

[Note: one order of gathers] All ranks make a collective pass together. Every rank uploads its own shard of a block over
its own link, and an all-gather completes the block on each device. All ranks must gather the same blocks in the same
order, whatever their forwards do. So the order is fixed when the pass starts, by the model and the step alone. A block
that this rank's forward skips is gathered nevertheless, because the other ranks need this rank's shard. It is folded if
its fold is due. A block that the forward uses again, or out of order, is read from shared memory by this rank alone.
When the pass ends, every rank has made all gathers of the pass and those of the first blocks of the next pass.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from typing import Any

import torch

from ds_zo.streaming.node import explain_lost_rank
from ds_zo.streaming.runtime import Runtime, Slot
from ds_zo.streaming.shared_store import RanksStore
from ds_zo.streaming.streams import Stream, Streams
from ds_zo.streaming.units import Unit


class ShardedRuntime(Runtime):
    """A runtime whose collective passes gather blocks from all ranks; see [Note: one order of gathers].

    In passes that are not collective, and outside passes, this rank reads whole blocks by itself. If it cannot
    ([Note: device shards]), every upload is a gather, and slots must hold the same units on all ranks.
    """

    def __init__(self, units: Sequence[Unit], streams: Streams, *, store: RanksStore, **settings: Any) -> None:
        super().__init__(units, streams, padded=store.partition.padded_nbytes, **settings)
        self._store = store
        self._partition = store.partition
        self.is_collective = False
        """Whether a collective pass runs."""
        self._to_gather: deque[int] = deque()
        self._to_gather_ahead: deque[int] = deque()
        """Numbers of the units that this collective pass has still to gather, for itself and for the next pass."""
        self._ahead: set[int] = set()
        """Numbers of the units that the last collective pass has gathered for the next one."""
        self._to_fold: set[int] = set()
        """Numbers of the units that fold in this collective pass and have not been downloaded yet."""
        self._slots_agree = True
        """Whether slots are known to hold what they must, whichever blocks each rank's forward has used."""
        self.bytes_wire = 0
        """Bytes that this rank has sent to other ranks."""
        self._met = streams.event()
        self._low_upload = streams.upload  # `_meet` on it then follows this rank's reads of whole low planes

    def start(
        self,
        order: Sequence[Unit],
        *,
        downloads: Collection[Unit] = (),
        lows: Sequence[Unit] = (),
        then: Sequence[Unit] | None = None,
        collective: bool | None = None,
    ) -> None:
        if collective is None:
            super().start(order, downloads=downloads, then=then)
            return
        numbers = [self._number[id(unit)] for unit in order if unit.streamed]
        self._to_fold = {self._number[id(unit)] for unit in downloads}
        gathered = self._ahead if collective else set()
        for number in sorted(gathered):
            self._upload_evicted(number)
        self._reclaim_low_slots(keep=())
        for slot in self.slots:  # a block that only this rank has kept would change the order of its gathers
            if slot.unit is not None and self._number[id(slot.unit)] not in gathered:
                slot.invalidate()
        self._to_gather = deque(number for number in numbers if number not in gathered)
        if collective:
            self._ahead = set()
            self._to_gather_ahead = deque(numbers[: len(self.slots)] if self.streams.overlaps else ())
        self._meet(numbers)
        self.is_collective = True
        lows = [self.units[number] for number in numbers if number in gathered and self._gathers_low(number)]
        for unit in lows:
            self._gather_low(unit)
        super().start(order, downloads=downloads, lows=lows, then=then if collective else ())

    def acquire(self, unit: Unit) -> Slot:
        if not self.is_collective and not self._slots_agree:
            self.invalidate_slots()
            self._slots_agree = True
        return super().acquire(unit)

    def finish(self) -> None:
        try:
            if self.is_collective:
                for slot in self.slots:
                    self._fold_if_due(slot)
                while self._to_gather:
                    self._gather_next(self.slots[0])
                    self._fold_if_due(self.slots[0])
                while self._to_gather_ahead:
                    self._gather_one_ahead(self._slot_for(self._to_gather_ahead[0]))
        finally:
            self.is_collective = False
            self._to_fold = set()
            self._to_gather.clear()
            self._to_gather_ahead.clear()
            super().finish()

    def host_wait(self, unit: Unit) -> None:
        super().host_wait(unit)
        if unit.streamed:
            self._store.wait(self._number[id(unit)])

    def wait_for_copies(self) -> None:
        """Makes the current stream wait for the copies. Does not block the host: a gather never ends if other ranks
        have exited."""
        self.invalidate_slots()

    # Uploads

    def _upload(self, number: int, slot: Slot) -> None:
        if self.is_collective:
            self._fold_if_due(slot)
            if number in self._to_gather:
                while self._to_gather[0] != number:
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

    def _copy_up(self, slot: Slot, source: torch.Tensor, stream: Stream) -> None:
        self._wait_until_free(slot)
        assert slot.unit is not None
        self.bytes_wire += self._store.copy_up(slot.buffer, slot.unit, source)

    def _gather_next(self, slot: Slot) -> None:
        number = self._to_gather.popleft()
        unit = self.units[number]
        self._gather(unit, slot, unit.store_buffer, unit.nbytes)
        if self._gathers_low(number):
            self._gather_low(unit)

    def _gathers_low(self, number: int) -> bool:
        """Whether the low plane is gathered with the unit, because the unit has still to fold in this pass."""
        return number in self._to_fold and self.units[number].low_streamed

    def _gather_one_ahead(self, slot: Slot) -> None:
        number = self._to_gather_ahead.popleft()
        self._ahead.add(number)
        self._gather(self.units[number], slot, self.units[number].store_buffer, self.units[number].nbytes)

    def _upload_evicted(self, number: int) -> None:
        """Uploads a unit that was gathered ahead and has lost its slot, because this rank has read other blocks. Must
        precede `_meet`: after it, other ranks may write back the block that this rank reads."""
        slot = self._slot_for(number)
        if slot.unit is not self.units[number] or not slot.is_current:
            self._store.wait(number)
            super()._upload(number, slot)

    def _slot_for(self, number: int) -> Slot:
        """The slot that holds unit `number`, or else one whose unit was not gathered ahead."""
        held = [None if slot.unit is None else self._number[id(slot.unit)] for slot in self.slots]
        if number in held:
            return self.slots[held.index(number)]
        return next(slot for slot, there in zip(self.slots, held, strict=True) if there not in self._ahead)

    def _gather_low(self, unit: Unit) -> None:
        assert unit.low_buffer is not None
        slot = self._lows.take(unit)  # a free one: there are as many low slots as slots
        self._gather(unit, slot, unit.low_buffer, unit.low_nbytes)

    def _gather(self, unit: Unit, slot: Slot, stored: torch.Tensor, nbytes: int) -> None:
        for event in (slot.drained, unit.written_back):
            self.streams.upload.wait(event)
        self._wait_until_free(slot)
        own = self._store.own(stored, nbytes)
        begin = self._partition.begin(nbytes)
        with self.streams.upload.issuing():
            slot.take(unit)
            slot.buffer[begin : begin + own.numel()].copy_(own, non_blocking=True)
            with explain_lost_rank(self.device):
                gathering = self._store.node.gather(slot.buffer[: self._partition.padded_nbytes(nbytes)])
        with self.streams.gathered.issuing(), explain_lost_rank(self.device):
            for work in gathering:
                work.wait()
        self.streams.gathered.record(slot.filled)
        slot.uploaded()
        self.bytes_up += own.numel()
        self.bytes_wire += self._partition.shard_nbytes(nbytes) * (self._partition.size - 1)

    def _fold_if_due(self, slot: Slot) -> None:
        """Folds the slot's unit if it was gathered to fold in this pass and the forward has not used it."""
        unit = slot.unit
        if unit is None or not slot.is_current or self._number[id(unit)] not in self._to_fold:
            return
        self.streams.compute.wait(slot.filled)
        self.fold_skipped(unit, slot)
        slot.invalidate()

    def _wait_until_free(self, slot: Slot) -> None:
        """Makes the upload stream wait for a download out of the slot, and for a gather into it that no kernel has
        waited for."""
        self.streams.upload.wait(slot.filled)
        if slot.is_saving:
            self.streams.upload.wait(slot.saved[0])
            slot.is_saving = False

    # Downloads

    def _download(self, unit: Unit, slot: Slot | None, low: Slot | None) -> None:
        self._to_fold.discard(self._number[id(unit)])
        with self.streams.download.issuing():
            for used, stored, nbytes in (
                (slot, unit.store_buffer, unit.nbytes),
                (low, unit.low_buffer, unit.low_nbytes),
            ):
                if used is None or stored is None:
                    continue
                self.streams.download.wait(used.drained)
                own = self._store.own(stored, nbytes)
                begin = self._partition.begin(nbytes)
                own.copy_(used.buffer[begin : begin + own.numel()], non_blocking=True)
                self.streams.download.record(used.saved[0])
                used.is_saving = True
                self.bytes_down += own.numel()
            self._store.mark_written_back(self._number[id(unit)])
        unit.folded(unit.version if slot is None else slot.version, stream=self.streams.download)

    def _meet(self, order: Sequence[int]) -> None:
        """Orders every download of this pass after the start of the pass on all ranks: until a rank has started it,
        that rank may be reading whole blocks by itself."""
        self._slots_agree = self._store.reads_alone
        with self.streams.upload.issuing():
            self._store.meet(order)
        self.streams.upload.record(self._met)
        self.streams.download.wait(self._met)
