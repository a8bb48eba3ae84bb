"""Device memory that PyTorch's allocator holds and nobody can use: pieces between blocks of other sizes.

Segments that grow (`expandable_segments`) leave none. They are off by default, and a budget that is filled to the last
block needs them.
"""

from __future__ import annotations

import os

import torch
from deepspeed.utils import logger

_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""The second is the older name, which all versions read."""
SETTING = "expandable_segments:True"


def segments_expand() -> bool:
    """As far as the environment says: a setting made in the process is not asked for."""
    return any(SETTING.lower() in os.environ.get(name, "").lower().replace(" ", "") for name in _VARIABLES)


def expand_segments() -> None:
    """For this process, before it allocates."""
    setter = getattr(torch._C, "_accelerator_setAllocatorSettings", None)
    if setter is None:
        setter = torch.cuda.memory._set_allocator_settings
    setter(SETTING)
    os.environ.setdefault(_VARIABLES[1], SETTING)


def num_retries(device: torch.device) -> int:
    """How often the allocator found no room within the card, or the cap, and waited for the device to give some up."""
    return int(torch.cuda.memory_stats(device)["num_alloc_retries"]) if device.type == "cuda" else 0


class AllocatorRetryCheck:
    """Whether blocks that were chosen to stay leave a step its memory. One that waits for some goes on doing so: slow,
    and nothing else tells why."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._retries: int | None = None
        """The allocator's count when the step began that is watched."""

    def start(self) -> None:
        self._retries = num_retries(self._device)

    def restart(self) -> None:
        """What making buffers anew has taken is no step's."""
        if self._retries is not None:
            self.start()

    def check(self) -> None:
        """After every step; the first since `watch` counts."""
        if self._retries is None:
            return
        num_waits = num_retries(self._device) - self._retries
        self._retries = None
        if num_waits:
            logger.warning(
                f"ds_zo: the device's memory is so full that the allocator had to stop {num_waits} times in a step to "
                "find some: set ds_zo.stream.device_memory_gb, or lower it"
            )
