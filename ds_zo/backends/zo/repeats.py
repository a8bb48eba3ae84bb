"""Compares the losses of two runs of the same passes.

[Note: two runs of a pass] ZO learns from the difference of two losses. Any cause of a difference besides the weights is
noise in the update. Examples are a generator or a counter in a closure, or in an object of another class: the engine
cannot find it there. So the first step runs its passes twice, from one state. The second run has the reverse order, so
that the parity of a counter shows. Sums of CUDA's atomic adds have no fixed order, so losses that differ by rounding
are accepted with a warning.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from deepspeed.utils import logger

Losses = Sequence[Sequence[torch.Tensor]]
"""For each pass, the tensors to difference."""

_TF32_EPS = 2.0**-10


def agree(ours: Losses, theirs: Losses) -> bool:
    """Whether both runs gave the same losses, but for the last bits."""
    for a, b in _pairs(ours, theirs):
        exact = 1e-7 if a.device.type == "cpu" else 1e-6  # CUDA's atomic adds have no fixed order
        tolerance = exact if a.dtype is torch.float32 else 1e-2
        if a.shape != b.shape or not torch.allclose(
            a.float(), b.float(), rtol=tolerance, atol=tolerance, equal_nan=True
        ):
            return False
    return True


def check_repeats(ours: Losses, theirs: Losses, dtypes: Iterable[torch.dtype]) -> None:
    """Raises if two runs of the same passes differ by more than rounding, and warns of a smaller difference. `dtypes`:
    the formats that the model computes in."""
    wide = (dtype for dtype in dtypes if dtype.is_floating_point and dtype.itemsize > 1)  # 8 bits are storage alone
    eps = max((torch.finfo(dtype).eps for dtype in wide), default=0.0)
    differences = [(_difference(a, b), _rounding(a, eps)) for a, b in _pairs(ours, theirs)]
    found, allowed = max(differences, key=lambda each: each[0] / each[1])
    said = (
        f"the same pass, run twice from one state in the first step, gives losses that differ by {found:.2g} (relative)"
    )
    if not found <= allowed:
        raise ValueError(
            f"ZO compares two passes, and {said} (rounding explains {allowed:.1g}), because the forward depends on a "
            "random generator or a counter in a closure, or in an object that is no module: keep it in an attribute of "
            "a module, or in a list or dict there, or draw from torch's default generator"
        )
    logger.warning(
        f"ds_zo: {said}, and ZO takes this difference for an effect of the weights; atomic adds on CUDA are one cause, "
        "a random generator or a counter in a closure is another"
    )


def _difference(a: torch.Tensor, b: torch.Tensor) -> float:
    """The norm of the difference of two tensors, relative to the norm of one. That is taken as 1 if it is smaller: the
    terms of a loss may cancel."""
    finite = a.isfinite()
    if a.shape != b.shape or not torch.equal(finite, b.isfinite()):
        return math.inf
    a, b = a[finite].double(), b[finite].double()
    return float((a - b).norm() / b.norm().clamp_min(1.0))


def _rounding(value: torch.Tensor, eps: float) -> float:
    """The relative difference of two values that rounding explains, if numbers near 1 are `eps` apart where the model
    computes. A loss is a mean of many rounded numbers."""
    eps = max(eps, _TF32_EPS) if value.is_cuda else eps
    return max(1e-5, 2 * torch.finfo(value.dtype).eps, eps / 4 if value.numel() == 1 else 2 * eps)


def _pairs(ours: Losses, theirs: Losses) -> Iterable[tuple[torch.Tensor, torch.Tensor]]:
    for a, b in zip(ours, theirs, strict=True):
        yield from zip(a, b, strict=True)
