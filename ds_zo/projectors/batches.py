"""`products` of several matrices at once: the same bits as one by one, in a few launches on CUDA.

A launch is told addresses and sizes, and Python is what it costs: so they are all that is put together here, without
views.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple, TypeVar

import torch

from ds_zo.ops import Rounding
from ds_zo.projectors import reference
from ds_zo.projectors.products import apply_, check_shape, compress, has_kernels
from ds_zo.projectors.sparse import ProjectorRows, SparseProjector
from ds_zo.projectors.workspace import scratch_addresses, scratch_location

BATCH_NUMEL = 1 << 25
"""Elements of scratch that one batch takes, unless a single matrix needs more."""


class Compression(NamedTuple):
    """`compress` of one matrix. Writes are fastest where `out` is held transposed."""

    G: torch.Tensor
    P: SparseProjector
    Q: SparseProjector
    out: torch.Tensor
    accumulate: bool = False


class MatrixUpdate(NamedTuple):
    """`apply_` of one matrix. D is read without a copy where it is held transposed."""

    W: torch.Tensor
    D: torch.Tensor
    P: ProjectorRows
    Q: ProjectorRows
    lr: float
    weight_decay: float = 0.0
    rounding: Rounding = "stochastic"
    offset: int = 0


class VectorUpdate(NamedTuple):
    """w <- round((1 - lr weight_decay) w - lr d) of one vector, d float32 and contiguous."""

    w: torch.Tensor
    d: torch.Tensor
    lr: float
    weight_decay: float = 0.0
    rounding: Rounding = "stochastic"
    offset: int = 0


Call = TypeVar("Call", Compression, MatrixUpdate)


class PreparedLaunches:
    """Launches of products whose addresses are known, to be made again and again."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._calls: list[tuple[float | None, float, Callable[..., object]]] = []
        """An update's rate and decay; None: a gather."""
        self._weights: list[torch.Tensor] = []
        self._copies: list[torch.Tensor] = []
        self._scratch: tuple[int, int] | None = None
        self._needs_scratch = False

    def add(
        self,
        gathers: Iterable[Callable[[], object]],
        updates: Iterable[tuple[float, float, Callable[..., object]]] = (),
        *,
        weights: Iterable[torch.Tensor] = (),
        copies: Iterable[torch.Tensor] = (),
    ) -> None:
        """A batch. The next one uses the same scratch, which must not have moved since the first; gathers need it."""
        before = len(self._calls)
        self._calls += [(None, 1.0, call) for call in gathers]
        self._needs_scratch |= len(self._calls) > before
        self._calls += updates
        self._weights += weights
        self._copies += copies
        self._scratch = scratch_location(self._device)

    def is_valid(self) -> bool:
        """Nothing was copied and scratch is where it was: the caller's own addresses decide."""
        if self._copies or not self._needs_scratch:
            return not self._copies
        return self._scratch is not None and self._scratch == scratch_location(self._device)

    def launch(self, *, lr: float | None = None, decay: float = 1.0, seed: int = 0, step: int = 0) -> None:
        """`lr` and `decay` take the place of what every update was prepared with."""
        words: tuple[int, ...] = ()
        if self._weights:
            from ds_zo.ops.triton_projector_batches import dither_words

            words = dither_words(seed, step)
        for own_lr, own_decay, call in self._calls:
            if own_lr is None:
                call()
            elif lr is None:
                call(own_lr, own_decay, *words)
            else:
                call(lr, decay, *words)
        if self._weights:  # a graph that still needs the old values must notice
            torch.autograd.graph.increment_version(self._weights)


@torch.no_grad()
def compress_all(calls: Sequence[Compression]) -> PreparedLaunches | None:
    """What it returns does the same again, where the addresses are the same."""
    if not calls or not has_kernels(calls[0].G):
        for G, P, Q, out, accumulate in calls:
            compress(G, P, Q, out=out, accumulate=accumulate)
        return None
    from ds_zo.ops.triton_projector_batches import Gathers

    device = calls[0].G.device
    prepared = PreparedLaunches(device)
    for batch, middles in _batches(calls, device):
        P_gathers, Q_gathers = Gathers(device), Gathers(device)
        copies = []  # alive until they are read
        for (G, P, Q, out, accumulate), middle in zip(batch, middles, strict=True):
            check_shape(G, P, Q, "gradient")
            if G.stride(1) != 1:
                G = G.contiguous()
                copies.append(G)
            stride, dim = G.stride(0), P.dim
            P_gathers.add(
                G.data_ptr(), stride, Q.num_rows, P.column_table, middle, dim, dtype=G.dtype, out_by_column=True
            )
            by_column = out.stride(0) != 1
            pitch = out.stride(0) if by_column else out.stride(1)
            Q_gathers.add(
                middle,
                dim,
                dim,
                Q.column_table,
                out.data_ptr(),
                pitch,
                out_by_column=by_column,
                accumulate=accumulate,
            )
        prepared.add([*P_gathers.launches(), *Q_gathers.launches()], copies=copies)
    prepared.launch()
    return prepared


