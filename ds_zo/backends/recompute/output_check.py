"""Checks that a block computes its output again when it is recomputed in the backward pass.

[Note: outputs are compared] The context of a forward does not hold a counter in Python, or a `torch.Generator` in a
list or a closure. A block whose output depends on such state computes another function the second time, and would get
the gradients of that function. So outputs are compared. In the first steps this comes before the gradients are used.
Later one forward in many is compared, and the host reads the result when it has arrived.

The first output itself is not kept, because its memory may be freed before the backward. Kept are the products of its
rows with a few vectors of random signs. Every element counts in them. They take a thousandth of a hidden state's bytes.

Two computations of one function may differ. Kernels that add by atomics round differently each time, and after them a
router may choose another expert for a few tokens. So a row may differ within the rounding of the coarsest dtype that
the block computes in, and a few rows may differ by more. Rows that are not finite are not compared.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache

import torch
from torch import nn

from ds_zo.backends.common.deferred_scalar import DeferredScalar

_FIRST_STEPS, _STEPS_BETWEEN = 3, 16
_NUM_SIGNS = 8
"""Number of vectors of random signs: a difference of norm 1 changes the products by about 1 each."""
_MAX_COLUMNS = 2**14
_LEAST_EPS, _LEAST_EPS_CUDA = 2.0**-18, 2.0**-11
"""Rounding of float32 matrix products. On CUDA they may be in TF32."""
_MAX_SHARE = 1 / 64
"""The share of a block's rows that may differ."""


class _Mode(Enum):
    AT_ONCE = "the forwards of the first steps: the host waits for each comparison"
    LATE = "the result of each comparison stays on the device until a later forward"
    OFF = "outputs are not compared"


@dataclass(frozen=True)
class OutputSummary:
    """What is kept of the output of one call of a block."""

    shapes: list[torch.Size]
    products: list[torch.Tensor]
    """Of each floating-point tensor: its rows times the vectors of signs. Empty if values are not compared."""
    is_late: bool


