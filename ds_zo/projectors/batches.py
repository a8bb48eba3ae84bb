"""`products` of several matrices at once, in a few launches on CUDA. The results have the same bits as one by one.

The cost of a launch is the Python code that collects its arguments. So this module passes addresses and sizes and makes
no tensor views.
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
"""Elements of scratch memory that one batch uses at most, unless a single matrix needs more."""


class Compression(NamedTuple):
    """The arguments of `compress` for one matrix. It is fastest if `out.t()` is contiguous."""

    G_mn: torch.Tensor
    P: SparseProjector
    Q: SparseProjector
    out: torch.Tensor
    accumulate: bool = False


class MatrixUpdate(NamedTuple):
    """The arguments of `apply_` for one matrix. D is read without a copy if `D.t()` is contiguous."""

    W_mn: torch.Tensor
    D_dd: torch.Tensor
    P: ProjectorRows
    Q: ProjectorRows
    lr: float
    weight_decay: float = 0.0
    rounding: Rounding = "stochastic"
    offset: int = 0


class VectorUpdate(NamedTuple):
    """The update w <- round((1 - lr weight_decay) w - lr d) of one vector; d is contiguous float32."""

    w_n: torch.Tensor
    d_n: torch.Tensor
    lr: float
    weight_decay: float = 0.0
    rounding: Rounding = "stochastic"
    offset: int = 0


Call = TypeVar("Call", Compression, MatrixUpdate)


class PreparedLaunches:
    """Kernel launches for fixed addresses, which can be repeated."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._calls: list[tuple[float | None, float, Callable[..., object]]] = []
        """Learning rate and decay of an update and its launch; the rate is None for a gather."""
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
        """Adds a batch of launches. The gathers of all batches use the same scratch memory, which must not move."""
        before = len(self._calls)
        self._calls += [(None, 1.0, call) for call in gathers]
        self._needs_scratch |= len(self._calls) > before
        self._calls += updates
        self._weights += weights
        self._copies += copies
        self._scratch = scratch_location(self._device)

    def is_valid(self) -> bool:
        """Whether the launches can be repeated: no operand was copied, and scratch memory has not moved.

        The caller has to check the addresses of its own tensors."""
        if self._copies or not self._needs_scratch:
            return not self._copies
        return self._scratch is not None and self._scratch == scratch_location(self._device)

    def launch(self, *, lr: float | None = None, decay: float = 1.0, seed: int = 0, step: int = 0) -> None:
        """Issues all launches. With `lr`, `lr` and `decay` replace the values that updates were prepared with."""
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
        if self._weights:  # so that autograd notices if a graph still needs the old values
            torch.autograd.graph.increment_version(self._weights)


