"""The products in torch, for the CPU: the same gathers in the same order as the kernels."""

from __future__ import annotations

import numpy as np
import torch

from ds_zo.ops import formats, rng
from ds_zo.projectors.sparse import SparseProjector


def gather_columns(P: SparseProjector, Y_mk: torch.Tensor) -> torch.Tensor:
    """P^T Y, float32."""
    out_dk = torch.zeros(P.dim, Y_mk.shape[1], device=Y_mk.device)
    for rows, values in zip(P.column_rows, P.column_values, strict=True):
        out_dk += Y_mk[rows.int()].float().mul_(values[:, None])
    return out_dk


def gather_rows(P: SparseProjector, X_dk: torch.Tensor) -> torch.Tensor:
    """P X, float32."""
    out_mk = torch.zeros(P.num_rows, X_dk.shape[1], device=X_dk.device)
    for columns, values in zip(P.indices.t(), P.values.t(), strict=True):
        out_mk += X_dk[columns.int()].float().mul_(values[:, None])
    return out_mk


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
