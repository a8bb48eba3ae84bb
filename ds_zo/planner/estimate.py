"""The estimate of one method: bytes by part, seconds of a step, and the JSON to use."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from ds_zo.streaming.budget import fits

WORKSPACE_NBYTES = 32 * 2**20
"""Device memory that cuBLAS allocates at a thread's first matrix product: 32 MiB on Hopper, less on other GPUs."""
TWO_WORKSPACES_NBYTES = 2 * WORKSPACE_NBYTES
"""Workspaces of the thread of the forward pass and of autograd's thread."""
PROCESS_NBYTES = 1_470_000_000
"""Host memory of a process that has imported all modules and opened the device, without the weights; measured."""
BACKWARD_NBYTES = 350_000_000
"""Host memory that a process takes in addition where an optimizer of DeepSpeed or LSP follows a backward pass over
weights on the device. Measured on an H200 with four models: 1.77 to 1.86 GB in all."""
ADAM_THREADS_NBYTES = 200_000_000
"""Host memory that the threads of Adam on the CPU take in addition to that."""


@dataclass(frozen=True)
class Limits:
    """Bytes of memory of each GPU and of each host. None: unlimited."""

    device_nbytes: int | None = None
    host_nbytes: int | None = None


@dataclass(frozen=True)
class Shards:
    """Device memory under ZeRO stage 3: each rank keeps a shard of every block, gathers blocks one by one, and keeps
    the weights outside the blocks whole."""

    blocks_nbytes: int
    """Weights of all blocks, before they are divided among the ranks."""
    non_blocks_nbytes: int
    """Weights outside the blocks."""
    gathered_nbytes: int
    """Slots for two gathered blocks: one is computed while the next is gathered."""
    reduced_nbytes: int
    """Gradients that are being reduced, and gradients outside the blocks, which wait for the end of the pass."""

    def device_nbytes(self, *, ranks: int) -> int:
        return self.non_blocks_nbytes + self.blocks_nbytes // ranks + self.gathered_nbytes + self.reduced_nbytes

    def wire_nbytes(self, *, ranks: int) -> int:
        """Bytes that each rank sends in a step: two all-gathers of the blocks, one reduce-scatter of their gradients,
        and an all-reduce of the other gradients."""
        return (3 * self.blocks_nbytes + 2 * self.non_blocks_nbytes) * (ranks - 1) // ranks


@dataclass(frozen=True)
class Estimate:
    """Bytes and seconds of one step, once the number of blocks that stay on the device is fixed."""

    contender: str
    setting: str
    """The settings in words, for the last column of the table."""
    device: Mapping[str, int]
    """Bytes by part; their sum is the peak of the allocator."""
    host: Mapping[str, int]
    """Bytes by part."""
    step_s: float
    compute_s: float | None = None
    """Seconds of a step if copies between host and device took no time. None: not known for the method."""
    starting_nbytes: int = 0
    """Peak bytes of the device while the engine is made, where they may exceed those of a step; else 0."""
    filling_nbytes: int = 0
    """Host memory in addition to `host` during the first step. All blocks are in host memory until that step has shown
    how many fit the device."""
    up_nbytes: int = 0
    """Bytes that cross the link in a step, host to device."""
    down_nbytes: int = 0
    """Bytes that cross the link in a step, device to host."""
    reduced_nbytes: int = 0
    """Bytes that data-parallel ranks reduce in a step."""
    sharded: frozenset[str] = frozenset()
    """Names of the parts of `host` that data-parallel ranks divide among them. Of the other parts each rank has its
    own."""
    shared: frozenset[str] = frozenset()
    """Names of the parts of `host` that the ranks of a machine share under `zero_optimization.stage: 3`."""
    streams_on_one_rank: bool = False
    """Blocks stream, and the method streams them on one rank only."""
    divided_s: float = 0.0
    """Seconds of the step that fall with the number of machines: the update of sharded states on the host."""
    shards: Shards | None = None
    """Device memory at ZeRO stage 3 without `offload_param`. None: the method does not divide weights among devices."""
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
        return fits(self.device_peak_nbytes, budget_nbytes=self.limits.device_nbytes)

    @property
    def fits_host(self) -> bool:
        return self.limits.host_nbytes is None or self.host_peak_nbytes <= self.limits.host_nbytes

    @property
    def fits(self) -> bool:
        return self.fits_device and self.fits_host

    @property
    def is_tight(self) -> bool:
        """Whether it fits with less than a twentieth of the memory to spare. Streaming fills the device on purpose."""
        limits = self.limits
        used = [] if self.up_nbytes else [(self.device_peak_nbytes, limits.device_nbytes)]
        used.append((self.host_peak_nbytes, limits.host_nbytes))
        return self.fits and any(limit is not None and nbytes > 0.95 * limit for nbytes, limit in used)

    def to_json(self) -> dict[str, Any]:
        shown = asdict(self)
        for name in ("limits", "sharded", "shared", "streams_on_one_rank", "shards"):
            del shown[name]
        return shown | {
            "device_nbytes": self.device_nbytes,
            "device_peak_nbytes": self.device_peak_nbytes,
            "host_nbytes": self.host_nbytes,
            "host_peak_nbytes": self.host_peak_nbytes,
            "fits": self.fits,
            "is_tight": self.is_tight,
            "fits_device": self.fits_device,
            "fits_host": self.fits_host,
            "steps_per_s": 1.0 / self.step_s,
        }


def base_config(*, batch: int, dtype: str, gradient_clipping: float = 1.0) -> dict[str, Any]:
    """The keys that the JSON of every method has."""
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": batch,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": gradient_clipping,
    }
    if dtype != "fp32":
        config[dtype] = {"enabled": True}
    return config


def parts(**nbytes: float) -> dict[str, int]:
    """The parts that take memory, in whole bytes."""
    return {name: int(n) for name, n in nbytes.items() if n >= 1}


def streaming_where_needed(estimate: Callable[[bool], Estimate], offload: bool | None) -> Estimate:
    """The estimate whose blocks stream, or not. `offload` None: they stream only where the whole model does not fit the
    device."""
    if offload is None:
        whole = estimate(False)
        return whole if whole.fits_device else estimate(True)
    return estimate(offload)
