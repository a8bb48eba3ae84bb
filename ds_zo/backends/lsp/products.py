"""Compresses gradients into sums, and applies directions to weights, for many matrices at a time.

Of a small batch, a layer's backward takes less time than it takes to launch the products of its matrices one by one. So
the gradients of a layer are held, up to MAX_HELD_BYTES in all, and compressed together. The sums are the same bits
either way. Launch arguments are computed once for each set of addresses, because the same addresses soon recur.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch

from ds_zo.backends.lsp.matrices import MatrixState, Subspace
from ds_zo.ops import Rounding
from ds_zo.optim import Dither, sgd_update_
from ds_zo.projectors import (
    Compression,
    MatrixUpdate,
    PreparedLaunches,
    VectorUpdate,
    apply_all_,
    compress_all,
    update_vectors_,
)

MAX_HELD_BYTES = 128 << 20
_MAX_CACHED = 512
"""Sets of prepared launches in one cache, which is emptied when it is full."""


@dataclass(frozen=True)
class Rate:
    """The learning rate and other settings of one parameter in one step."""

    lr: float
    weight_decay: float
    step: int
    """Selects the rounding bits."""
    stochastic: bool


Update = tuple[MatrixState, torch.Tensor, Rate]
"""A parameter, its direction and its rate."""


class LaunchCache:
    """Prepared launches by the addresses that they were prepared for. They are valid for unchanged projectors only."""

    def __init__(self) -> None:
        self._launches: dict[tuple[int, ...], tuple[PreparedLaunches, list[Subspace | None]]] = {}

    def get(self, key: tuple[int, ...], matrices: Sequence[MatrixState]) -> PreparedLaunches | None:
        found = self._launches.get(key)
        if found is None:
            return None
        launches, subspaces = found
        same = all(matrix.subspace is subspace for matrix, subspace in zip(matrices, subspaces, strict=True))
        return launches if same and launches.is_valid() else None

    def put(self, key: tuple[int, ...], matrices: Sequence[MatrixState], launches: PreparedLaunches | None) -> None:
        """Keeps launches that can be repeated. Others may hold copies of whole gradients."""
        if launches is not None and launches.is_valid():
            if len(self._launches) >= _MAX_CACHED:
                self._launches.clear()
            self._launches[key] = launches, [matrix.subspace for matrix in matrices]

    def clear(self) -> None:
        self._launches.clear()


class HeldGradients:
    """Gradients of projected matrices that wait to be compressed. Each stays in its parameter's `.grad` until then."""

    def __init__(self) -> None:
        self._matrices: dict[int, MatrixState] = {}
        self._num_bytes = 0
        self.launch_cache = LaunchCache()

    def add(self, matrix: MatrixState) -> None:
        """Queues a gradient. If one of the same matrix waits already, autograd has added the new one to it."""
        if id(matrix) in self._matrices:
            return
        grad = matrix.parameter.grad
        assert grad is not None
        self._matrices[id(matrix)] = matrix
        self._num_bytes += grad.nbytes
        if self._num_bytes >= MAX_HELD_BYTES:
            self.compress()

    def compress(self) -> None:
        """Adds all held gradients to their sums."""
        if not self._matrices:
            return
        matrices = [matrix for matrix in self._matrices.values() if matrix.parameter.grad is not None]
        self.clear()
        if not matrices:  # `zero_grad` has dropped the gradients
            return
        found: list[int] = []
        for matrix in matrices:
            grad = matrix.parameter.grad
            assert grad is not None
            found += (id(matrix), grad.data_ptr(), grad.stride(0), matrix.has_total)
        key = tuple(found)
        launches = self.launch_cache.get(key, matrices)
        if launches is None:
            self.launch_cache.put(key, matrices, compress_matrices(matrices))
            return
        launches.launch()
        for matrix in matrices:
            matrix.has_total = True
            matrix.parameter.grad = None

    def clear(self) -> None:
        self._matrices.clear()
        self._num_bytes = 0


def compress_matrices(matrices: Sequence[MatrixState]) -> PreparedLaunches | None:
    """Adds each matrix's projected gradient to its sum and frees the gradient. The returned launches can be repeated
    for gradients at the same addresses; None: they cannot be repeated."""
    calls = []
    for matrix in matrices:
        subspace, grad = matrix.subspace, matrix.parameter.grad
        assert subspace is not None and matrix.total is not None and grad is not None
        calls.append(Compression(grad, subspace.P, subspace.Q, matrix.total.t(), matrix.has_total))
        matrix.has_total = True
        matrix.parameter.grad = None
    return compress_all(calls)


def apply_directions_(
    launch_cache: LaunchCache, updates: Iterable[tuple[MatrixState, torch.Tensor, Rate | None]]
) -> None:
    """W <- round(W (1 - lr wd) - lr P D Q^T), or for a whole parameter W <- round(W (1 - lr wd) - lr D).

    All updates must be of the same step. A parameter without a rate stays as it is."""
    projected: list[Update] = []
    vectors: list[Update] = []
    for matrix, direction, rate in updates:
        p = matrix.parameter
        if rate is None:
            continue
        if matrix.subspace is not None:
            projected.append((matrix, direction, rate))
        elif p.ndim < 2:
            vectors.append((matrix, direction, rate))
        else:
            stochastic = _rounding(p, rate) == "stochastic"
            dither = Dither(step=rate.step, offset=matrix.offset) if stochastic else None
            sgd_update_(p, direction, lr=rate.lr, decay=1.0 - rate.lr * rate.weight_decay, dither=dither)
    for part, launch in ((projected, _update_projected_), (vectors, _update_vectors_)):
        if part:
            _launch_cached(launch_cache, part, launch)


def _launch_cached(
    launch_cache: LaunchCache, updates: list[Update], launch: Callable[[list[Update]], PreparedLaunches | None]
) -> None:
    """Repeats prepared launches if all updates are at one rate, and prepares them the first time."""
    rate, matrices = updates[0][2], [matrix for matrix, _, _ in updates]
    if any(other is not rate for _, _, other in updates):
        launch(updates)
        return
    key = tuple(x for matrix, direction, _ in updates for x in (matrix.parameter.data_ptr(), direction.data_ptr()))
    found = launch_cache.get(key, matrices)
    if found is not None:
        found.launch(lr=rate.lr, decay=1.0 - rate.lr * rate.weight_decay, step=rate.step)
    else:
        launch_cache.put(key, matrices, launch(updates))


def _update_projected_(updates: list[Update]) -> PreparedLaunches | None:
    calls = []
    for matrix, direction, rate in updates:
        p, subspace = matrix.parameter, matrix.subspace
        assert subspace is not None
        settings = rate.lr, rate.weight_decay, _rounding(p, rate), matrix.offset
        calls.append(MatrixUpdate(p, direction.t(), subspace.P, subspace.Q_update, *settings))
    return apply_all_(calls, step=updates[0][2].step)


def _update_vectors_(updates: list[Update]) -> PreparedLaunches | None:
    calls = []
    for matrix, direction, rate in updates:
        settings = rate.lr, rate.weight_decay, _rounding(matrix.parameter, rate), matrix.offset
        calls.append(VectorUpdate(matrix.parameter, direction, *settings))
    return update_vectors_(calls, step=updates[0][2].step)


def _rounding(p: torch.Tensor, rate: Rate) -> Rounding:
    return "stochastic" if rate.stochastic and p.dtype is not torch.float32 else "nearest"
