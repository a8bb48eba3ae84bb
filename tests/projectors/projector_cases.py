"""Matrices and projectors that the tests of this folder share."""

from __future__ import annotations

import torch

from ds_zo.projectors import SparseProjector


def pair(m: int, n: int, dim: int, nonzeros: int, *, seed: int = 0) -> tuple[SparseProjector, SparseProjector]:
    P = SparseProjector.draw(m, dim, nonzeros, seed=seed, stream=0)
    Q = SparseProjector.draw(n, dim, nonzeros, seed=seed, stream=1)
    return P, Q


def matrix(m: int, n: int, dtype: torch.dtype = torch.float32, *, seed: int = 0) -> torch.Tensor:
    return torch.randn(m, n, generator=torch.Generator().manual_seed(seed)).to(dtype)


def gradient(m: int, n: int, *, batch: int, rank: int = 8, noise: float = 0.1) -> torch.Tensor:
    """Low rank plus noise: the row and column spaces are the source's, mixture and noise the batch's."""
    left, right = matrix(m, rank, seed=100), matrix(n, rank, seed=101)
    mixture = torch.eye(rank) + 0.2 * matrix(rank, rank, seed=2 * batch)
    signal, error = left @ mixture @ right.t(), matrix(m, n, seed=2 * batch + 1)
    return signal / signal.norm() + noise * error / error.norm()
