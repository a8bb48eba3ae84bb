"""Flags of torch that a forward may change between its blocks.

[Note: flags of a pass] Torch keeps these flags per thread or per process. A pass that changes one would change it for
the passes that run while it pauses. So `Lockstep` reads all of them at each pause, and sets those that differ. `FLAGS`
is the one table of them. A test compares it with the setters in torch's own files. A flag that torch itself changes in
a first call, the order of attention kernels on CUDA, is changed before the first read: restoring the value from before
would take a faster kernel from the whole process.

Torch has no getter for ranges of a profiler (`record_function`, NVTX). A range that is open while a block runs shows
the work of all passes that run until it ends.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch

from ds_zo.streaming.streams import current_of_thread, make_current


class Flag(NamedTuple):
    get: Callable[[], Any]
    set: Callable[[Any], None]


PAIRS = (
    # Kept per thread
    ("is_grad_enabled", "_set_grad_enabled"),
    ("_is_multithreading_enabled", "_set_multithreading_enabled"),
    ("is_autocast_cache_enabled", "set_autocast_cache_enabled"),
    ("get_num_threads", "set_num_threads"),
    # Kept per process
    ("get_default_dtype", "_set_default_dtype"),
    ("_get_flash_sdp_enabled", "_set_sdp_use_flash"),
    ("_get_mem_efficient_sdp_enabled", "_set_sdp_use_mem_efficient"),
    ("_get_math_sdp_enabled", "_set_sdp_use_math"),
    ("_get_cudnn_sdp_enabled", "_set_sdp_use_cudnn"),
    ("_get_overrideable_sdp_enabled", "_set_sdp_use_overrideable"),
    ("_get_sdp_priority_order", "_set_sdp_priority_order"),
    ("_get_math_sdp_allow_fp16_bf16_reduction", "_set_math_sdp_allow_fp16_bf16_reduction"),
    ("_get_cudnn_enabled", "_set_cudnn_enabled"),
    ("_get_cudnn_benchmark", "_set_cudnn_benchmark"),
    ("_cuda_get_cudnn_benchmark_limit", "_cuda_set_cudnn_benchmark_limit"),
    ("_get_cudnn_deterministic", "_set_cudnn_deterministic"),
    ("_get_cudnn_depthwise_kernel", "_set_cudnn_depthwise_kernel"),
    ("_get_cublas_allow_fp16_reduced_precision_reduction", "_set_cublas_allow_fp16_reduced_precision_reduction"),
    ("_get_cublas_allow_bf16_reduced_precision_reduction", "_set_cublas_allow_bf16_reduced_precision_reduction"),
    ("_get_cublas_allow_fp16_accumulation", "_set_cublas_allow_fp16_accumulation"),
    ("_get_mkldnn_enabled", "_set_mkldnn_enabled"),
    ("_get_mkldnn_deterministic", "_set_mkldnn_deterministic"),
    ("_get_nnpack_enabled", "_set_nnpack_enabled"),
    ("_get_qengine", "_set_qengine"),
    ("_get_deterministic_fill_uninitialized_memory", "_set_deterministic_fill_uninitialized_memory"),
    ("_get_warnAlways", "_set_warnAlways"),
)
"""Getters and setters in `torch._C`. A build or release of torch may lack some."""
_PRECISIONS = (
    *(("generic", "all"), ("cuda", "all"), ("mkldnn", "all")),
    *((backend, operation) for backend in ("cuda", "mkldnn") for operation in ("matmul", "conv", "rnn")),
)
"""Backends and operations that have a float32 precision. One that is "none" follows one before it."""
_PRECISION_GETTERS = [partial(torch._C._get_fp32_precision_getter, *of) for of in _PRECISIONS]


def _precisions() -> tuple[str, ...]:
    return tuple([get() for get in _PRECISION_GETTERS])


def _set_precisions(values: tuple[str, ...]) -> None:
    """Sets torch's older switches as well. They repeat some of the precisions, and torch refuses to read one that
    differs from them."""
    found = dict(zip(_PRECISIONS, values, strict=True))
    is_medium, is_high = found["mkldnn", "matmul"] == "bf16", found["cuda", "matmul"] == "tf32"
    torch.set_float32_matmul_precision("medium" if is_medium else "high" if is_high else "highest")
    torch._C._set_cudnn_allow_tf32(found["cuda", "conv"] == found["cuda", "rnn"] == "tf32")
    for of, value in found.items():
        torch._C._set_fp32_precision_setter(*of, "none")
        if torch._C._get_fp32_precision_getter(*of) != value:
            torch._C._set_fp32_precision_setter(*of, value)


_autograd: Any = torch._C._autograd


def _saved_tensors_hooks() -> tuple[Any, ...]:
    """The hooks of `torch.autograd.graph.saved_tensors_hooks`, the innermost last."""
    if _autograd._top_saved_tensors_default_hooks(True) is None:
        return ()
    found = _pop_saved_tensors_hooks()
    _push_saved_tensors_hooks(found)
    return found


def _set_saved_tensors_hooks(value: tuple[Any, ...]) -> None:
    _pop_saved_tensors_hooks()
    _push_saved_tensors_hooks(value)


def _pop_saved_tensors_hooks() -> tuple[Any, ...]:
    found: list[Any] = []
    while (hooks := _autograd._top_saved_tensors_default_hooks(True)) is not None:
        found.insert(0, hooks)
        _autograd._pop_saved_tensors_default_hooks()
    return tuple(found)


def _push_saved_tensors_hooks(value: tuple[Any, ...]) -> None:
    for hooks in value:
        _autograd._push_saved_tensors_default_hooks(*hooks)


def _pair(getter: str, setter: str) -> Flag:
    set_ = getattr(torch._C, setter)
    takes_several = isinstance(getattr(torch._C, getter)(), tuple)
    return Flag(getattr(torch._C, getter), (lambda value: set_(*value)) if takes_several else set_)


FLAGS: dict[str, Flag] = {
    **{setter: _pair(getter, setter) for getter, setter in PAIRS if hasattr(torch._C, setter)},
    "_set_fp32_precision_setter": Flag(_precisions, _set_precisions),
    "_set_deterministic_algorithms": Flag(
        torch.are_deterministic_algorithms_enabled,
        lambda on: torch.use_deterministic_algorithms(
            on, warn_only=torch.is_deterministic_algorithms_warn_only_enabled()
        ),
    ),
    "_set_deterministic_algorithms warn_only": Flag(
        torch.is_deterministic_algorithms_warn_only_enabled,
        lambda on: torch.use_deterministic_algorithms(torch.are_deterministic_algorithms_enabled(), warn_only=on),
    ),
    "set_anomaly_enabled": Flag(
        torch.is_anomaly_enabled, lambda on: torch.set_anomaly_enabled(on, torch.is_anomaly_check_nan_enabled())
    ),
    "set_anomaly_enabled check_nan": Flag(
        torch.is_anomaly_check_nan_enabled, lambda on: torch.set_anomaly_enabled(torch.is_anomaly_enabled(), on)
    ),
    "_is_fastpath_enabled": Flag(torch.backends.mha.get_fastpath_enabled, torch.backends.mha.set_fastpath_enabled),
    "_push_saved_tensors_default_hooks": Flag(_saved_tensors_hooks, _set_saved_tensors_hooks),
}
"""Every flag, under the name of its setter or variable in torch."""


class ThreadState:
    """Reads and restores `FLAGS`, and the current stream of a device."""

    def __init__(self, device: torch.device) -> None:
        if device.type == "cuda":
            query = torch.zeros(1, 1, 1, 8, dtype=torch.float16, device=device)
            torch._fused_sdp_choice(query, query, query)  # the first choice of a process sets the order of kernels
        self.flags = FLAGS | {"set_stream": Flag(partial(current_of_thread, device), make_current)}
        for kind in {"cpu", device.type}:
            self.flags |= {
                f"set_autocast_enabled {kind}": Flag(
                    partial(torch.is_autocast_enabled, kind), partial(torch.set_autocast_enabled, kind)
                ),
                f"set_autocast_dtype {kind}": Flag(
                    partial(torch.get_autocast_dtype, kind), partial(torch.set_autocast_dtype, kind)
                ),
            }
        self._getters = [flag.get for flag in self.flags.values()]

    def read(self) -> tuple[Any, ...]:
        """The values of all flags."""
        return tuple([get() for get in self._getters])

    def restore(self, values: tuple[Any, ...]) -> None:
        """Sets the flags to values that `read` returned."""
        for flag, value in zip(self.flags.values(), values, strict=True):
            if flag.get() != value:
                flag.set(value)
        torch.clear_autocast_cache()  # it holds casts of copies that are overwritten
