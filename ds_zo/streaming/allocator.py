"""Device memory that PyTorch's allocator holds and nobody can use: pieces between blocks of other sizes.

Segments that grow (`expandable_segments`) leave none. They are off by default, and a budget that is filled to the last
block needs them.
"""

from __future__ import annotations

import os

import torch

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
