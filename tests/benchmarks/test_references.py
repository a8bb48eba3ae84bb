"""The steps of the GaLore reference. tests/launch/test_sweep.py holds MeZO against ZO."""

from __future__ import annotations

import math
from typing import Any

import deepspeed
import pytest
import torch
from torch import nn

from benchmarks import references
from ds_zo.backends import Backend
from ds_zo.config import ConfigError

pytestmark = pytest.mark.usefixtures("single_process")


@pytest.fixture(autouse=True)
def registered(own_backends: None) -> None:
    """MeZO and GaLore."""
    references.register()


class TwoLayers(nn.Module):
    """An embedding, which is not projected, and a linear layer, which is."""

    def __init__(self, shape: tuple[int, int]) -> None:
        super().__init__()
        self.table = nn.Embedding(5, 4)
        self.linear = nn.Linear(shape[1], shape[0], bias=False)
        nn.init.zeros_(self.linear.weight)


def backend_for(shape: tuple[int, int], **params: Any) -> Backend:
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 0.0,
        "optimizer": {"type": "GaLore", "params": params},
    }
    backend: Backend = deepspeed.initialize(model=TwoLayers(shape), config=config)[0].backend
    return backend


def _matrix(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_galore_needs_a_rank() -> None:
    with pytest.raises(ConfigError, match=r"optimizer\.params\.rank"):
        backend_for((6, 9), lr=1e-3)


def test_galore_without_projection_is_adamw() -> None:
    settings: dict[str, Any] = {"lr": 0.01, "betas": (0.8, 0.95), "eps": 1e-8, "weight_decay": 0.1}
    backend = backend_for((6, 9), rank=2, **settings)
    ours: Any = backend.module.table.weight
    theirs = nn.Parameter(ours.detach().clone())
    optimizer = torch.optim.AdamW([theirs], **settings)
    for step in range(5):
        for p in (ours, theirs):
            p.grad = _matrix(5, 4, seed=step + 1).to(p.device)
        backend.step()
        optimizer.step()
    assert torch.allclose(ours, theirs, atol=1e-6)


@pytest.mark.parametrize("shape", [(6, 9), (9, 6)])
def test_galore_moves_in_the_directions_of_its_last_refresh(shape: tuple[int, int]) -> None:
    backend = backend_for(shape, lr=1.0, rank=2, refresh_interval=2, scale=1.0)
    p: Any = backend.module.linear.weight
    gradients = [_matrix(*shape, seed=seed) for seed in range(3)]
    for step, G in enumerate(gradients):
        before = p.detach().clone()
        p.grad = G.to(p.device)
        backend.step()
        U, _, V_t = torch.linalg.svd(gradients[0 if step < 2 else 2], full_matrices=False)
        moved = (p.detach() - before).cpu()
        kept = U[:, :2] @ U[:, :2].t() @ moved if shape[0] < shape[1] else moved @ V_t[:2].t() @ V_t[:2]
        assert torch.allclose(kept, moved, atol=1e-5)
        assert moved.norm() > 0.1
        if step == 0:  # Adam's first direction is a sign: known size
            assert float(moved.norm()) == pytest.approx(math.sqrt(2 * max(shape)), rel=1e-4)
