"""Arguments of Triton kernels, and launches that are repeated often.

[Note: direct launches] To find the compiled kernel for a launch, Triton inspects the types of all arguments, which
takes longer than the launch. A repeated launch has arguments of the same types, so it calls the compiled kernel
directly, with all parameters by position. A Triton version with another calling convention raises TypeError before
anything is launched. From then on all launches use Triton's usual interface.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch
from deepspeed.utils import logger

from ds_zo.ops.philox import MASK32, split_seed

_compiled: dict[tuple[Any, ...], Any] = {}
"""Compiled kernels, by everything that Triton compiles them for. Emptied after one has raised TypeError."""
_is_direct = True
"""Whether compiled kernels are called directly. False after one has raised TypeError."""
_INTEGERS = {torch.bfloat16: torch.int16, torch.float8_e4m3fn: torch.uint8}


def as_integers(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor; bfloat16 and fp8 as integers of the same bits."""
    dtype = _INTEGERS.get(tensor.dtype)
    return tensor if dtype is None else tensor.view(dtype)


def as_int32(value: int) -> int:
    """The same 32 bits as a signed number, so that Triton compiles a kernel for one argument type only."""
    value &= MASK32
    return value - (1 << 32) if value >= 1 << 31 else value


@lru_cache(maxsize=16)
def key_words(seed: int) -> tuple[int, int]:
    low, high = (as_int32(k) for k in split_seed(seed))
    return low, high


def launch(
    kernel: Any,
    grid: tuple[int, ...],
    tensors: Sequence[torch.Tensor],
    numbers: Sequence[float],
    constants: Mapping[str, Any],
    **options: Any,
) -> None:
    """Launches a kernel whose parameters are `tensors`, `numbers` that it is not specialised on, and `constants`, in
    this order. `options`: the same in all launches of the kernel. See [Note: direct launches]."""
    addresses = [tensor.data_ptr() for tensor in tensors]
    key = (
        id(kernel),
        tensors[0].device,
        *[tensor.dtype for tensor in tensors],
        *[address % 16 for address in addresses],
        *[number >= 2**31 for number in numbers],  # Triton passes such an integer in 64 bits
        *constants.values(),
    )
    found = _compiled.get(key)
    if found is not None:
        try:
            found[(*grid, 1, 1)[:3]](*addresses, *numbers, *constants.values())
            return
        except TypeError as error:
            _stop_direct_launches(error)
    compiled = kernel[grid](*map(as_integers, tensors), *numbers, **constants, **options)  # None under the interpreter
    if _is_direct:
        _compiled[key] = compiled


def _stop_direct_launches(error: TypeError) -> None:
    global _is_direct
    _is_direct = False
    _compiled.clear()
    logger.warning(
        f"ds_zo: this version of Triton does not launch compiled kernels directly ({error}): launches take longer"
    )
