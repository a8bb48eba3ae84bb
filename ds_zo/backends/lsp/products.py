"""Compresses gradients into sums, and applies directions to weights, for many matrices at a time.

Of a small batch, a layer's backward takes less time than it takes to launch the products of its matrices one by one. So
the gradients of a layer are held, up to MAX_HELD_BYTES in all, and compressed together. The sums are the same bits
either way. Launch arguments are computed once for each set of addresses, because the same addresses soon recur.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
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
        if launches is not None:
            if len(self._launches) >= _MAX_CACHED:
                self._launches.clear()
            self._launches[key] = launches, [matrix.subspace for matrix in matrices]

    def clear(self) -> None:
        self._launches.clear()


def apply_directions_cached_(
    launch_cache: LaunchCache, matrices: Sequence[MatrixState], directions: Sequence[torch.Tensor], rate: Rate
) -> None:
    """Does what `apply_directions_` does, at one rate for all matrices, with launches that are prepared once."""
    key = *[matrix.parameter.data_ptr() for matrix in matrices], *[direction.data_ptr() for direction in directions]
    found = launch_cache.get(key, matrices)
    if found is not None:
        found.launch(lr=rate.lr, decay=1.0 - rate.lr * rate.weight_decay, step=rate.step)
        return
    updates = [(matrix, direction, rate) for matrix, direction in zip(matrices, directions, strict=True)]
    launch_cache.put(key, matrices, apply_directions_(updates))


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


def apply_directions_(updates: Iterable[tuple[MatrixState, torch.Tensor, Rate]]) -> PreparedLaunches | None:
    """W <- round(W (1 - lr wd) - lr P D Q^T), or for a whole parameter W <- round(W (1 - lr wd) - lr D).

    All updates must be of the same step. The returned launches can be repeated at another rate that all matrices
    share; None: they cannot be repeated."""
    projected: list[MatrixUpdate] = []
    vectors: list[VectorUpdate] = []
    step, has_whole = 0, False
    for matrix, direction, rate in updates:
        p, step = matrix.parameter, rate.step
        stochastic = rate.stochastic and p.dtype is not torch.float32
        rounding: Rounding = "stochastic" if stochastic else "nearest"
        if matrix.subspace is not None:
            P, Q = matrix.subspace.P, matrix.subspace.Q_update
            projected.append(MatrixUpdate(p, direction.t(), P, Q, rate.lr, rate.weight_decay, rounding, matrix.offset))
        elif p.ndim < 2:
            vectors.append(VectorUpdate(p, direction, rate.lr, rate.weight_decay, rounding, matrix.offset))
        else:
            dither = Dither(step=step, offset=matrix.offset) if stochastic else None
            sgd_update_(p, direction, lr=rate.lr, decay=1.0 - rate.lr * rate.weight_decay, dither=dither)
            has_whole = True
    matrix_launches = apply_all_(projected, step=step)
    vector_launches = update_vectors_(vectors, step=step)
    if has_whole or (projected and vectors):
        return None
    return vector_launches if vectors else matrix_launches
