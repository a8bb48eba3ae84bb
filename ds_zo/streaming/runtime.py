"""Executes schedules on four streams: uploads of blocks and of low planes, compute (the caller's) and downloads.

Order is kept by events named for the hand-off they guard; nothing here waits on the host. On a CPU "device" the same
code runs in issue order.

[Note: low planes come ahead] A fold needs its unit's low plane, whether the unit streams or stays. Low planes come in
the order of the folds, each as soon as a slot for them is free, which is when the fold before it has been made: up to a
whole interval of blocks early. On a stream of their own, for an upload of a block may wait for its slot while the low
plane is what the computing waits for.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import torch

from ds_zo.streaming.schedule import Action, Kind, sweep
from ds_zo.streaming.slots import Slot
from ds_zo.streaming.units import Unit

WantsLow = Callable[[Unit], bool]
"""Whether a visit outside a pass will read a unit's low plane."""


class BeforeOverwrite(Protocol):
    """Told that a download is about to replace a unit's home, its low plane or both; it may give the unit others."""

    def __call__(self, unit: Unit, *, weights: bool, low: bool) -> None: ...


class Runtime:
    """Brings streamed units to device slots in the order a pass visits them, ahead of time where slots allow.

    A pass is `start`, then for each visit `arrive` .. `depart`, in any order, then `finish`. Visits outside a pass (an
    evaluation that nobody announced) work too: they follow the standing order.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        device: torch.device,
        *,
        num_slots: int,
        num_low_slots: int,
        overlap: bool = True,
        reuse_buffers: bool = True,
        before_overwrite: BeforeOverwrite | None = None,
    ) -> None:
        self.units = list(units)
        self._before_overwrite = before_overwrite
        self.device = device
        self._number = {id(unit): i for i, unit in enumerate(self.units)}
        streamed = [u for u in self.units if u.streamed]
        low_nbytes = max((u.low_nbytes for u in self.units if u.low_streamed), default=0)
        nbytes = max((u.nbytes for u in streamed), default=0)
        self._overlap = overlap
        nbytes, low_nbytes = self._slot_nbytes(nbytes), self._slot_nbytes(low_nbytes)
        self.slots = [Slot(nbytes, device, reuse=reuse_buffers) for _ in range(num_slots if overlap else 1) if streamed]
        self.low_slots = [Slot(low_nbytes, device) for _ in range(num_low_slots) if low_nbytes]
        self._low_pool = deque(self.low_slots)
        self._low_ahead: dict[int, Slot] = {}
        """Filled ahead, for visits to come."""
        self._low_in_use: dict[int, Slot] = {}
        """What a visit reads and changes."""
        self._low_order: deque[int] = deque()
        """Whose low planes are to come, in the order of their folds."""
        own = device.type == "cuda" and overlap
        self._own_up, self._own_up_low, self._own_down = (torch.cuda.Stream(device) if own else None for _ in range(3))
        self._standing_order = [i for i, unit in enumerate(self.units) if unit.streamed]
        self._downloads: set[int] = set()
        self._actions: deque[Action] = deque()
        self._in_pass = False
        self.wants_low: WantsLow | None = None
        self.bytes_up = 0
        self.bytes_down = 0
        self.finish()

    def _slot_nbytes(self, nbytes: int) -> int:
        """What a slot for so many bytes takes."""
        return nbytes

    def announce_collective_pass(self, *, ahead: bool) -> None:
        """The next pass is made by every rank of a host store that is sharded. `ahead`: another like it follows."""

    def start(
        self,
        order: Sequence[Unit],
        *,
        downloads: Collection[Unit] = (),
        lows: Sequence[Unit] = (),
        then: Sequence[Unit] | None = None,
    ) -> None:
        """Plans a pass over the streamed units of `order` and sets its first uploads going. `downloads` are sent back
        after their visit. `lows` fold in this pass, then in the next, in this order: see [Note: low planes come ahead].
        `then` is what the next pass starts with (None: what this one does)."""
        self._order = [self._number[id(unit)] for unit in order if unit.streamed]
        self._then = None if then is None else [self._number[id(unit)] for unit in then if unit.streamed]
        self._downloads = {self._number[id(unit)] for unit in downloads}
        self._in_pass = True
        self._low_order = deque(self._number[id(unit)] for unit in lows if unit.low_streamed and self._overlap)
        self._reclaim_low_slots(keep=self._low_order)
        for number in self._low_ahead:
            self._low_order.remove(number)
        self._plan(self._order)
        self._issue_uploads()
        self._upload_lows()

    def acquire(self, unit: Unit) -> Slot:
        """The slot that holds `unit`; the compute stream waits for its upload. A unit that the plan did not expect next
        (skipped, repeated or reordered blocks) is fetched at once and the plan made anew from there."""
        number = self._number[id(unit)]
        self._issue_uploads()
        if not self._actions or self._actions[0].block != number or self._actions[0].kind is not Kind.COMPUTE:
            self._plan(self._order[self._order.index(number) :] if number in self._order else [number])
            self._issue_uploads()
        action = self._actions.popleft()
        assert action.kind is Kind.COMPUTE and action.block == number
        slot = self.slots[action.slot]
        assert slot.unit is unit, f"slot {action.slot} should hold {unit.name}"
        self._wait(self._compute, slot.filled)
        return slot

    def acquire_low(self, unit: Unit) -> torch.Tensor | None:
        """The unit's low plane on the device (None where it has none); uploaded ahead when the plan knew, else now."""
        if not unit.low_streamed:
            return unit.low_buffer
        number = self._number[id(unit)]
        slot = self._low_in_use.get(number) or self._low_ahead.pop(number, None) or self._upload_low(unit)
        self._low_in_use[number] = slot
        self._wait(self._compute, slot.filled)
        return slot.buffer

    def before_writing(self, slot: Slot) -> None:
        """A kernel is about to change what a slot holds. A block that never left its slot, as where slots are as many
        as blocks, may still be on its way home from there."""
        if slot.is_saving:
            for saved in slot.saved:
                self._wait(self._compute, saved)

    def written(self, unit: Unit, slot: Slot | None, *, download: bool | None = None) -> None:
        """The last kernel that writes to the unit's slots has been issued: what the plan sends back goes, while others
        may still read it. A resident unit has no slot, but may have a low plane to send back. `download` decides where
        the plan cannot know: a block that is visited again before it is changed."""
        number = self._number[id(unit)]
        low = self._low_in_use.pop(number, None)
        for used in (slot, low):
            if used is not None:
                self._record(used.drained, self._compute)
        if number in self._downloads if download is None else download:
            self._download(unit, slot, low)
            self._downloads.discard(number)
        if low is not None and download is False and number in self._downloads:  # it was read before its fold
            self._low_ahead[number] = low
        elif low is not None:
            self._low_pool.append(low)
            self._upload_lows()

    def release(self, unit: Unit, slot: Slot | None, *, download: bool | None = None) -> None:
        """The last kernel that touches the unit's slots has been issued: it is `written`, if that was not said before,
        and uploads that waited go."""
        self.written(unit, slot, download=download)
        if self._actions and self._actions[0].kind is Kind.DOWNLOAD:
            self._actions.popleft()
        if slot is not None and slot.version != unit.version:
            slot.invalidate()
        self._issue_uploads()

    def abandon(self, slot: Slot) -> None:
        """A visit broke off: what was issued for it may still be using the slot."""
        self._record(slot.drained, self._compute)

    def finish(self) -> None:
        """The pass is over, whole or broken off: back to the standing order. Slots stay valid where they equal their
        unit's home."""
        self._order = self._standing_order
        self._then = None
        self._downloads = set()
        self._in_pass = False
        self._actions = deque()
        for slot in self.slots:
            if not self._is_current(slot):
                slot.invalidate()
        self._low_order = deque()
        self._reclaim_low_slots(keep=self._low_ahead)

    def forget(self) -> None:
        """Homes were rewritten behind the slots' back: nothing that was brought up counts any more. Copies under way
        come before whatever the compute stream does next, so that slots may be freed."""
        for slot in self._all_slots():
            for event in (slot.filled, *slot.saved):
                self._wait(self._compute, event)
            slot.invalidate()
        self.finish()

    def prepare_host_write(self, unit: Unit) -> None:
        """A caller is about to write to `unit.store_buffer`. Waits until the unit's last download has arrived, and
        forgets the unit's copies in slots."""
        self.host_wait(unit)
        held = [slot for slot in self._all_slots() if slot.unit is unit]
        for slot in held:
            if slot.filled is not None:
                slot.filled.synchronize()
            slot.invalidate()
        if held:
            self._actions = deque()  # the next visit plans anew
            self._reclaim_low_slots(keep=self._low_ahead)

    def free_buffers(self) -> None:
        """Frees what slots hold, now: who asks a runtime and whom it asks know each other, and would keep it until
        Python looks for such rings."""
        for slot in self._all_slots():
            slot.buffer = torch.empty(0, dtype=torch.uint8, device=self.device)

    def _all_slots(self) -> list[Slot]:
        return [*self.slots, *self.low_slots]

    def host_wait(self, unit: Unit) -> None:
        """Blocks the host until `unit.store_buffer` holds what was sent back. For readers outside the hot path."""
        if unit.written_back is not None:
            unit.written_back.synchronize()

    def wait_for_copies(self) -> None:
        """Blocks the host until none is under way, before memory at either end goes."""
        for slot in self._all_slots():
            for event in (slot.filled, *slot.saved):
                if event is not None:
                    event.synchronize()

    def _plan(self, order: Sequence[int]) -> None:
        loaded = {
            self._number[id(slot.unit)]: i
            for i, slot in enumerate(self.slots)
            if slot.unit is not None and self._is_current(slot)
        }
        ahead = (self._order if self._then is None else self._then)[: len(self.slots)] if self._overlap else ()
        self._actions = deque(
            sweep(order, num_slots=len(self.slots), downloads=self._downloads, loaded=loaded, then=ahead)
            if self.slots
            else ()
        )

    def _issue_uploads(self) -> None:
        while self._actions and self._actions[0].kind is Kind.UPLOAD:
            action = self._actions[0]
            self._upload(action.block, self.slots[action.slot])
            self._actions.popleft()  # not before: one that breaks off is made again

    def _upload(self, number: int, slot: Slot) -> None:
        unit = self.units[number]
        self._fill(slot, unit, unit.store_buffer, self._up)
        self.bytes_up += unit.nbytes
        wanted = not self._in_pass and unit.low_streamed and self.wants_low is not None and self.wants_low(unit)
        if wanted and self._low_pool and number not in self._low_ahead:
            self._low_ahead[number] = self._upload_low(unit)

    def _upload_lows(self) -> None:
        """As many as there is room for. One that is still to be folded comes again when it has been."""
        while self._low_pool and self._low_order and self._low_order[0] not in self._low_ahead:
            number = self._low_order[0]
            self._low_ahead[number] = self._upload_low(self.units[number])

    def _upload_low(self, unit: Unit) -> Slot:
        assert unit.low_buffer is not None
        number = self._number[id(unit)]
        if number in self._low_order:
            self._low_order.remove(number)
        if not self._low_pool:  # all were filled ahead for units that come later: the one that is here goes first
            self._reclaim_low_slots(keep=list(self._low_ahead)[:-1])
        slot = self._low_pool.popleft()
        self._fill(slot, unit, unit.low_buffer, self._up_low)
        self.bytes_up += unit.low_nbytes
        return slot

    def _reclaim_low_slots(self, *, keep: Collection[int]) -> None:
        """All low planes' slots but those that are filled ahead for `keep`. What was issued for a visit that broke off
        may still be using its own."""
        for slot in self._low_in_use.values():
            self._record(slot.drained, self._compute)
        self._low_in_use = {}
        self._low_ahead = {n: slot for n, slot in self._low_ahead.items() if n in keep and self._is_current(slot)}
        elsewhere = [*self._low_pool, *self._low_ahead.values()]
        self._low_pool.extend(slot for slot in self.low_slots if slot not in elsewhere)

    def _fill(self, slot: Slot, unit: Unit, home: torch.Tensor, stream: torch.cuda.Stream | None) -> None:
        for event in (slot.drained, unit.written_back):
            self._wait(stream, event)
        with self._on(stream):
            slot.take(unit)
            self._copy_up(slot, home, stream)
        self._record(slot.filled, stream)
        slot.version = unit.version

    def _copy_up(self, slot: Slot, home: torch.Tensor, stream: torch.cuda.Stream | None) -> None:
        """Piece by piece behind a download that may still be under way; at once where there was none."""
        if not slot.is_saving:
            slot.buffer[: home.numel()].copy_(home, non_blocking=True)
            return
        pieces = list(slot.pieces(home.numel()))
        for piece, saved in pieces:
            self._wait(stream, saved)
            slot.buffer[piece].copy_(home[piece], non_blocking=True)
        slot.is_saving = len(pieces) < len(slot.saved)  # a larger unit's last ones are still to be awaited

    def _download(self, unit: Unit, slot: Slot | None, low: Slot | None) -> None:
        if self._before_overwrite is not None:
            self._before_overwrite(unit, weights=slot is not None, low=low is not None)
        with self._on(self._down):
            for used, home in ((slot, unit.store_buffer), (low, unit.low_buffer)):
                if used is None or home is None:
                    continue
                self._wait(self._down, used.drained)
                for piece, saved in used.pieces(home.numel()):
                    home[piece].copy_(used.buffer[piece], non_blocking=True)
                    self._record(saved, self._down)
                used.is_saving = True
                self.bytes_down += home.numel()
        if slot is not None:
            unit.version = slot.version
        if self._down is not None:
            unit.written_back = unit.written_back or torch.cuda.Event()
            unit.written_back.record(self._down)

    @staticmethod
    def _is_current(slot: Slot) -> bool:
        """It holds, or awaits, what its unit's home holds."""
        return slot.unit is not None and slot.version == slot.unit.version

    @property
    def _compute(self) -> torch.cuda.Stream | None:
        return torch.cuda.current_stream(self.device) if self.device.type == "cuda" else None

    @property
    def _up(self) -> torch.cuda.Stream | None:
        return self._own_up if self._overlap else self._compute

    @property
    def _up_low(self) -> torch.cuda.Stream | None:
        return self._own_up_low if self._overlap else self._compute

    @property
    def _down(self) -> torch.cuda.Stream | None:
        return self._own_down if self._overlap else self._compute

    def _on(self, stream: torch.cuda.Stream | None) -> AbstractContextManager[object]:
        return nullcontext() if stream is None else torch.cuda.stream(stream)

    @staticmethod
    def _wait(stream: torch.cuda.Stream | None, event: torch.cuda.Event | None) -> None:
        if stream is not None and event is not None:
            stream.wait_event(event)

    @staticmethod
    def _record(event: torch.cuda.Event | None, stream: torch.cuda.Stream | None) -> None:
        if event is not None and stream is not None:
            event.record(stream)
