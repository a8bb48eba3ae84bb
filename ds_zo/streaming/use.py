"""One use of a unit: its weights are on the device, and its parameters show them.

A `Preparation` makes these weights from the unit's stored bytes. A `Use` brings the bytes to the device, says when they
have changed, and gives the device memory back, also after an error.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from ds_zo.streaming.runtime import Runtime
from ds_zo.streaming.slot import Slot
from ds_zo.streaming.units import PARTLY_FOLDED, Unit


class Preparation:
    """Makes the weights that a forward reads. Only it runs a backend's kernels on stored bytes. In this class the
    stored bytes are the weights."""

    def prepare(self, use: Use) -> None:
        """Called when the unit's bytes are on the device, or the compute stream waits for them. Makes the weights, and
        calls `use.show` or `use.show_stored`."""
        use.before_writing()
        use.show_stored()

    def finish(self, use: Use) -> None:
        """Called at the end of a use that `prepare` has begun, also after an error."""


class Use:
    """One use of a unit, from `open` to `close`. The unit's parameters show its weights on the device meanwhile."""

    def __init__(self, unit: Unit, runtime: Runtime, *, slot: Slot | None = None) -> None:
        """`slot`: one that holds the unit already."""
        self.unit = unit
        self._runtime = runtime
        self._slot = slot
        """The slot that holds the unit. None for a unit on the device, and once the slot is released."""

    @property
    def is_in_slot(self) -> bool:
        """Whether the stored bytes on the device are a copy of those of the store."""
        return self._slot is not None

    @property
    def buffer(self) -> torch.Tensor:
        """The stored bytes on the device, laid out like the unit's `store_buffer`."""
        return self.unit.store_buffer if self._slot is None else self._slot.buffer

    def open(self) -> None:
        """Brings the stored bytes to the device. The compute stream waits for them."""
        self._slot = self._runtime.acquire(self.unit)

    def show(self, views: Iterable[torch.Tensor]) -> None:
        """Makes the parameters show `views`, in `placed` order."""
        self.unit.bind(views)

    def show_stored(self) -> None:
        """Makes the parameters show the stored bytes on the device."""
        if self._slot is None:
            self.unit.use_in_place()
        else:
            self.unit.bind(self._slot.views(self.unit))

    def before_writing(self, version: int | None = None) -> None:
        """Called before a kernel changes the stored bytes on the device. The compute stream waits for copies of them.
        `version`: the number of updates that a slot includes afterwards, where it may be read without a commit."""
        if self._slot is not None:
            self._runtime.before_writing(self._slot)
            if version is not None:
                self._slot.updated(version)

    def commit(self, version: int | None = None) -> None:
        """The kernels that were issued for this use have changed the stored bytes, which include `version` updates now.
        None: one more. The bytes are copied back, whatever happens later in this use."""
        if version is None:
            version = self.unit.version + 1
        if self._slot is None:
            self.unit.folded(version)
        else:
            self._slot.updated(version)
        if self._slot is not None or self.unit.low_streamed:
            self._runtime.written(self.unit, self._slot)

    def break_off(self) -> None:
        """An error broke off kernels that change the stored bytes. Where these are the store's own, nothing tells which
        of them include the update. A slot is uploaded again."""
        if self._slot is None:
            self.unit.folded(PARTLY_FOLDED)

    def release_slot(self) -> None:
        """No kernel that is issued later reads the stored bytes."""
        slot, self._slot = self._slot, None
        if slot is not None:
            self._runtime.release(self.unit, slot)

    def abandon(self) -> None:
        """An error ended the use. What the slot holds is not used again."""
        slot, self._slot = self._slot, None
        if slot is not None:
            self._runtime.abandon(slot)
            slot.invalidate()

    def close(self) -> None:
        """Makes the parameters show the stored bytes where they are kept."""
        self.unit.leave()