class OutputCheck:
    """Compares the outputs of the blocks of one engine. See [Note: outputs are compared]."""

    def __init__(self, device: torch.device, *, forwards_per_step: int) -> None:
        self._device = device
        self._forwards_per_step = forwards_per_step
        self._num_forwards = 0
        self._mode = _Mode.AT_ONCE
        self._found: list[tuple[str, torch.Tensor]] = []
        """Late results: names of blocks, and on the device whether their outputs differ."""
        self._arriving: tuple[list[str], DeferredScalar] | None = None
        """The names of blocks that were compared, and the index of one whose outputs differ, or -1."""

    def begin_forward(self) -> None:
        """Called before each forward that a backward may follow. Raises if a late result shows a difference."""
        if self._found:
            names = [name for name, _ in self._found]
            differs = torch.stack([found for _, found in self._found])
            index = torch.where(differs, torch.arange(len(names), device=self._device), -1).max()
            self._found, self._arriving = [], (names, DeferredScalar(index))
        if self._arriving is not None and self._arriving[1].has_arrived():
            (names, scalar), self._arriving = self._arriving, None
            if (number := int(scalar.get())) >= 0:
                raise _another_output(names[number])
        step, is_first = self._num_forwards // self._forwards_per_step, not self._num_forwards % self._forwards_per_step
        checks_later = is_first and step % _STEPS_BETWEEN == 0
        self._mode = _Mode.AT_ONCE if step < _FIRST_STEPS else _Mode.LATE if checks_later else _Mode.OFF
        self._num_forwards += 1

    def summarise(self, outputs: Sequence[torch.Tensor]) -> OutputSummary:
        """What to keep of a first output."""
        compared = [] if self._mode is _Mode.OFF else self._rows(outputs)
        shapes = [t.shape for t in outputs]
        return OutputSummary(shapes, [_products(rows) for rows in compared], self._mode is _Mode.LATE)

    @torch.no_grad()
    def compare(self, block: str, module: nn.Module, first: OutputSummary, outputs: Sequence[torch.Tensor]) -> None:
        """Compares the output of a recomputed block with the first one. Raises at once, or in a later forward."""
        if [t.shape for t in outputs] != first.shapes:
            raise _another_output(block)
        if not first.products:
            return
        compared = self._rows(outputs)
        eps = coarsest_eps(module, [rows.dtype for rows in compared], self._device)
        differ = [_differ(rows, before, eps=eps) for rows, before in zip(compared, first.products, strict=True)]
        num_allowed = int(sum(found.numel() for found in differ) * _MAX_SHARE)
        is_other = torch.stack([found.sum() for found in differ]).sum() > num_allowed
        if first.is_late:
            self._found.append((block, is_other))
        elif is_other:
            raise _another_output(block)

    def _rows(self, outputs: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        """The rows of each tensor that is compared, as matrices."""
        found = []
        for t in outputs:
            if t.is_complex():
                t = torch.view_as_real(t.resolve_conj())
            is_plain = t.layout is torch.strided and type(t := t.detach()) is torch.Tensor and t.device == self._device
            if is_plain and t.numel() and t.is_floating_point() and t.itemsize > 1:
                num_columns = min(t.shape[-1] if t.ndim else 1, _MAX_COLUMNS)
                flat = t.flatten()
                found.append(flat[: len(flat) // num_columns * num_columns].view(-1, num_columns))
        return found


def _products(rows: torch.Tensor) -> torch.Tensor:
    with torch.no_grad(), torch.autocast(rows.device.type, enabled=False):
        return rows @ _signs(rows.shape[1], rows.dtype, rows.device)


def _differ(rows: torch.Tensor, before: torch.Tensor, *, eps: float) -> torch.Tensor:
    """Which rows differ from the first ones by more than rounding. `before`: the products of the first rows."""
    dtype = torch.promote_types(rows.dtype, torch.float32)
    norms = torch.linalg.vector_norm(rows, dim=1, dtype=dtype)
    difference = torch.linalg.vector_norm(_products(rows) - before, dim=1, dtype=dtype) / math.sqrt(_NUM_SIGNS)
    return _exceeds(difference, norms, eps=eps) & difference.isfinite()


def rows_that_differ(found: torch.Tensor, expected: torch.Tensor, *, eps: float) -> torch.Tensor:
    """Which rows of a floating-point tensor differ from another one's by more than rounding."""
    dtype = torch.promote_types(found.dtype, torch.float32)
    num_columns = found.shape[-1] if found.ndim else 1
    rows, others = (t.to(dtype).reshape(-1, num_columns) for t in (found, expected))
    norms = torch.linalg.vector_norm(others, dim=1)
    return _exceeds(torch.linalg.vector_norm(rows - others, dim=1), norms, eps=eps)


def _exceeds(difference: torch.Tensor, norms: torch.Tensor, *, eps: float) -> torch.Tensor:
    """Whether differences of rows with these norms are more than rounding."""
    return difference > 2 * eps * torch.maximum(norms, norms.nanmedian())


def coarsest_eps(module: nn.Module, dtypes: Sequence[torch.dtype], device: torch.device) -> float:
    """The distance of 1 to the next number in the coarsest dtype that a block may compute in."""
    found = {*dtypes, *(p.dtype for p in module.parameters() if p.is_floating_point() and p.itemsize > 1)}
    if torch.is_autocast_enabled(device.type):
        found.add(torch.get_autocast_dtype(device.type))
    least = _LEAST_EPS_CUDA if device.type == "cuda" else _LEAST_EPS
    return max(least, *(torch.finfo(dtype).eps for dtype in found))


@lru_cache(maxsize=16)
def _signs(num_columns: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    bits = torch.randint(2, (num_columns, _NUM_SIGNS), generator=generator)
    return (2 * bits - 1).to(device, dtype)


def _another_output(block: str) -> ValueError:
    return ValueError(
        "a streamed block is computed again in the backward pass and must give its first output, got another one from "
        f"block {block}: keep its counters in buffers that it changes in place, its torch.Generator in an attribute of "
        "the module, or keep the model on the device (remove zero_optimization.offload_param)"
    )
