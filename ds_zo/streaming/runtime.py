"""The runtime executes schedules as they stand, on the streams that it is given.

The compute stream is the caller's current stream. Events named for the transfer that they guard order the streams. The
methods of a pass never block the host. On a CPU device the same code runs in issue order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import torch

from ds_zo.streaming.schedule import NO_SLOT, Action, Kind, sweep
from ds_zo.streaming.slot import Slot
from ds_zo.streaming.transport import GatheringTransport, Transport
from ds_zo.streaming.units import Unit

_MOST_RECORDED = 10_000


class BeforeOverwrite(Protocol):
    """Called before a download overwrites a unit's `store_buffer`, its `low_buffer` or both. The callee may first
    assign the unit other buffers."""

    def __call__(self, unit: Unit, *, weights: bool, low: bool) -> None: ...


class Runtime:
    """Uploads streamed units to device slots in the order in which a pass uses them, ahead of time where slots allow.

    A pass is `start`, then `acquire` and `release` for each use of a unit, in any order, then `finish`. Units can also
    be used outside a pass, as an evaluation does: uploads ahead then follow the units' own order.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        transport: Transport,
        *,
        num_slots: int,
        num_low_slots: int,
        before_overwrite: BeforeOverwrite | None = None,
    ) -> None:
        self.units = list(units)
        self.transport, self.streams, self.device = transport, transport.streams, transport.streams.device
        self._before_overwrite = before_overwrite
        self._number = {id(unit): i for i, unit in enumerate(self.units)}
        self._streamed = {i for i, unit in enumerate(self.units) if unit.streamed}
        nbytes = max((self.units[i].nbytes for i in self._streamed), default=0)
        low_nbytes = max((unit.low_nbytes for unit in self.units if unit.low_streamed), default=0)
        self.slots = [
            Slot(transport.slot_nbytes(nbytes), self.streams) for _ in range(num_slots if self._streamed else 0)
        ]
        self.low_slots = [
            Slot(transport.slot_nbytes(low_nbytes), self.streams) for _ in range(num_low_slots if low_nbytes else 0)
        ]
        self._default_order = list(range(len(self.units)))
        self._order = self._default_order
        self._then: Sequence[int] | None = None
        self._lows_now: list[int] = []
        self._lows_next: list[int] = []
        """Blocks that fold in this pass and in the next, of those with a low plane on the host."""
        self._actions: deque[Action] = deque()
        self._is_stale = False
        """The slots do not hold what `_actions` expects."""
        self.executed: deque[Action] = deque(maxlen=_MOST_RECORDED)
        """The last actions that were executed since the last pass began."""
        self.is_collective = False
        """Whether a collective pass is running."""
        self._ahead: set[int] = set()
        """The blocks that the last collective pass has gathered for the next one."""
        self._next_ahead: set[int] = set()
        self._fold: Callable[[Unit, Slot], None] | None = None
        self._slots_agree = True
        """Whether slots are known to hold what they must, whichever blocks each rank's forward has used."""

    # A pass

    def start(
        self,
        order: Sequence[Unit],
        *,
        downloads: Collection[Unit] = (),
        lows: Sequence[Unit] = (),
        then: Sequence[Unit] | None = None,
        collective: bool | None = None,
        fold: Callable[[Unit, Slot], None] | None = None,
    ) -> None:
        """Plans a pass over the units of `order` and issues its first uploads.

        Units in `downloads` will be changed, and downloaded after their use. `lows` are the units that fold in this
        pass and then in the next, in the order of the folds: see [Note: low planes are uploaded ahead]. `then` are the
        units that the next pass starts with (None: the next pass starts like this one).

        `collective` has no effect where one rank stores whole units. If it is not None, all ranks make this pass
        ([Note: one order of gathers]). It then tells whether another pass like it follows, whose first blocks are
        gathered at the end of this one. `fold` folds a unit of `downloads` that this rank's forward did not use.
        """
        self._order = self._numbers(order)
        self._then = None if then is None else self._numbers(then)
        to_download = {self._number[id(unit)] for unit in downloads if unit.streamed or unit.low_streamed}
        folding = self._numbers(unit for unit in lows if unit.low_streamed)
        self._lows_now = [i for n, i in enumerate(folding) if i in to_download and i not in folding[:n]]
        self._lows_next = [i for n, i in enumerate(folding) if i not in to_download or i in folding[:n]]
        self._fold = fold
        self.executed.clear()
        if isinstance(self.transport, GatheringTransport):
            self._lows_next = []
            if collective is None:
                self._lows_now = []
            else:
                self._start_collective(self.transport, repeats=collective)
        self._reclaim_low_slots(keep={*self._lows_now, *self._lows_next} if not self.is_collective else ())
        self._plan(self._order, downloads=to_download)
        self._advance()

    def _start_collective(self, transport: GatheringTransport, *, repeats: bool) -> None:
        """Brings the slots into the state that all ranks plan with: they hold the blocks that were gathered ahead. This
        rank reads missing ones before `meet`, because other ranks may write them back afterwards."""
        ahead = self._ahead if repeats else set()
        for slot in self.slots:  # a block that only this rank has kept would change the order of its gathers
            if self._held(slot) not in ahead:
                slot.invalidate()
        for number in sorted(ahead - self._loaded(self.slots).keys()):
            transport.fetch(self.units[number], next(slot for slot in self.slots if slot.unit is None))
        transport.meet([self.units[i] for i in self._order if i in self._streamed])
        self._slots_agree = transport.reads_alone
        self.is_collective = True
        if repeats:
            self._next_ahead = set(self._first_of_next())
        else:
            self._then, self._next_ahead = (), self._ahead

    def acquire(self, unit: Unit) -> Slot | None:
        """Returns the slot that holds `unit`; the compute stream waits for its upload. None for a unit on the device. A
        streamed unit that is not next in the plan (skipped, repeated or reordered blocks) is uploaded at once. The rest
        of the pass is then planned again, unless it is collective."""
        if (number := self._number.get(id(unit))) is None:
            return None
        if not self.is_collective and not self._slots_agree:
            self.invalidate_slots()
            self._slots_agree = True
        self._advance()
        if not self._is_next(number):
            if not unit.streamed:
                return None
            self._go_to(number)
        if self._is_next(number):
            action = self._pop()
            if action.slot == NO_SLOT:
                return None
            slot = self.slots[action.slot]
        else:
            slot = self._slot_for(unit)
        if self._held(slot) != number:  # only where this rank uses blocks that a collective pass does not plan
            self.transport.fetch(unit, slot)
        self.streams.compute.wait(slot.filled)
        return slot

    def acquire_low(self, unit: Unit) -> torch.Tensor | None:
        """Returns the unit's low plane on the device (None if the unit has none). It is uploaded now unless the plan
        has uploaded it ahead."""
        if not unit.low_streamed:
            return unit.low_buffer
        slot = next((s for s in self.low_slots if s.unit is unit and (s.in_use or s.is_current)), None)
        if slot is None:
            slot = self._free_low_slot()
            self.transport.fetch(unit, slot, low=True)
            self._is_stale = bool(self._actions) and not self.is_collective
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
        low = self._stop_using(unit, slot)
        if self._before_overwrite is not None:
            self._before_overwrite(unit, weights=slot is not None, low=low is not None)
        self.transport.commit(unit, slot, low)
        if low is not None:
            low.expire()
        planned = [a for a in self._actions if a.kind is Kind.DOWNLOAD and self.units[a.block] is unit]
        for action in planned:
            self._actions.remove(action)
            self.executed.append(action)
        while self._actions and self._actions[0].kind is Kind.LOW_UPLOAD and not self._is_stale:
            self._execute()

    def release(self, unit: Unit, slot: Slot | None) -> None:
        """Called when the last kernel that uses the unit's slots has been issued. Issues the uploads that waited for
        the slot."""
        low = self._stop_using(unit, slot)
        if low is not None and not self._folds_later(unit):
            low.expire()
        if slot is not None and not slot.is_current:
            slot.invalidate()
        self._advance()

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
        """Ends a pass, complete or interrupted. Slots stay valid where they equal their unit's stored bytes. A
        collective pass first makes what is left of its copies."""
        try:
            if self.is_collective:
                while self._actions:
                    self._skip()
                self._ahead = self._next_ahead
        finally:
            self.is_collective, self._fold = False, None
            self._order, self._then = self._default_order, None
            self._lows_now, self._lows_next = [], []
            self._actions.clear()
            self._is_stale = False
            for slot in self.slots:
                if not slot.is_current:
                    slot.invalidate()
            self._reclaim_low_slots(keep=self._default_order)

    # The actions of a plan

    def _numbers(self, units: Iterable[Unit]) -> list[int]:
        return [self._number[id(unit)] for unit in units]

    def _held(self, slot: Slot) -> int | None:
        """The block whose stored bytes the slot holds, or will hold once its upload is done."""
        return self._number[id(slot.unit)] if slot.unit is not None and slot.is_current else None

    def _loaded(self, slots: Sequence[Slot]) -> dict[int, int]:
        """The slots that hold stored bytes for a later use, by block."""
        held = ((self._held(slot), i) for i, slot in enumerate(slots) if not slot.in_use)
        return {number: i for number, i in held if number is not None}

    def _first_of_next(self) -> list[int]:
        """The streamed blocks that the next pass starts with, as many as there are slots."""
        then = self._order if self._then is None else self._then
        return [i for i in then if i in self._streamed][: len(self.slots)]

    def _plan(self, order: Sequence[int], *, downloads: Collection[int]) -> None:
        self._is_stale = False
        self._actions = deque(
            sweep(
                order,
                streamed=self._streamed,
                num_slots=len(self.slots),
                downloads=downloads,
                loaded=self._loaded(self.slots),
                then=self._first_of_next(),
                lows=[*(i for i in self._lows_now if i in downloads), *self._lows_next],
                low_slots=[i for i, slot in enumerate(self.low_slots) if not (slot.in_use or slot.is_current)],
                loaded_lows=self._loaded(self.low_slots),
                gathers=self.is_collective,
            )
        )

    def _plan_again(self, order: Sequence[int]) -> None:
        """Plans the rest of the pass again, over `order`."""
        self._plan(order, downloads={action.block for action in self._actions if action.kind is Kind.DOWNLOAD})

    def _advance(self) -> None:
        """Issues the copies up to the next computation. Downloads of units that were not changed are left out."""
        if self._is_stale:
            self._plan_again([action.block for action in self._actions if action.kind is Kind.COMPUTE])
        while self._actions and (kind := self._actions[0].kind) is not Kind.COMPUTE:
            if kind is Kind.DOWNLOAD:
                self._actions.popleft()
            else:
                self._execute()

    def _execute(self) -> None:
        """Issues the copy that is next. An interrupted upload is issued again; a gather is not, because the other ranks
        gather once."""
        action = self._actions[0]
        unit, is_low = self.units[action.block], action.kind.is_low
        slot = (self.low_slots if is_low else self.slots)[action.slot]
        if action.kind in (Kind.UPLOAD, Kind.LOW_UPLOAD):
            self.transport.fetch(unit, slot, low=is_low)
            self._pop()
            return
        assert isinstance(self.transport, GatheringTransport)
        self._pop()
        self.transport.gather(unit, slot, low=is_low)

    def _pop(self) -> Action:
        action = self._actions.popleft()
        self.executed.append(action)
        return action

    def _is_next(self, number: int) -> bool:
        return bool(self._actions) and self._actions[0].block == number and self._actions[0].kind is Kind.COMPUTE

    def _go_to(self, number: int) -> None:
        """Makes the computation of a block the next action, although the plan has another one there. A collective pass
        keeps its plan: the block may be none of the rest."""
        if not self.is_collective:
            self._plan_again(self._order[self._order.index(number) :] if number in self._order else [number])
            self._advance()
        elif any(action.block == number and action.kind is Kind.COMPUTE for action in self._actions):
            while not self._is_next(number):
                self._skip()

    def _skip(self) -> None:
        """Executes the next actions of a collective pass although this rank's forward does not use their block."""
        if self._actions[0].kind is Kind.COMPUTE:
            self._actions.popleft()
        if self._actions and self._actions[0].kind is Kind.DOWNLOAD:
            self._fold_early(self.slots[self._actions[0].slot])
        self._advance()

    def _slot_for(self, unit: Unit) -> Slot:
        """A slot for a unit that the plan does not bring: one that holds it, or else the one whose block is used
        last."""
        for slot in self.slots:
            if slot.unit is unit and slot.is_current:
                return slot
        uses = [self.slots[action.slot] for action in self._actions if action.kind is Kind.COMPUTE]
        slot = max(self.slots, key=lambda slot: uses.index(slot) if slot in uses else len(uses))
        self._fold_early(slot)
        return slot

    def _fold_early(self, slot: Slot) -> None:
        """Folds the slot's unit if the pass has still to do so. Until then its bytes in memory that ranks share cannot
        be read: other ranks may be writing their folds."""
        unit = slot.unit
        if self._fold is not None and unit is not None and slot.is_current and self._folds_later(unit):
            self.streams.compute.wait(slot.filled)
            self._fold(unit, slot)

    # Slots

    def _stop_using(self, unit: Unit, slot: Slot | None) -> Slot | None:
        """Records that the last kernels which use the unit's slots were issued. Returns the low slot that it uses."""
        low = next((s for s in self.low_slots if s.unit is unit and s.in_use), None)
        for used in (slot, low):
            if used is not None:
                self.streams.compute.record(used.drained)
                used.in_use = False
        return low

    def _folds_later(self, unit: Unit) -> bool:
        """Whether the pass has yet to fold the unit."""
        number = self._number[id(unit)]
        return any(action.block == number and action.kind is Kind.DOWNLOAD for action in self._actions)

    def _free_low_slot(self) -> Slot:
        """A low slot for an upload that was not planned: of those filled ahead, one is given up if none is free."""
        if all(slot.in_use or slot.is_current for slot in self.low_slots):
            self._reclaim_low_slots(keep=list(self._loaded(self.low_slots))[:-1])
        return next(slot for slot in self.low_slots if not (slot.in_use or slot.is_current))

    def _reclaim_low_slots(self, *, keep: Collection[int]) -> None:
        """Frees all low slots but those filled ahead for the blocks in `keep`. Kernels of an interrupted use may still
        read their low slots: `drained` is recorded after them."""
        for slot in self.low_slots:
            if slot.in_use:
                self.streams.compute.record(slot.drained)
            if slot.in_use or self._held(slot) not in keep:
                slot.in_use = False
                slot.expire()

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
        unit.may_be_changed = True
        for slot in self._all_slots():
            if slot.unit is unit:
                slot.filled.synchronize()
                slot.in_use = False
                slot.invalidate()
                self._is_stale = bool(self._actions) and not self.is_collective

    def free_buffers(self) -> None:
        """Frees the slots' buffers now."""
        for slot in self._all_slots():
            slot.free()

    def _all_slots(self) -> list[Slot]:
        return [*self.slots, *self.low_slots]

    def host_wait(self, unit: Unit) -> None:
        """Blocks the host until the unit's last download is in `unit.store_buffer`. Not for use within a step."""
        self.transport.host_wait(unit)

    def wait_for_copies(self) -> None:
        """Waits until no copy is under way, before host or device memory is freed. Where blocks are gathered only the
        current stream waits: a gather never ends if other ranks have exited."""
        if isinstance(self.transport, GatheringTransport):
            self.invalidate_slots()
            return
        for slot in self._all_slots():
            for event in (slot.filled, *slot.saved):
                event.synchronize()
