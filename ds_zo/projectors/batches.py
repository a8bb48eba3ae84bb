"""`products` of several matrices at once: the same bits as one by one, in a few launches on CUDA.

A launch is told addresses and sizes, and Python is what it costs: so they are all that is put together here, without
views.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple, TypeVar

import torch

from ds_zo.ops import Rounding
from ds_zo.projectors import reference
from ds_zo.projectors.products import apply_, check_shape, compress, has_kernels
from ds_zo.projectors.sparse import SparseProjector
from ds_zo.projectors.workspace import scratch_addresses

BATCH_NUMEL = 1 << 25
"""Elements of scratch that one batch takes, unless a single matrix needs more."""


class Compression(NamedTuple):
    """`compress` of one matrix. Writes are fastest where `out` is held transposed."""

    G: torch.Tensor
    P: SparseProjector
    Q: SparseProjector
    out: torch.Tensor
    accumulate: bool = False


class Application(NamedTuple):
    """`apply_` of one matrix. D is read without a copy where it is held transposed."""

    W: torch.Tensor
    D: torch.Tensor
    P: SparseProjector
    Q: SparseProjector
    lr: float
    weight_decay: float = 0.0
    rounding: Rounding = "stochastic"
    offset: int = 0


class Shift(NamedTuple):
    """w <- round((1 - lr weight_decay) w - lr d) of one vector, d float32 and contiguous."""

    w: torch.Tensor
    d: torch.Tensor
    lr: float
    weight_decay: float = 0.0
    rounding: Rounding = "stochastic"
    offset: int = 0


Call = TypeVar("Call", Compression, Application)


@torch.no_grad()
def compress_all(calls: Sequence[Compression]) -> None:
    if not calls or not has_kernels(calls[0].G):
        for G, P, Q, out, accumulate in calls:
            compress(G, P, Q, out=out, accumulate=accumulate)
        return
    from ds_zo.ops.triton_projector_batches import Gathers

    for batch in _batches(calls):
        device = batch[0].G.device
        middles = scratch_addresses([P.dim * Q.num_rows for _, P, Q, _, _ in batch], device=device)
        down, across = Gathers(device), Gathers(device)
        copies = []  # alive until they are read
        for (G, P, Q, out, accumulate), middle in zip(batch, middles, strict=True):
            check_shape(G, P, Q, "gradient")
            if G.stride(1) != 1:
                G = G.contiguous()
                copies.append(G)
            stride, dim = G.stride(0), P.dim
            down.add(G.data_ptr(), stride, Q.num_rows, P.column_table, middle, dim, dtype=G.dtype, out_by_column=True)
            by_column = out.stride(0) != 1
            pitch = out.stride(0) if by_column else out.stride(1)
            across.add(
                middle,
                dim,
                dim,
                Q.column_table,
                out.data_ptr(),
                pitch,
                out_by_column=by_column,
                accumulate=accumulate,
            )
        down.launch()
        across.launch()


@torch.no_grad()
def apply_all_(calls: Sequence[Application], *, seed: int = 0, step: int = 0) -> None:
    alike = []
    for call in calls:
        if has_kernels(call.W) and call.W.is_contiguous():
            alike.append(call)
            continue
        W, D, P, Q, lr, weight_decay, rounding, offset = call
        options = {"seed": seed, "step": step, "offset": offset}
        apply_(W, D, P, Q, lr=lr, weight_decay=weight_decay, rounding=rounding, **options)
    if not alike:
        return
    from ds_zo.ops.triton_projector_batches import Gathers, Updates

    for batch in _batches(alike):
        device = batch[0].W.device
        expanded = scratch_addresses([call.P.dim * call.Q.num_rows for call in batch], device=device)
        across, updates = Gathers(device), Updates(device, seed=seed, step=step)
        copies = []
        for (W, D, P, Q, lr, weight_decay, rounding, offset), U in zip(batch, expanded, strict=True):
            check_shape(W, P, Q, "weight")
            if D.stride(0) != 1:
                D = D.t().contiguous().t()
                copies.append(D)
            across.add(D.data_ptr(), D.stride(1), P.dim, Q.row_table, U, Q.num_rows, by_row=True, out_by_column=True)
            offset_or_none = offset if rounding == "stochastic" else None
            updates.add(W, U, P.row_table, lr=lr, decay=1.0 - lr * weight_decay, offset=offset_or_none)
        across.launch()
        updates.launch()


@torch.no_grad()
def shift_all_(shifts: Sequence[Shift], *, seed: int = 0, step: int = 0) -> None:
    """A vector is a matrix of one row, updated by its own entry with value 1."""
    if not shifts or not has_kernels(shifts[0].w):
        for w, d, lr, weight_decay, rounding, offset in shifts:
            x = (w.float() * (1.0 - lr * weight_decay)).sub_(d, alpha=lr)
            reference.round_into_(w, x, (seed, step, offset) if rounding == "stochastic" else None)
        return
    from ds_zo.ops.triton_projector_batches import Updates

    device = shifts[0].w.device
    one = _ones.get(device)
    if one is None:
        one = _ones[device] = SparseProjector.identity(1, device)
    updates = Updates(device, seed=seed, step=step)
    for w, d, lr, weight_decay, rounding, offset in shifts:
        offset_or_none = offset if rounding == "stochastic" else None
        updates.add(w, d.data_ptr(), one.row_table, lr=lr, decay=1.0 - lr * weight_decay, offset=offset_or_none)
    updates.launch()


_ones: dict[torch.device, SparseProjector] = {}


def _batches(calls: Sequence[Call]) -> Iterator[list[Call]]:
    batch: list[Call] = []
    numel = 0
    for call in calls:
        needed = call.P.dim * call.Q.num_rows
        if batch and numel + needed > BATCH_NUMEL:
            yield batch
            batch, numel = [], 0
        batch.append(call)
        numel += needed
    yield batch
