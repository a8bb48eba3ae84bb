"""Settings and statistics of PyTorch's CUDA allocator.

Fragmentation leaves memory that the allocator has reserved and cannot use. With `expandable_segments` there is none.
They are off by default, and a memory budget that is filled to the last block needs them.
"""

from __future__ import annotations

import os

import torch
from deepspeed.utils import logger

_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""Environment variables of the allocator. The second is the older name, which all PyTorch versions read."""
SETTING = "expandable_segments:True"


def segments_expand() -> bool:
    """Whether the environment turns on expandable segments. A setting made inside the process is not seen."""
    return any(SETTING.lower() in os.environ.get(name, "").lower().replace(" ", "") for name in _VARIABLES)


def expand_segments() -> None:
    """Turns on expandable segments for this process. Call it before the first allocation."""
    setter = getattr(torch._C, "_accelerator_setAllocatorSettings", None)
    if setter is None:
        setter = torch.cuda.memory._set_allocator_settings
    setter(SETTING)
    os.environ.setdefault(_VARIABLES[1], SETTING)


def warn_of_fragmentation(device: torch.device, *, budget_gb: float | None) -> None:
    """Warns of a memory budget without expandable segments."""
    if device.type == "cuda" and budget_gb is not None and not segments_expand():
        logger.warning(
            f"ds_zo: PyTorch's allocator may lose several of {budget_gb:g} GB to fragmentation: start with "
            f"PYTORCH_CUDA_ALLOC_CONF={SETTING} in the environment (ds_zo.stream.device_memory_gb)"
        )


def num_retries(device: torch.device) -> int:
    """How often the allocator failed within the device's memory, or its cap, and retried after freeing cached
    memory."""
    return int(torch.cuda.memory_stats(device)["num_alloc_retries"]) if device.type == "cuda" else 0


class AllocatorRetryCheck:
    """Warns if the allocator retried in a step, because the chosen resident blocks leave the step too little memory.
    Such steps stay slow, and nothing else reports the cause."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._retries: int | None = None
        """The allocator's count of retries at `start`; None: the next `check` does nothing."""

    def start(self) -> None:
        """The next step is to be checked."""
        self._retries = num_retries(self._device)

    def restart(self) -> None:
        """Excludes retries up to now, such as those of allocating buffers again, from a check that has started."""
        if self._retries is not None:
            self.start()

    def check(self) -> None:
        """Call it after every step. Warns once, after the first step since `start`, if the allocator retried in it."""
        if self._retries is None:
            return
        num_new = num_retries(self._device) - self._retries
        self._retries = None
        if num_new:
            logger.warning(
                f"ds_zo: the device's memory is so full that the allocator had to stop {num_new} times in a step to "
                "free some: set ds_zo.stream.device_memory_gb, or lower it"
            )
