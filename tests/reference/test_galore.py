"""The GaLore reference: bias of its projection, memory of a rank, and its steps."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from ds_zo.reference.galore import GaLoreAdamW, biases_by_rank, bytes_per_rank, rank_within


def _matrix(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("shape", [(12, 7), (7, 12)])
def test_galore_biases_are_those_of_the_definition(shape: tuple[int, int]) -> None:
    G_fit, G_test = _matrix(*shape), _matrix(*shape, seed=1)
    lost = biases_by_rank(G_fit, G_test)
    U, _, V_t = torch.linalg.svd(G_fit, full_matrices=False)
    for rank in (0, 3, 7):
        for G, found in zip((G_fit, G_test), lost, strict=True):
            kept = U[:, :rank] @ U[:, :rank].t() @ G if shape[0] < shape[1] else G @ V_t[:rank].t() @ V_t[:rank]
            assert float(found[rank]) == pytest.approx(float((G - kept).norm() / G.norm()), abs=1e-5)


def test_galore_rank_fills_its_memory() -> None:
    budget = 10 * bytes_per_rank(64, 32) + 5
    assert bytes_per_rank(64, 32) == 4 * 32 + 8 * 64
    assert rank_within(budget, 64, 32) == rank_within(budget, 32, 64) == 10
    assert rank_within(10**9, 64, 32) == 32


def test_galore_without_rank_is_adamw() -> None:
    ours, theirs = (torch.nn.Parameter(_matrix(5, 4)) for _ in range(2))
    settings: dict[str, Any] = {"lr": 0.01, "betas": (0.8, 0.95), "eps": 1e-8, "weight_decay": 0.1}
    optimizers = GaLoreAdamW([ours], **settings), torch.optim.AdamW([theirs], **settings)
    for step in range(5):
        for p, optimizer in zip((ours, theirs), optimizers, strict=True):
            p.grad = _matrix(5, 4, seed=step + 1)
            optimizer.step()
    assert torch.allclose(ours, theirs, atol=1e-6)


@pytest.mark.parametrize("shape", [(6, 9), (9, 6)])
def test_galore_moves_in_the_directions_of_its_last_refresh(shape: tuple[int, int]) -> None:
    p = torch.nn.Parameter(torch.zeros(shape))
    optimizer = GaLoreAdamW([p], lr=1.0, rank=2, refresh_interval=2, scale=1.0)
    gradients = [_matrix(*shape, seed=seed) for seed in range(3)]
    for step, G in enumerate(gradients):
        before = p.detach().clone()
        p.grad = G
        optimizer.step()
        U, _, V_t = torch.linalg.svd(gradients[0 if step < 2 else 2], full_matrices=False)
        moved = p.detach() - before
        kept = U[:, :2] @ U[:, :2].t() @ moved if shape[0] < shape[1] else moved @ V_t[:2].t() @ V_t[:2]
        assert torch.allclose(kept, moved, atol=1e-5)
        assert moved.norm() > 0.1
        if step == 0:  # Adam's first direction is a sign: known size
            assert float(moved.norm()) == pytest.approx(math.sqrt(2 * max(shape)), rel=1e-4)
