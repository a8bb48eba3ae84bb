"""Prototypes of estimators: each descends, spends the passes it is billed for, and is compared at equal budgets."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from benchmarks.zo_variants import (
    SPARSE_SHARE,
    VARIANTS,
    Budget,
    Estimator,
    Landscape,
    Noises,
    best_rate,
    budgets,
    table,
    trials,
)


class Bowl(nn.Module):
    """Half the squared distance from a batch's target."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.matrix, self.vector = nn.Parameter(torch.randn(4, 6)), nn.Parameter(torch.randn(8))
        self.num_passes = 0

    def forward(self, *, target: torch.Tensor, use_cache: bool) -> Any:
        self.num_passes += 1
        flat = torch.cat([self.matrix.reshape(-1), self.vector])
        return SimpleNamespace(loss=(flat - target).square().sum() / 2)


@pytest.mark.parametrize("name", list(VARIANTS))
def test_a_variant_descends_by_the_passes_it_is_billed_for(name: str) -> None:
    bowl, variant, num_steps = Bowl(), VARIANTS[name], 40
    landscape = Landscape(bowl, lambda index: {"target": torch.full((32,), 2.0)})
    start = landscape.at(0.0, None, first=0, count=1)
    bowl.num_passes = 0
    estimator = Estimator(landscape, variant, lr=0.05 if variant.normalised else 0.01, seed=0)
    for _ in range(num_steps):
        estimator.step()
    assert bowl.num_passes == num_steps * variant.passes
    assert landscape.at(0.0, None, first=0, count=1) < 0.9 * start


def test_noises_are_of_their_kind() -> None:
    landscape = Landscape(Bowl(), lambda index: {})
    assert set(Noises(landscape, "rademacher", seed=0).draw(0, 0).tolist()) == {-1.0, 1.0}
    low = Noises(landscape, "low-rank", seed=0)
    assert torch.linalg.matrix_rank(low.draw(0, 0)[:24].view(4, 6)) == 2
    sparse = Noises(landscape, "sparse", seed=0).draw(0, 0)
    assert (sparse != 0).sum() == int(SPARSE_SHARE * 24) + int(SPARSE_SHARE * 8)
    assert landscape.clean[:24][sparse[:24] != 0].abs().max() < landscape.clean[:24][sparse[:24] == 0].abs().min()


def row(variant: str, lr: float, seed: int, losses: list[float]) -> dict[str, Any]:
    """Four points of 80 passes in all."""
    steps = [20 * (i + 1) // VARIANTS[variant].passes for i in range(4)]
    curve = [
        {"step": step, "passes": step * VARIANTS[variant].passes, "dev_loss": loss, "test": 1 - loss / 10}
        for step, loss in zip(steps, losses, strict=True)
    ]
    key = f"{variant}_lr{lr:.3g}_seed{seed}"
    return {"key": key, "status": "ok", "variant": variant, "lr": lr, "seed": seed, "passes": 80, "curve": curve}


def test_rates_are_chosen_at_each_budget_and_then_run_with_other_seeds() -> None:
    rows = [row("mezo", 0.4, 0, [4, 3.5, 3, 1]), row("mezo", 1.0, 0, [2, 2, 2, 2])]
    assert budgets(rows) == [Budget(passes=80), Budget(steps=10)]
    assert best_rate(rows, "mezo", Budget(passes=80)) == 0.4
    assert best_rate(rows, "mezo", Budget(steps=10)) == 1.0, "as many steps as variants of 8 passes make"
    rest = trials(["mezo"], rows, base_rate=1.0, rates=(0.4, 1.0), seeds=(0, 7))
    assert [(t.lr, t.seed) for t in rest] == [(0.4, 7), (1.0, 7)]
    assert [t.seed for t in trials(["mezo"], rows, base_rate=1.0, rates=(0.4, 1.0, 2.5), seeds=(0, 7))] == [0]
    shown = table([*rows, row("mezo", 0.4, 1, [4, 3, 3, 1.5])])
    assert "| mezo | 2 | 0.4 | 1.250 ± 0.354 | 0.875 ± 0.035 | 2 |" in shown
    assert "| mezo | 2 | 1 | 2.000 | 0.800 | 1 |" in shown
