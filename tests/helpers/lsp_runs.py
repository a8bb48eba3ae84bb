"""LSP runs on toy models, and the plain AdamW runs that they are held against."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from ds_zo.backends.lsp import calibration as lsp_calibration
from ds_zo.backends.lsp import matrices as lsp_matrices
from ds_zo.backends.lsp import state as lsp_state
from ds_zo.backends.lsp.matrices import Subspace
from ds_zo.config import LSPParams
from ds_zo.projectors import SparseProjector
from tests.helpers.lomo_runs import lively

CPU = {"stage": 0, "offload_optimizer": {"device": "cpu"}}


def lsp_json(*, offload: bool = True, lr: float = 1e-2, clipping: float = 0.0, **more: Any) -> dict[str, Any]:
    """`params` adds to optimizer.params, the rest to the top level. Embeddings and head are projected, so that a tiny
    model has projected matrices inside and outside of its blocks."""
    own = more.pop("params", {})
    sizes = {"subspace_dim": 6, "nonzeros_per_row": 2, "fit_steps": 3}
    params = {"lr": lr, **sizes, "projector": "random", "edge": "lsp", **own}
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": clipping,
        "optimizer": {"type": "LSP", "params": params},
        "zero_optimization": CPU if offload else {"stage": 0},
        **more,
    }


def streamed_lsp(*, stream: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    """The same, streamed. `stream` is `ds_zo.stream`."""
    place = {**CPU, "offload_param": {"device": "cpu"}}
    section = {**more.pop("ds_zo", {}), "stream": stream or {}}
    return lsp_json(zero_optimization=place, ds_zo=section, **more)


def small(name: str = "llama", **overrides: Any) -> nn.Module:
    depth = {"n_layer": 2} if name == "gpt2" else {"num_hidden_layers": 2}
    return lively(name, **{**depth, **overrides})


class Strided(nn.Module):
    """Parameters whose elements are not in the order of their memory."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(16, 24, bias=False)
        self.linear.weight = nn.Parameter(torch.randn(16, 24).t())
        self.cube = nn.Parameter(torch.randn(4, 2, 3).permute(2, 0, 1))
        self.vector = nn.Parameter(torch.randn(6)[::2])

    def forward(self, x: torch.Tensor, uses_cube: bool = True) -> torch.Tensor:
        loss = self.linear(x).square().mean() + self.vector.square().sum()
        return loss + (self.cube * self.vector[:, None, None]).sin().sum() if uses_cube else loss


def identity_projectors(monkeypatch: pytest.MonkeyPatch) -> None:
    """P = I and Q = I for every matrix that could be projected: then LSP is AdamW."""

    def make(p: nn.Parameter, index: int, settings: LSPParams, *, device: torch.device) -> Subspace:
        P, Q = (SparseProjector.identity(size, device) for size in p.shape)
        return Subspace(P, Q)

    for module in (lsp_state, lsp_matrices):
        monkeypatch.setattr(module, "first_projectors", make)


def adopt_always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Candidates take the place of the present projectors whatever they capture."""
    monkeypatch.setattr(lsp_calibration, "MIN_GAIN", -1.0)  # of at most 1