@torch.no_grad()
def apply_all_(calls: Sequence[MatrixUpdate], *, seed: int = 0, step: int = 0) -> PreparedLaunches | None:
    """What it returns does the same again, where the addresses are the same; None: that is not known."""
    batched = []
    for call in calls:
        if has_kernels(call.W) and call.W.is_contiguous():
            batched.append(call)
            continue
        W, D, P, Q, lr, weight_decay, rounding, offset = call
        options = {"seed": seed, "step": step, "offset": offset}
        apply_(W, D, P, Q, lr=lr, weight_decay=weight_decay, rounding=rounding, **options)
    if not batched:
        return None
    from ds_zo.ops.triton_projector_batches import Gathers, Updates

    device = batched[0].W.device
    prepared = PreparedLaunches(device)
    for batch, expanded in _batches(batched, device):
        Q_gathers, updates = Gathers(device), Updates(device)
        copies = []
        for (W, D, P, Q, lr, weight_decay, rounding, offset), U in zip(batch, expanded, strict=True):
            check_shape(W, P, Q, "weight")
            if D.stride(0) != 1:
                D = D.t().contiguous().t()
                copies.append(D)
            Q_gathers.add(D.data_ptr(), D.stride(1), P.dim, Q.row_table, U, Q.num_rows, by_row=True, out_by_column=True)
            offset_or_none = offset if rounding == "stochastic" else None
            updates.add(W, U, P.row_table, lr=lr, decay=1.0 - lr * weight_decay, offset=offset_or_none)
        weights = [call.W for call in batch]
        prepared.add(Q_gathers.launches(), updates.launches(), weights=weights, copies=copies)
    prepared.launch(seed=seed, step=step)
    return prepared if len(batched) == len(calls) else None


@torch.no_grad()
def update_vectors_(calls: Sequence[VectorUpdate], *, seed: int = 0, step: int = 0) -> PreparedLaunches | None:
    """A vector is a matrix of one row, updated by its own entry with value 1. What it returns does the same again,
    where the addresses are the same."""
    if not calls or not has_kernels(calls[0].w):
        for w, d, lr, weight_decay, rounding, offset in calls:
            x = (w.float() * (1.0 - lr * weight_decay)).sub_(d, alpha=lr)
            reference.round_into_(w, x, (seed, step, offset) if rounding == "stochastic" else None)
        return None
    from ds_zo.ops.triton_projector_batches import Updates

    device = calls[0].w.device
    one = _ones.get(device)
    if one is None:
        one = _ones[device] = SparseProjector.identity(1, device)
    updates = Updates(device)
    for w, d, lr, weight_decay, rounding, offset in calls:
        offset_or_none = offset if rounding == "stochastic" else None
        updates.add(w, d.data_ptr(), one.row_table, lr=lr, decay=1.0 - lr * weight_decay, offset=offset_or_none)
    prepared = PreparedLaunches(device)
    prepared.add((), updates.launches(), weights=[call.w for call in calls])
    prepared.launch(seed=seed, step=step)
    return prepared


_ones: dict[torch.device, SparseProjector] = {}


def _batches(calls: Sequence[Call], device: torch.device) -> Iterator[tuple[list[Call], list[int]]]:
    """Each with addresses of scratch. All ask for it once beforehand: scratch that grew for a later batch would move,
    and launches of the earlier ones, which are yet to be made, would write to memory that is no longer theirs."""
    batches: list[list[Call]] = []
    numel = 0
    for call in calls:
        needed = _scratch_numel(call)
        if not batches or numel + needed > BATCH_NUMEL:
            batches.append([])
            numel = 0
        batches[-1].append(call)
        numel += needed
    sizes = [[_scratch_numel(call) for call in batch] for batch in batches]
    for needs in sizes:
        scratch_addresses(needs, device=device)
    for batch, needs in zip(batches, sizes, strict=True):
        yield batch, scratch_addresses(needs, device=device)


def _scratch_numel(call: Compression | MatrixUpdate) -> int:
    return call.P.dim * call.Q.num_rows
