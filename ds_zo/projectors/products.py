"""Products with sparse projectors: S = P^T G Q, and W <- round((1 - lr wd) W - lr P D Q^T).

Shapes: G and W are m x n (the weight as stored), P is m x d_p, Q is n x d_q, S and D are d_p x d_q. On the CPU the
products are torch operations (`reference`), on CUDA Triton kernels (`ops.triton_projectors`, imported on first use).
The host reads no value from the device.
"""

from __future__ import annotations

import os

import torch

from ds_zo.ops import Rounding
from ds_zo.projectors import reference
from ds_zo.projectors.sparse import ProjectorRows, SparseProjector
from ds_zo.projectors.workspace import scratch

_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
"""Triton interprets its kernels on the CPU, for tests without a GPU."""
RESIDUAL_NUMEL = 1 << 22
"""Elements of the residual in `relative_bias` that exist at a time."""


def product(P: ProjectorRows, X_dk: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
    """P X (num_rows x k), float32; `out` may have any strides."""
    out = torch.empty(P.num_rows, X_dk.shape[1], device=X_dk.device) if out is None else out
    if not has_kernels(X_dk):
        return out.copy_(reference.gather_sum(X_dk, *P.row_entries))
    from ds_zo.ops.triton_projectors import gather_sum_triton

    gather_sum_triton(out, X_dk, *P.row_entries)
    return out


def transpose_product(
    P: SparseProjector, Y_mk: torch.Tensor, *, out: torch.Tensor | None = None, accumulate: bool = False
) -> torch.Tensor:
    """P^T Y (dim x k), float32. `out` may have any strides; with `accumulate` the product is added to it."""
    out = torch.empty(P.dim, Y_mk.shape[1], device=Y_mk.device) if out is None else out
    if not has_kernels(Y_mk):
        result = reference.gather_sum(Y_mk, P.column_rows, P.column_values)
        return out.add_(result) if accumulate else out.copy_(result)
    from ds_zo.ops.triton_projectors import gather_sum_triton

    gather_sum_triton(out, Y_mk, P.column_rows, P.column_values, accumulate=accumulate)
    return out


@torch.no_grad()
def compress(
    G_mn: torch.Tensor,
    P: SparseProjector,
    Q: SparseProjector,
    *,
    out: torch.Tensor | None = None,
    accumulate: bool = False,
) -> torch.Tensor:
    """Writes P^T G Q to float32 `out`, or adds it with `accumulate`. Sums are in float32 for any dtype of G.

    `out` and the D of `apply_` may have any strides. If `D.t()` is contiguous, `apply_` needs no copy.
    """
    check_shape(G_mn, P, Q, "gradient")
    if out is None:
        if accumulate:
            raise ValueError("compress can accumulate only into an existing matrix, got out=None: pass out")
        out = torch.empty(P.dim, Q.dim, device=G_mn.device)
    if out.shape != (P.dim, Q.dim) or out.dtype is not torch.float32:
        raise ValueError(
            f"out must be float32 of shape {(P.dim, Q.dim)}, got {out.dtype} of {tuple(out.shape)}: "
            "allocate it from the projectors' dimensions"
        )
    # P^T G is stored transposed, so that the product with Q gathers whole rows.
    (T_nd,) = scratch((Q.num_rows, P.dim), device=G_mn.device)
    transpose_product(P, G_mn, out=T_nd.t())
    transpose_product(Q, T_nd, out=out.t(), accumulate=accumulate)
    return out


@torch.no_grad()
def apply_(
    W_mn: torch.Tensor,
    D_dd: torch.Tensor,
    P: ProjectorRows,
    Q: ProjectorRows,
    *,
    lr: float,
    weight_decay: float = 0.0,
    rounding: Rounding = "stochastic",
    seed: int = 0,
    step: int = 0,
    offset: int = 0,
) -> None:
    """W <- round((1 - lr weight_decay) W - lr P D Q^T), rounded once, by the dither of (seed, step, offset).

    `offset` is the position of the weight's first element among all elements of the model.
    """
    check_shape(W_mn, P, Q, "weight")
    dither = (seed, step, offset) if rounding == "stochastic" else None
    U_dn = _expand(D_dd, P, Q)
    _update_(W_mn, U_dn, P.indices, P.values, lr=lr, decay=1.0 - lr * weight_decay, dither=dither)


@torch.no_grad()
def relative_bias(G_mn: torch.Tensor, P: SparseProjector, Q: SparseProjector) -> torch.Tensor:
    """||P P^T G Q Q^T - G||_F / ||G||_F as a float32 scalar: the relative error of the projection; 0 for a zero
    gradient.

    Above 1, the projection is farther from G than zero is. The residual itself is computed, a few rows at a time. Its
    norm from the norms of its terms would lose small biases to cancellation.
    """
    check_shape(G_mn, P, Q, "gradient")
    U_dn = _expand(compress(G_mn, P, Q), P, Q)
    num_rows = max(1, RESIDUAL_NUMEL // max(1, G_mn.shape[1]))
    norms, residuals = [], []
    for first in range(0, P.num_rows, num_rows):
        part = slice(first, first + num_rows)
        residual = G_mn[part].to(torch.float32, copy=True)
        norms.append(torch.linalg.vector_norm(residual))
        _update_(residual, U_dn, P.indices[part], P.values[part], lr=1.0, decay=1.0, dither=None)
        residuals.append(torch.linalg.vector_norm(residual))
    norm, left = (torch.linalg.vector_norm(torch.stack(parts)) for parts in (norms, residuals))
    return left / norm.clamp(min=torch.finfo(torch.float32).tiny)


def _expand(D_dd: torch.Tensor, P: ProjectorRows, Q: ProjectorRows) -> torch.Tensor:
    """D Q^T in this stream's scratch memory. The product gathers whole rows of D.t(), which is copied unless
    contiguous."""
    U_dn, D_t_dd = scratch((P.dim, Q.num_rows), (Q.dim, P.dim), device=D_dd.device)
    product(Q, D_dd.t() if D_dd.t().is_contiguous() else D_t_dd.copy_(D_dd.t()), out=U_dn.t())
    return U_dn


def _update_(
    W_mn: torch.Tensor,
    U_dn: torch.Tensor,
    indices: torch.Tensor,
    values: torch.Tensor,
    *,
    lr: float,
    decay: float,
    dither: tuple[int, int, int] | None,
) -> None:
    """W <- round(decay W - lr P U), with P given by the indices and values of its rows."""
    if has_kernels(W_mn):
        from ds_zo.ops.triton_projectors import apply_triton

        apply_triton(W_mn, U_dn, indices, values, lr=lr, decay=decay, dither=dither)
        return
    x = W_mn.float() * decay
    x.sub_(reference.gather_sum(U_dn, indices.t(), values.t()), alpha=lr)
    reference.round_into_(W_mn, x, dither)


def has_kernels(tensor: torch.Tensor) -> bool:
    return tensor.is_cuda or _INTERPRETED


def check_shape(matrix: torch.Tensor, P: ProjectorRows, Q: ProjectorRows, what: str) -> None:
    if matrix.shape != (P.num_rows, Q.num_rows):
        raise ValueError(
            f"a {what} must have as many rows as P and as many columns as Q have rows, {(P.num_rows, Q.num_rows)}, "
            f"got {tuple(matrix.shape)}: draw the projectors from the weight's own shape"
        )
