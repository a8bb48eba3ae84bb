"""The products in torch, for the CPU. They gather in the same order as the Triton kernels."""

from __future__ import annotations

import numpy as np
import torch

from ds_zo.ops import formats, rng


def gather_sum(source: torch.Tensor, rows: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """out[c] = sum over e of values[e, c] * source[rows[e, c]], float32, e in order."""
    out = torch.zeros(rows.shape[1], source.shape[1], device=source.device)
    for row, value in zip(rows.int().unbind(), values[:, :, None].unbind(), strict=True):
        out += source.index_select(0, row).float().mul_(value)
    return out


def round_into_(weight: torch.Tensor, x: torch.Tensor, dither: tuple[int, int, int] | None) -> None:
    """weight <- x, rounded to nearest, or stochastically by the rounding bits of `dither`, (seed, step, offset)."""
    fmt = formats.storage_format(weight.dtype)
    if dither is None or fmt.dropped_bits == 0:
        weight.copy_(x)
        return
    seed, step, offset = dither
    bits = rng.fold_dither(seed=seed, step=step, offset=offset, numel=weight.numel())
    addend = formats.dither_addend(bits, num_bits=rng.FOLD_DITHER_BITS, dropped_bits=fmt.dropped_bits)
    rounded = formats.round_to(fmt, np.ascontiguousarray(x.numpy()).reshape(-1), addend)
    weight.copy_(torch.from_numpy(rounded).view(weight.shape))  # exact: the values are representable in its dtype