@torch.no_grad()
def compress_all(calls: Sequence[Compression]) -> PreparedLaunches | None:
    """Compresses all gradients. Returns launches that can be repeated for the same addresses; None without kernels."""
    if not calls or not has_kernels(calls[0].G_mn):
        for G_mn, P, Q, out, accumulate in calls:
            compress(G_mn, P, Q, out=out, accumulate=accumulate)
        return None
    from ds_zo.ops.triton_projector_batches import Gathers

    device = calls[0].G_mn.device
    prepared = PreparedLaunches(device)
    for batch, T_addresses in _batches(calls, device):
        P_gathers, Q_gathers = Gathers(device), Gathers(device)
        copies = []  # kept alive until the launches have read them
        for (G_mn, P, Q, out, accumulate), T_address in zip(batch, T_addresses, strict=True):
            check_shape(G_mn, P, Q, "gradient")
            if G_mn.stride(1) != 1:
                G_mn = G_mn.contiguous()
                copies.append(G_mn)
            stride, dim = G_mn.stride(0), P.dim
            P_gathers.add(
                G_mn.data_ptr(),
                stride,
                Q.num_rows,
                P.column_table,
                T_address,
                dim,
                dtype=G_mn.dtype,
                out_by_column=True,
            )
            by_column = out.stride(0) != 1
            pitch = out.stride(0) if by_column else out.stride(1)
            Q_gathers.add(
                T_address,
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
    """Updates all weights. Returns launches that can be repeated for the same addresses; None if some weight was
    updated without kernels."""
    batched = []
    for call in calls:
        if has_kernels(call.W_mn) and call.W_mn.is_contiguous():
            batched.append(call)
            continue
        W_mn, D_dd, P, Q, lr, weight_decay, rounding, offset = call
        options = {"seed": seed, "step": step, "offset": offset}
        apply_(W_mn, D_dd, P, Q, lr=lr, weight_decay=weight_decay, rounding=rounding, **options)
    if not batched:
        return None
    from ds_zo.ops.triton_projector_batches import Gathers, Updates

    device = batched[0].W_mn.device
    prepared = PreparedLaunches(device)
    for batch, U_addresses in _batches(batched, device):
        Q_gathers, updates = Gathers(device), Updates(device)
        copies = []
        for (W_mn, D_dd, P, Q, lr, weight_decay, rounding, offset), U_address in zip(batch, U_addresses, strict=True):
            check_shape(W_mn, P, Q, "weight")
            if D_dd.stride(0) != 1:
                D_dd = D_dd.t().contiguous().t()
                copies.append(D_dd)
            Q_gathers.add(
                D_dd.data_ptr(),
                D_dd.stride(1),
                P.dim,
                Q.row_table,
                U_address,
                Q.num_rows,
                by_row=True,
                out_by_column=True,
            )
            offset_or_none = offset if rounding == "stochastic" else None
            updates.add(W_mn, U_address, P.row_table, lr=lr, decay=1.0 - lr * weight_decay, offset=offset_or_none)
        weights = [call.W_mn for call in batch]
        prepared.add(Q_gathers.launches(), updates.launches(), weights=weights, copies=copies)
    prepared.launch(seed=seed, step=step)
    return prepared if len(batched) == len(calls) else None


@torch.no_grad()
def update_vectors_(calls: Sequence[VectorUpdate], *, seed: int = 0, step: int = 0) -> PreparedLaunches | None:
    """Updates all vectors. Returns launches that can be repeated for the same addresses; None without kernels, or if
    some vector is not contiguous, which is updated through a copy.

    The kernels treat a vector as a matrix of one row, with the 1 x 1 identity as P."""
    if not calls or not has_kernels(calls[0].w_n):
        for w_n, d_n, lr, weight_decay, rounding, offset in calls:
            x = (w_n.float() * (1.0 - lr * weight_decay)).sub_(d_n, alpha=lr)
            reference.round_into_(w_n, x, (seed, step, offset) if rounding == "stochastic" else None)
        return None
    from ds_zo.ops.triton_projector_batches import Updates

    device = calls[0].w_n.device
    one = _ones.get(device)
    if one is None:
        one = _ones[device] = SparseProjector.identity(1, device)
    updates = Updates(device)
    weights = [call.w_n.detach().contiguous() for call in calls]
    for weight, (_, d_n, lr, weight_decay, rounding, offset) in zip(weights, calls, strict=True):
        offset_or_none = offset if rounding == "stochastic" else None
        updates.add(weight, d_n.data_ptr(), one.row_table, lr=lr, decay=1.0 - lr * weight_decay, offset=offset_or_none)
    prepared = PreparedLaunches(device)
    prepared.add((), updates.launches(), weights=[call.w_n for call in calls])
    prepared.launch(seed=seed, step=step)
    copied = [(call.w_n, weight) for call, weight in zip(calls, weights, strict=True) if not call.w_n.is_contiguous()]
    for w_n, weight in copied:
        w_n.copy_(weight)
    return None if copied else prepared


_ones: dict[torch.device, SparseProjector] = {}
"""The 1 x 1 identity on each device."""


def _batches(calls: Sequence[Call], device: torch.device) -> Iterator[tuple[list[Call], list[int]]]:
    """Splits calls into batches, and yields each with addresses in scratch memory.

    The scratch memory for all batches is requested first. If it grew for a later batch, it would move, and launches of
    earlier batches, which are issued later, would write to freed memory."""
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
