"""What a plan says about one way to train."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from ds_zo.streaming.budget import MARGIN_NBYTES

WORKSPACE_NBYTES = 32 * 2**20
"""cuBLAS takes it from the same allocator at a thread's first matrix product (32 MiB on Hopper, less elsewhere)."""
TWO_WORKSPACES_NBYTES = 2 * WORKSPACE_NBYTES
"""Of the forward pass's thread, and of autograd's."""
PROCESS_NBYTES = 1_470_000_000
"""Host memory of a process that has imported everything and opened the device: measured beside the weights."""
BACKWARD_NBYTES = 350_000_000
"""More of it where DeepSpeed's or LSP's optimizer follows a backward pass over weights on the device: 1.77 to 1.86 GB
in the rows of four models on an H200, and 0.2 GB more with Adam's threads on the CPU."""
ADAM_THREADS_NBYTES = 200_000_000


@dataclass(frozen=True)
class Limits:
    """What there is of memory, for each GPU and each host; None: as much as it takes."""

    device_nbytes: int | None = None
    host_nbytes: int | None = None


@dataclass(frozen=True)
class Shards:
    """What ZeRO stage 3 makes of weights on the devices: blocks in pieces, gathered one by one, the rest whole."""

    blocks_nbytes: int
    edges_nbytes: int
    gathered_nbytes: int
    """Slots: the block that is computed, and the one that arrives."""
    reduced_nbytes: int
    """Gradients on their way to other ranks, and those around blocks, which wait for the end of the pass."""

    def device_nbytes(self, *, ranks: int) -> int:
        return self.edges_nbytes + self.blocks_nbytes // ranks + self.gathered_nbytes + self.reduced_nbytes

    def wire_nbytes(self, *, ranks: int) -> int:
        """Sent by each rank: blocks gathered in the forward and in the backward pass, their gradients scattered; the
        others' reduced."""
        return (3 * self.blocks_nbytes + 2 * self.edges_nbytes) * (ranks - 1) // ranks


@dataclass(frozen=True)
class Estimate:
    """Bytes and seconds of one step, once training has settled."""

    contender: str
    setting: str
    """How it is set, in words."""
    device: Mapping[str, int]
    """Bytes by part; together the allocator's peak."""
    host: Mapping[str, int]
    step_s: float
    starting_nbytes: int = 0
    """Of the device while training is set up, where that may be more than a step takes."""
    filling_nbytes: int = 0
    """Host memory more than `host` until the first step has shown how many blocks the device has room for: those that
    then stay there start here."""
    up_nbytes: int = 0
    """Over the link each step, host to device."""
    down_nbytes: int = 0
    reduced_nbytes: int = 0
    """What data-parallel ranks reduce each step."""
    sharded: frozenset[str] = frozenset()
    """Parts of `host` that data-parallel ranks divide among them instead of each having its own."""
    divided_s: float = 0.0
    """Seconds of the step that machines divide among them: the host's update of states that are sharded."""
    shards: Shards | None = None
    """At ZeRO stage 3 without `offload_param`, for those that then divide weights among devices."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """The JSON to use."""
    notes: tuple[str, ...] = ()
    limits: Limits = Limits()

    @property
    def device_nbytes(self) -> int:
        return sum(self.device.values())

    @property
    def device_peak_nbytes(self) -> int:
        return max(self.device_nbytes, self.starting_nbytes)

    @property
    def host_nbytes(self) -> int:
        return sum(self.host.values())

    @property
    def host_peak_nbytes(self) -> int:
        return self.host_nbytes + self.filling_nbytes

    @property
    def fits_device(self) -> bool:
        limit = self.limits.device_nbytes
        return limit is None or self.device_peak_nbytes + MARGIN_NBYTES <= limit

    @property
    def fits_host(self) -> bool:
        return self.limits.host_nbytes is None or self.host_peak_nbytes <= self.limits.host_nbytes

    @property
    def fits(self) -> bool:
        return self.fits_device and self.fits_host

    def to_json(self) -> dict[str, Any]:
        shown = asdict(self)
        del shown["limits"], shown["sharded"], shown["shards"]
        return shown | {
            "device_nbytes": self.device_nbytes,
            "device_peak_nbytes": self.device_peak_nbytes,
            "host_nbytes": self.host_nbytes,
            "host_peak_nbytes": self.host_peak_nbytes,
            "fits": self.fits,
            "fits_device": self.fits_device,
            "fits_host": self.fits_host,
            "steps_per_s": 1.0 / self.step_s,
        }


def base_config(*, batch: int, dtype: str, gradient_clipping: float = 1.0) -> dict[str, Any]:
    """What every contender's JSON has in common."""
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": batch,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": gradient_clipping,
    }
    if dtype != "fp32":
        config[dtype] = {"enabled": True}
    return config


def parts(**nbytes: float) -> dict[str, int]:
    """Those that take any memory."""
    return {name: int(n) for name, n in nbytes.items() if n >= 1}
