"""A transport from outside ds_zo: every copy makes a stop in device memory of its own, as a decompressing one would."""

from __future__ import annotations

from ds_zo.streaming.slot import Slot
from ds_zo.streaming.transport import Transport, stored_bytes
from ds_zo.streaming.units import Unit


class StagedCopy(Transport):
    def fetch(self, unit: Unit, slot: Slot, *, low: bool = False) -> None:
        source = stored_bytes(unit, low=low)
        stream = self.streams.low_upload if low else self.streams.upload
        for event in (slot.drained, unit.written_back, *slot.saved):
            stream.wait(event)
        with stream.issuing():
            slot.take(unit)
            staged = source.to(self.streams.device, copy=True, non_blocking=True)
            slot.buffer[: source.numel()].copy_(staged)
            stream.record(slot.filled)
        slot.is_saving = False
        slot.uploaded()
        self.bytes_up += source.numel()

    def copy_back(self, unit: Unit, used: Slot, *, low: bool) -> None:
        target = stored_bytes(unit, low=low)
        staged = used.buffer[: target.numel()].clone()
        target.copy_(staged, non_blocking=True)
        for saved in used.saved:
            self.streams.download.record(saved)
        self.bytes_down += target.numel()
