"""Launches of Triton kernels that are repeated often.

[Note: direct launches] To find the compiled kernel for a launch, Triton inspects the types of all arguments, which
takes longer than the launch. A repeated launch has arguments of the same types, so it calls the compiled kernel
directly, with all parameters by position. A Triton version with another calling convention raises TypeError before
anything is launched. From then on all launches use Triton's usual interface.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from deepspeed.utils import logger

from ds_zo.ops.triton_ops import _raw

_compiled: dict[tuple[Any, ...], Any] = {}
"""Compiled kernels, by everything that Triton compiles them for."""


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
    if found is not None and Launch.by_kernel:
        try:
            found[(*grid, 1, 1)[:3]](*addresses, *numbers, *constants.values())
            return
        except TypeError as error:
            _stop_direct_launches(error)
    _compiled[key] = kernel[grid](*map(_raw, tensors), *numbers, **constants, **options)  # None under the interpreter


class Launch:
    """A kernel launch with fixed arguments that can be repeated. See [Note: direct launches]."""

    by_kernel = True
    """Whether compiled kernels are called directly. False after one has raised TypeError."""

    def __init__(self, kernel: Any, num_programs: int, given: tuple[Any, ...], **constants: Any) -> None:
        """`given` are the kernel's first parameters and `constants` its last; `__call__` takes those in between."""
        self._options = {name: constants.pop(name) for name in ("num_warps", "enable_fp_fusion")}
        assert list(constants) == kernel.arg_names[len(kernel.arg_names) - len(constants) :]
        self._kernel, self._num_programs = kernel, num_programs
        self._given, self._constants = given, constants
        self._rest = tuple(constants.values())
        self._run: Callable[..., object] | None = None

    def __call__(self, *values: float) -> None:
        if self._run is not None and Launch.by_kernel:
            try:
                self._run(*self._given, *values, *self._rest)
                return
            except TypeError as error:
                _stop_direct_launches(error)
        compiled = self._kernel[(self._num_programs,)](*self._given, *values, **self._constants, **self._options)
        if compiled is not None:  # None under the interpreter
            self._run = compiled[(self._num_programs, 1, 1)]


def _stop_direct_launches(error: TypeError) -> None:
    Launch.by_kernel = False
    logger.warning(
        f"ds_zo: this version of Triton does not launch compiled kernels directly ({error}): launches take longer"
    )
