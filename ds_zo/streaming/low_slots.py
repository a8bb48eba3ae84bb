"""Which units' low planes are in the low slots of a runtime, and which are uploaded next.

[Note: low planes are uploaded ahead] A fold applies a unit's pending updates to its stored weights. It needs the unit's
low plane, whether the unit is streamed or resident. Low planes are uploaded in the order of the folds, each as soon as
a low slot is free. A low slot becomes free when the fold before has used it. So a low plane may be uploaded up to a
whole fold interval of blocks before its fold. Low planes have an upload stream of their own: an upload of a block may
wait for its slot, and would hold up the low plane that the compute stream needs first.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence

from ds_zo.streaming.slots import Slot
from ds_zo.streaming.units import Unit


class LowSlots:
    """The low slots of a runtime. A slot is in use, or filled ahead of its use (it holds its unit's stored low plane),
    or free."""

    def __init__(self, slots: Sequence[Slot]) -> None:
        self._slots = list(slots)
        """In the order in which they were last filled or freed."""
        self._in_use: list[Slot] = []
        """Slots that kernels of the current uses read and change."""
        self._planned: deque[Unit] = deque()
        """Units whose low planes are still to be uploaded, in the order of their folds."""

    @property
    def ahead(self) -> list[Unit]:
        """The units whose low planes are filled ahead, in the order of their uploads."""
        return [slot.unit for slot in self._slots if slot.unit is not None and self._is_ahead(slot)]

    def _is_ahead(self, slot: Slot) -> bool:
        return slot not in self._in_use and slot.is_current

    @property
    def has_free(self) -> bool:
        return any(map(self._is_free, self._slots))

    def _is_free(self, slot: Slot) -> bool:
        return slot not in self._in_use and not slot.is_current

    def plan(self, units: Sequence[Unit]) -> None:
        """Plans the uploads for the coming folds, but for the units whose low planes are there."""
        self._planned = deque(units)
        for unit in self.ahead:
            if unit in self._planned:
                self._planned.remove(unit)

    def next_planned(self) -> Unit | None:
        """The unit whose low plane can be uploaded now, if there is one. A unit that folds twice has its second upload
        after its first fold."""
        if not self._planned or not self.has_free or self.slot_of(self._planned[0]) is not None:
            return None
        return self._planned[0]

    def slot_of(self, unit: Unit) -> Slot | None:
        """The slot with the unit's low plane, in use or filled ahead."""
        return next((s for s in self._slots if s.unit is unit and not self._is_free(s)), None)

    def take(self, unit: Unit) -> Slot:
        """Returns a free slot for an upload of the unit's low plane. The caller has seen to it that there is one."""
        if unit in self._planned:
            self._planned.remove(unit)
        slot = next(filter(self._is_free, self._slots))
        self._move_to_end(slot)
        return slot

    def use(self, slot: Slot) -> None:
        if slot not in self._in_use:
            self._in_use.append(slot)

    def stop_using(self, unit: Unit) -> Slot | None:
        """Ends the use of the unit's low slot, and returns the slot. None: it has none in use."""
        slot = next((slot for slot in self._in_use if slot.unit is unit), None)
        if slot is not None:
            self._in_use.remove(slot)
        return slot

    def free(self, slot: Slot) -> None:
        slot.expire()
        self._move_to_end(slot)

    def reclaim(self, *, keep: Collection[Unit]) -> list[Slot]:
        """Frees all slots but those filled ahead for the units in `keep`. Returns the slots that were in use: kernels
        of interrupted uses may still read them."""
        interrupted, self._in_use = self._in_use, []
        for slot in [s for s in self._slots if s in interrupted or (s.is_current and s.unit not in keep)]:
            self.free(slot)
        return interrupted

    def _move_to_end(self, slot: Slot) -> None:
        self._slots.remove(slot)
        self._slots.append(slot)
