"""Device memory of the buffers that ZO's blocks share. The backend allocates these sizes, and plans estimate them."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ds_zo.config.section import StreamConfig
from ds_zo.streaming.budget import DeviceBytes, device_bytes
from ds_zo.streaming.placement import Placement


@dataclass(frozen=True)
class ZOBuffers:
    """The settings that determine the sizes of slots and working copies."""

    stream: StreamConfig
    placement: Placement
    num_passes: int
    interval: int
    in_pairs: bool
    """Both perturbed copies of a block are made at once although every block streams. True where blocks are stored in
    fewer bytes than a copy takes, or where computing a block takes longer than its upload."""
    shared: bool = False
    """The ranks of a machine share the host store."""
    factors_nbytes: int = 0
    """Factors of rank-1 noise."""

    @property
    def num_low_slots(self) -> int:
        num_slots = self.stream.device_slots
        return 1 if self.interval > num_slots and not self.shared else num_slots

    def pairs(self, num_resident: int) -> bool:
        """Whether working copies for +z and -z exist at the same time. They do where blocks are resident, because
        device memory is then not scarce, and if `in_pairs`. A single pass has one copy."""
        return self.num_passes > 1 and bool(self.placement.blocks) and (num_resident > 0 or self.in_pairs)

    def device_bytes(self, num_resident: int) -> DeviceBytes:
        """The sizes with `num_resident` blocks on the device, before anything is allocated."""
        placement, pairs = self.placement, self.pairs(num_resident)
        stored = device_bytes(
            placement,
            num_resident=num_resident,
            num_slots=self.stream.device_slots,
            num_low_slots=self.num_low_slots,
            low_stays=self.shared,
        )
        # Resident blocks that do not fold every step are replayed into a slot of their own.
        replays = (
            num_resident > 0 and self.interval > 1 and self.num_passes > 1 and not (pairs and self.num_passes == 2)
        )
        return replace(
            stored,
            non_blocks=stored.non_blocks + self.num_passes * sum(u.scratch_nbytes for u in placement.pass_long),
            scratch=(placement.pair_scratch_nbytes if pairs else placement.scratch_nbytes) + self.factors_nbytes,
            blocks=stored.blocks + (max(u.nbytes for u in placement.blocks) if replays else 0),
        )
