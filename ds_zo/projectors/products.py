"""Into the subspace and out of it: S = P^T G Q, and W <- round((1 - lr wd) W - lr P D Q^T).

Shapes: G and W are m x n (the weight as stored), P is m x d_p, Q is n x d_q, S and D are d_p x d_q. On the CPU torch
operations (`reference`), on CUDA Triton kernels (`ops.triton_projectors`, not imported before). Nothing is read by the
host.
"""

from __future__ import annotations

import torch

from ds_zo.ops import Rounding
from ds_zo.projectors import reference
from ds_zo.projectors.sparse import SparseProjector


def product(P: SparseProjector, X_dk: torch.Tensor) -> torch.Tensor:
    """P X (num_rows x k), float32."""
    return reference.gather_rows(P, X_dk)


def transpose_product(P: SparseProjector, Y_mk: torch.Tensor) -> torch.Tensor:
    """P^T Y (dim x k), float32."""
    return reference.gather_columns(P, Y_mk)


@torch.no_grad()
def compress(
    G_mn: torch.Tensor,
    P: SparseProjector,
    Q: SparseProjector,
    *,
    out: torch.Tensor | None = None,
    accumulate: bool = False,
) -> torch.Tensor:
    """P^T G Q into float32 `out` (or added to it), accumulated in float32 whatever G is stored in."""
    _check_shape(G_mn, P, Q, "gradient")
    if out is None:
        if accumulate:
            raise ValueError("compress can accumulate only into an existing matrix, got out=None: pass out")
        out = torch.empty(P.dim, Q.dim, device=G_mn.device)
    if out.shape != (P.dim, Q.dim) or out.dtype is not torch.float32:
        raise ValueError(
            f"out must be float32 of shape {(P.dim, Q.dim)}, got {out.dtype} of {tuple(out.shape)}: "
            "allocate it from the projectors' dimensions"
        )
    S_t = reference.gather_columns(Q, reference.gather_columns(P, G_mn).t())
    out.add_(S_t.t()) if accumulate else out.copy_(S_t.t())
    return out


@torch.no_grad()
def apply_(
    W_mn: torch.Tensor,
    D_dd: torch.Tensor,
    P: SparseProjector,
    Q: SparseProjector,
    *,
    lr: float,
    weight_decay: float = 0.0,
    rounding: Rounding = "stochastic",
    seed: int = 0,
    step: int = 0,
    offset: int = 0,
) -> None:
    """W <- round((1 - lr weight_decay) W - lr P D Q^T), rounded once, by the dither of (seed, step, offset).

    `offset` is the weight's first element among all of the model's.
    """
    _check_shape(W_mn, P, Q, "weight")
    decay = 1.0 - lr * weight_decay
    dither = (seed, step, offset) if rounding == "stochastic" else None
    U_dn = reference.gather_rows(Q, D_dd.t()).t()
    x = W_mn.float() * decay
    x.sub_(reference.gather_rows(P, U_dn), alpha=lr)
    reference.round_into_(W_mn, x, dither)


@torch.no_grad()
def relative_bias(G_mn: torch.Tensor, P: SparseProjector, Q: SparseProjector) -> torch.Tensor:
    """||P P^T G Q Q^T - G||_F / ||G||_F as a float32 scalar: the part of a gradient that the projectors lose.

    Above 1 they do more harm than a zero gradient; 0 for a zero gradient. Formed in full, hence exact for small biases
    too, at the price of one float32 temporary of G's size.
    """
    _check_shape(G_mn, P, Q, "gradient")
    residual = G_mn.to(torch.float32, copy=True)
    norm = torch.linalg.vector_norm(residual)
    apply_(residual, compress(G_mn, P, Q), P, Q, lr=1.0, rounding="nearest")
    return torch.linalg.vector_norm(residual) / norm.clamp(min=torch.finfo(torch.float32).tiny)


def _check_shape(matrix: torch.Tensor, P: SparseProjector, Q: SparseProjector, what: str) -> None:
    if matrix.shape != (P.num_rows, Q.num_rows):
        raise ValueError(
            f"a {what} must have as many rows as P and as many columns as Q have rows, {(P.num_rows, Q.num_rows)}, "
            f"got {tuple(matrix.shape)}: draw the projectors from the weight's own shape"
        )
