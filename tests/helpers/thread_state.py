"""What torch keeps for a thread, and a mode of it."""

from __future__ import annotations

import contextvars
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

var: contextvars.ContextVar[str] = contextvars.ContextVar("var", default="unset")


def thread_state() -> tuple[Any, ...]:
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.is_autocast_enabled("cpu"),
        torch.get_autocast_dtype("cpu"),
        torch.is_autocast_cache_enabled(),
        torch.get_default_dtype(),
        torch.backends.cuda.flash_sdp_enabled(),
        torch.backends.cuda.math_sdp_enabled(),
        torch.backends.cuda.mem_efficient_sdp_enabled(),
        torch._C._len_torch_function_stack(),
        var.get(),
    )


class PassingMode(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))
