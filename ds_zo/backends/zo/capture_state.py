"""Tells whether a block's forward still does what its CUDA graph has recorded.

[Note: tensors that modules keep] Recorded kernels read masks and position tables at their addresses at recording time.
A module that makes a longer table for a longer batch frees the first table, and its memory is used for something else.
So the address of each such tensor is checked before a replay.
"""

from __future__ import annotations

import torch
from torch import nn


class CaptureState:
    """State that a block's forward depends on besides arguments, parameters and code. It consists of hooks, of
    tensors that modules keep ([Note: tensors that modules keep]), and of the modules' train mode."""

    def __init__(self, block: nn.Module) -> None:
        self._hooks = [
            torch.nn.modules.module._global_forward_hooks,
            torch.nn.modules.module._global_forward_pre_hooks,
            *(hooks for m in block.modules() if m is not block for hooks in (m._forward_hooks, m._forward_pre_hooks)),
        ]
        """Hooks of the modules inside the block. The block's own hooks run around its forward."""
        self._tensors = [
            (places, name, tensor, tensor.data_ptr())
            for m in block.modules()
            for places in (m._buffers, vars(m))
            for name, tensor in places.items()
            if isinstance(tensor, torch.Tensor)
        ]
        self._modes = [(m, m.training) for m in block.modules()]

    @property
    def has_hooks(self) -> bool:
        """Whether any hook is registered: a replay would not call it."""
        return any(self._hooks)

    @property
    def is_stale(self) -> bool:
        """Whether a module has replaced a tensor that it kept, the tensor's memory has moved, or a module's train mode
        has changed."""
        return any(
            places.get(name) is not tensor or tensor.data_ptr() != address
            for places, name, tensor, address in self._tensors
        ) or any(m.training is not training for m, training in self._modes)


def version_of(tensor: torch.Tensor) -> int:
    """The tensor's version counter, which every write in place changes. Inference tensors have none."""
    return 0 if tensor.is_inference() else tensor._version
