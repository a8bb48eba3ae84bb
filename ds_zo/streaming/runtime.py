"""The runtime executes schedules on four CUDA streams: uploads of blocks, uploads of low planes, compute, downloads.

The compute stream is the caller's current stream. Events named for the transfer that they guard order the streams. The
methods of a pass never block the host. On a CPU device the same code runs in issue order.

[Note: low planes are uploaded ahead] A fold applies a unit's pending updates to its stored weights. It needs the unit's
low plane, whether the unit is streamed or resident. Low planes are uploaded in the order of the folds, each as soon as
a low slot is free. A low slot becomes free when the fold before has used it. So a low plane may be uploaded up to a
whole fold interval of blocks before its fold. Low planes have an upload stream of their own: an upload of a block may
wait for its slot, and would hold up the low plane that the compute stream needs first. Outside a pass, as in an
evaluation, a low plane is uploaded when its unit is used: the host issues these copies long before they are made.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import torch

from ds_zo.streaming.pinned_ring import upload_
from ds_zo.streaming.schedule import NUM_CHUNKS, Action, Kind, sweep
from ds_zo.streaming.streams import DONE, Event, Stream, Streams
from ds_zo.streaming.units import Unit


class BeforeOverwrite(Protocol):
    """Called before a download overwrites a unit's `store_buffer`, its `low_buffer` or both. The callee may first
    assign the unit other buffers."""

    def __call__(self, unit: Unit, *, weights: bool, low: bool) -> None: ...


class Slot:
    """One buffer on the device and its events: `filled` when its upload is done, `drained` when the last kernel has
    used it, `saved[i]` when chunk i of its download is done."""

    def __init__(self, nbytes: int, streams: Streams) -> None:
        self._nbytes = nbytes
        self.buffer = torch.empty(nbytes, dtype=torch.uint8, device=streams.device)
        self.filled = streams.upload_event()
        self.drained = streams.compute.recorded()  # kernels on this stream may still use this memory
        self.saved = [streams.event() for _ in range(NUM_CHUNKS)]
        self.is_saving = False
        """Whether a download of the slot may be under way that no upload has waited for. An upload of a smaller unit
        does not wait for the last chunks."""
        self.unit: Unit | None = None
        """The unit whose bytes the slot holds, or will hold once its upload is done. None: no valid contents."""
        self._version = -1
        """Number of updates that the bytes include; -1 while unknown."""
        self.in_use = False
        """Of a low slot: kernels of a unit's current use read and change it."""

    @property
    def version(self) -> int:
        return self._version

    @property
    def is_current(self) -> bool:
        """Whether the slot holds, or will hold once its upload is done, the stored bytes of its unit. It does not once
        updates have been applied in the slot and are not sent back."""
        return self.unit is not None and self._version == self.unit.version

    def chunks(self, nbytes: int) -> Iterator[tuple[slice, Event]]:
        """The chunks that cover the first `nbytes`, and the events of their downloads. Chunk boundaries do not depend
        on the unit."""
        length = -(-self._nbytes // NUM_CHUNKS)
        for i, saved in enumerate(self.saved):
            if i * length < nbytes:
                yield slice(i * length, min((i + 1) * length, nbytes)), saved

    def take(self, unit: Unit) -> None:
        """Assigns the slot to `unit`, before its upload. The contents are unknown until the whole upload is issued,
        because issuing it may be interrupted."""
        self.unit, self._version = unit, -1

    def uploaded(self) -> None:
        """The whole upload of the slot's unit was issued."""
        assert self.unit is not None
        self._version = self.unit.version

    def updated(self, version: int) -> None:
        """Updates were applied in the slot, which includes `version` of them."""
        self._version = version

    def expire(self) -> None:
        """The contents are not used again. Copies from or to `unit` may still be under way."""
        self._version = -1

    def invalidate(self) -> None:
        """Marks the slot's contents as different from any unit's `store_buffer`."""
        self.unit, self._version = None, -1


class LowSlots:
    """The low slots of a runtime. A slot is in use, or filled ahead of its use (it holds its unit's stored low plane),
    or free."""

    def __init__(self, slots: Sequence[Slot]) -> None:
        self._slots = list(slots)
        """In the order in which they were last filled or freed."""
        self._planned: deque[Unit] = deque()
        """Units whose low planes are still to be uploaded, in the order of their folds."""

    @property
    def ahead(self) -> list[Unit]:
        """The units whose low planes are filled ahead, in the order of their uploads."""
        return [s.unit for s in self._slots if s.unit is not None and s.is_current and not s.in_use]

    @property
    def free_slot(self) -> Slot | None:
        """The slot that has been free for longest."""
        return next((s for s in self._slots if not (s.in_use or s.is_current)), None)

    def plan(self, units: Sequence[Unit]) -> None:
        """Plans the uploads for the coming folds, but for the units whose low planes are there."""
        self._planned = deque(units)
        for unit in self.ahead:
            if unit in self._planned:
                self._planned.remove(unit)

    def next_planned(self) -> Unit | None:
        """The unit whose low plane can be uploaded now, if there is one. A unit that folds twice has its second upload
        after its first fold."""
        if not self._planned or self.free_slot is None or self.slot_of(self._planned[0]) is not None:
            return None
        return self._planned[0]

    def slot_of(self, unit: Unit) -> Slot | None:
        """The slot with the unit's low plane, in use or filled ahead."""
        return next((s for s in self._slots if s.unit is unit and (s.in_use or s.is_current)), None)

    def take(self, unit: Unit) -> Slot:
        """Returns a free slot for an upload of the unit's low plane. The caller has seen to it that there is one."""
        if unit in self._planned:
            self._planned.remove(unit)
        slot = self.free_slot
        assert slot is not None
        self._move_to_end(slot)
        return slot

    def stop_using(self, unit: Unit) -> Slot | None:
        """Ends the use of the unit's low slot, and returns the slot. None: it has none in use."""
        slot = next((s for s in self._slots if s.unit is unit and s.in_use), None)
        if slot is not None:
            slot.in_use = False
        return slot

    def free(self, slot: Slot) -> None:
        slot.in_use = False
        slot.expire()
        self._move_to_end(slot)

    def reclaim(self, *, keep: Collection[Unit]) -> list[Slot]:
        """Frees all slots but those filled ahead for the units in `keep`. Returns the slots that were in use: kernels
        of interrupted uses may still read them."""
        interrupted = [s for s in self._slots if s.in_use]
        for slot in [s for s in self._slots if s.in_use or (s.is_current and s.unit not in keep)]:
            self.free(slot)
        return interrupted

    def _move_to_end(self, slot: Slot) -> None:
        self._slots.remove(slot)
        self._slots.append(slot)


class Runtime:
    """Uploads streamed units to device slots in the order in which a pass uses them, ahead of time where slots allow.

    A pass is `start`, then `acquire` and `release` for each use of a unit, in any order, then `finish`. Units can also
    be used outside a pass, as an evaluation does: uploads ahead then follow the units' own order.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        streams: Streams,
        *,
        num_slots: int,
        num_low_slots: int,
        before_overwrite: BeforeOverwrite | None = None,
        padded: Callable[[int], int] = int,
    ) -> None:
        """`padded`: bytes of a slot that can hold a unit of so many bytes."""
        self.units = list(units)
        self._before_overwrite = before_overwrite
        self.device = streams.device
        self.streams = streams
        self._number = {id(unit): i for i, unit in enumerate(self.units)}
        streamed = [u for u in self.units if u.streamed]
        low_nbytes = max((u.low_nbytes for u in self.units if u.low_streamed), default=0)
        nbytes = max((u.nbytes for u in streamed), default=0)
        nbytes, low_nbytes = padded(nbytes), padded(low_nbytes)
        self.slots = [Slot(nbytes, streams) for _ in range(num_slots if streams.overlaps else 1) if streamed]
        self.low_slots = [Slot(low_nbytes, streams) for _ in range(num_low_slots) if low_nbytes]
        self._lows = LowSlots(self.low_slots)
        self._low_upload = streams.low_upload
        self._default_order = [i for i, unit in enumerate(self.units) if unit.streamed]
        self._order: Sequence[int] = self._default_order
        self._then: list[int] | None = None
        self._actions: deque[Action] = deque()
        self.fold_skipped: Callable[[Unit, Slot], None] = lambda unit, slot: None
        """Folds a unit that all ranks have gathered and that this rank's forward did not use."""
        self.bytes_up = 0
        self.bytes_down = 0
        """Bytes that were uploaded and downloaded so far."""

    def start(
        self,
        order: Sequence[Unit],
        *,
        downloads: Collection[Unit] = (),
        lows: Sequence[Unit] = (),
        then: Sequence[Unit] | None = None,
        collective: bool | None = None,
    ) -> None:
        """Plans a pass over the streamed units of `order` and issues its first uploads.

        Units in `downloads` will be changed, and downloaded after their use. `lows` are the units that fold in this
        pass and then in the next, in the order of the folds: see [Note: low planes are uploaded ahead]. `then` are the
        units that the next pass starts with (None: the next pass starts like this one).

        `collective` has no effect where weights are not sharded. If it is not None, all ranks make this pass. It then
        tells whether another pass like it follows, whose first blocks are gathered at the end of this one.
        """
        self._order = [self._number[id(unit)] for unit in order if unit.streamed]
        self._then = None if then is None else [self._number[id(unit)] for unit in then if unit.streamed]
        lows = [unit for unit in lows if unit.low_streamed and self.streams.overlaps]
        self._reclaim_low_slots(keep=lows)
        self._lows.plan(lows)
        self._plan(self._order, downloads={self._number[id(unit)] for unit in downloads})
        self._issue_uploads()
        self._upload_lows()

    def acquire(self, unit: Unit) -> Slot:
        """Returns the slot that holds `unit`; the compute stream waits for its upload. A unit that is not next in the
        plan (skipped, repeated or reordered blocks) is uploaded at once. The rest of the pass is then planned again."""
        number = self._number[id(unit)]
        self._issue_uploads()
        if not self._actions or self._actions[0].block != number or self._actions[0].kind is not Kind.COMPUTE:
            downloads = {action.block for action in self._actions if action.kind is Kind.DOWNLOAD}
            rest = self._order[self._order.index(number) :] if number in self._order else [number]
            self._plan(rest, downloads=downloads)
            self._issue_uploads()
        action = self._actions.popleft()
        assert action.kind is Kind.COMPUTE and action.block == number
        slot = self.slots[action.slot]
        assert slot.unit is unit, f"slot {action.slot} should hold {unit.name}"
        self.streams.compute.wait(slot.filled)
        return slot

    def acquire_low(self, unit: Unit) -> torch.Tensor | None:
        """Returns the unit's low plane on the device (None if the unit has none). It is uploaded now unless the plan
        has uploaded it ahead."""
        if not unit.low_streamed:
            return unit.low_buffer
        slot = self._lows.slot_of(unit) or self._upload_low(unit)
        slot.in_use = True
        self.streams.compute.wait(slot.filled)
        return slot.buffer

    def before_writing(self, slot: Slot) -> None:
        """Called before a kernel changes a slot's contents: the compute stream waits for a download out of the slot.
        Such a download is possible where a block stays in its slot, as when there are as many slots as blocks."""
        if slot.is_saving:
            for saved in slot.saved:
                self.streams.compute.wait(saved)

    def written(self, unit: Unit, slot: Slot | None) -> None:
        """Called when the last kernel that writes to the unit's slots has been issued. Issues the downloads; later
        kernels may still read the slots. A resident unit has no slot but may have a low plane to download."""
        self._stop_using(unit, slot, download=True)

    def release(self, unit: Unit, slot: Slot | None, *, download: bool = False, keep_low: bool = False) -> None:
        """Called when the last kernel that uses the unit's slots has been issued. Issues the uploads that waited for
        the slot. `download`: kernels have changed the slot and `written` was not called. `keep_low`: a fold of this
        pass will still use the low plane."""
        self._stop_using(unit, slot, download=download, keep_low=keep_low)
        if self._actions and self._actions[0].kind is Kind.DOWNLOAD:
            self._actions.popleft()
        if slot is not None and not slot.is_current:
            slot.invalidate()
        self._issue_uploads()

    def _stop_using(self, unit: Unit, slot: Slot | None, *, download: bool, keep_low: bool = False) -> None:
        low = self._lows.stop_using(unit)
        for used in (slot, low):
            if used is not None:
                self.streams.compute.record(used.drained)
        if download:
            self._download(unit, slot, low)
        if low is not None and not keep_low:
            self._lows.free(low)
            self._upload_lows()

    @contextmanager
    def updating(self, unit: Unit) -> Iterator[torch.Tensor]:
        """Context in which the current stream may change the unit's `store_buffer`, which is on the device: it waits
        for all uploads issued so far, and later uploads wait for it. Yields the buffer.

        After an error some bytes may be changed. The unit's version rises nevertheless: no slot holds these bytes, and
        all ranks gather the unit again."""
        self.streams.compute.wait_stream(self.streams.upload)
        try:
            yield unit.store_buffer
        finally:
            unit.folded(unit.version + 1, stream=self.streams.compute)

    def abandon(self, slot: Slot) -> None:
        """A use of the slot was interrupted. The next upload waits for the kernels that were issued for it."""
        self.streams.compute.record(slot.drained)

    def finish(self) -> None:
        """Ends a pass, complete or interrupted; uploads ahead follow the units' own order again. Slots stay valid where
        they equal their unit's `store_buffer`."""
        self._order = self._default_order
        self._then = None
        self._actions = deque()
        for slot in self.slots:
            if not slot.is_current:
                slot.invalidate()
        self._lows.plan(())
        self._reclaim_low_slots(keep=self._lows.ahead)

    def invalidate_slots(self) -> None:
        """Invalidates all slots, after store buffers were rewritten by other code. The compute stream waits for all
        copies under way, so that the caller may then free the slots."""
        for slot in self._all_slots():
            for event in (slot.filled, *slot.saved):
                self.streams.compute.wait(event)
            slot.invalidate()
        self.finish()

    def prepare_host_write(self, unit: Unit) -> None:
        """Called before the host writes to `unit.store_buffer`. Blocks until the unit's last download is done, and
        invalidates the slots that hold the unit."""
        self.host_wait(unit)
        held = [slot for slot in self._all_slots() if slot.unit is unit]
        for slot in held:
            slot.filled.synchronize()
            slot.invalidate()
        if held:
            self._actions = deque()  # the next `acquire` plans again
            self._reclaim_low_slots(keep=self._lows.ahead)

    def free_buffers(self) -> None:
        """Frees the slots' buffers now. The runtime is part of a reference cycle, so its memory would otherwise stay
        until Python's garbage collector runs."""
        for slot in self._all_slots():
            slot.buffer = torch.empty(0, dtype=torch.uint8, device=self.device)

    def _all_slots(self) -> list[Slot]:
        return [*self.slots, *self.low_slots]

    def host_wait(self, unit: Unit) -> None:
        """Blocks the host until the unit's last download is in `unit.store_buffer`. Not for use within a step."""
        unit.written_back.synchronize()

    def wait_for_copies(self) -> None:
        """Blocks the host until no copy is under way, before host or device memory is freed."""
        for slot in self._all_slots():
            for event in (slot.filled, *slot.saved):
                event.synchronize()

    def _plan(self, order: Sequence[int], *, downloads: Collection[int]) -> None:
        loaded = {
            self._number[id(slot.unit)]: i
            for i, slot in enumerate(self.slots)
            if slot.unit is not None and slot.is_current
        }
        ahead = (self._order if self._then is None else self._then)[: len(self.slots)] if self.streams.overlaps else ()
        self._actions = deque(
            sweep(order, num_slots=len(self.slots), downloads=downloads, loaded=loaded, then=ahead)
            if self.slots
            else ()
        )

    def _issue_uploads(self) -> None:
        while self._actions and self._actions[0].kind is Kind.UPLOAD:
            action = self._actions[0]
            self._upload(action.block, self.slots[action.slot])
            self._actions.popleft()  # only now: an interrupted upload is issued again

    def _upload(self, number: int, slot: Slot) -> None:
        unit = self.units[number]
        self._fill(slot, unit, unit.store_buffer, self.streams.upload)
        self.bytes_up += unit.nbytes

    def _upload_lows(self) -> None:
        """Uploads as many of the next low planes as there are free low slots."""
        while (unit := self._lows.next_planned()) is not None:
            self._upload_low(unit)

    def _upload_low(self, unit: Unit) -> Slot:
        assert unit.low_buffer is not None
        if self._lows.free_slot is None:  # reclaim those of interrupted uses, and the one filled last
            self._reclaim_low_slots(keep=self._lows.ahead[:-1])
        slot = self._lows.take(unit)
        self._fill(slot, unit, unit.low_buffer, self._low_upload)
        self.bytes_up += unit.low_nbytes
        return slot

    def _reclaim_low_slots(self, *, keep: Collection[Unit]) -> None:
        """Frees all low slots but those filled ahead for the units in `keep`. Kernels of an interrupted use may still
        read their low slots: `drained` is recorded after them."""
        for slot in self._lows.reclaim(keep=keep):
            self.streams.compute.record(slot.drained)

    def _fill(self, slot: Slot, unit: Unit, source: torch.Tensor, stream: Stream) -> None:
        for event in (slot.drained, unit.written_back):
            stream.wait(event)
        with stream.issuing():
            slot.take(unit)
            self._copy_up(slot, source, stream)
        stream.record(slot.filled)
        slot.uploaded()

    def _copy_up(self, slot: Slot, source: torch.Tensor, stream: Stream) -> None:
        """Copies `source` to the slot: chunk by chunk behind a download that may be under way, else in one copy."""
        chunks = list(slot.chunks(source.numel())) if slot.is_saving else [(slice(source.numel()), DONE)]
        for chunk, saved in chunks:
            stream.wait(saved)
            upload_(slot.buffer[chunk], source[chunk], slot.filled, stream=stream)
        slot.is_saving &= len(chunks) < len(slot.saved)  # the last chunks of a larger unit are not awaited yet

    def _download(self, unit: Unit, slot: Slot | None, low: Slot | None) -> None:
        if self._before_overwrite is not None:
            self._before_overwrite(unit, weights=slot is not None, low=low is not None)
        with self.streams.download.issuing():
            for used, target in ((slot, unit.store_buffer), (low, unit.low_buffer)):
                if used is None or target is None:
                    continue
                self.streams.download.wait(used.drained)
                for chunk, saved in used.chunks(target.numel()):
                    target[chunk].copy_(used.buffer[chunk], non_blocking=True)
                    self.streams.download.record(saved)
                used.is_saving = True
                self.bytes_down += target.numel()
        unit.folded(unit.version if slot is None else slot.version, stream=self.streams.download)
