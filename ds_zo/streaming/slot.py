"""A slot is a buffer on the device that streamed blocks share."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ds_zo.streaming.schedule import NUM_CHUNKS
from ds_zo.streaming.streams import Event, Streams
from ds_zo.streaming.units import Unit


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
        self._views: dict[Unit, list[torch.Tensor]] = {}
        """By unit: its parameters' views of the buffer, which are made once."""

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

    def views(self, unit: Unit) -> list[torch.Tensor]:
        """The unit's stored bytes in the buffer, one tensor for each parameter in `placed` order."""
        if unit not in self._views:
            self._views[unit] = unit.views(unit.planes(self.buffer), [None] * len(unit.parts))
        return self._views[unit]

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

    def free(self) -> None:
        """Frees the buffer now. A reference cycle would otherwise keep it until Python collects garbage."""
        self.buffer = torch.empty(0, dtype=torch.uint8, device=self.buffer.device)
        self._views.clear()
