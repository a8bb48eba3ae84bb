"""The products in torch, for the CPU: the same gathers in the same order as the kernels."""

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


def round_into_(W: torch.Tensor, x: torch.Tensor, dither: tuple[int, int, int] | None) -> None:
    """W <- x, to nearest or stochastically by the fold dither of (seed, step, offset)."""
    fmt = formats.storage_format(W.dtype)
    if dither is None or fmt.dropped_bits == 0:
        W.copy_(x)
        return
    seed, step, offset = dither
    bits = rng.fold_dither(seed=seed, step=step, offset=offset, numel=W.numel())
    addend = formats.dither_addend(bits, num_bits=rng.FOLD_DITHER_BITS, dropped_bits=fmt.dropped_bits)
    rounded = formats.round_to(fmt, np.ascontiguousarray(x.numpy()).reshape(-1), addend)
    W.copy_(torch.from_numpy(rounded).view(W.shape))  # exact: already on W's grid
