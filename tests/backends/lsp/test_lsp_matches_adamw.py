"""With identity projectors LSP is AdamW; without, it is AdamW on the projected gradient."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from tests.helpers.lomo_runs import batches, start, train, train_plain, weights_of
from tests.helpers.lsp_runs import identity_projectors, lsp_json, small
from tests.helpers.weights import assert_close, parameters_of

pytestmark = pytest.mark.usefixtures("single_process")

NUM_STEPS = 30
EPS = 1e-5
"""Above the rounding noise that is all the gradient of GPT-2's key biases: Adam would blow it up to steps of lr."""


def adamw(name: str, data: Any, *, max_norm: float | None = None, **settings: Any) -> dict[str, torch.Tensor]:
    model = small(name)
    optimizer = torch.optim.AdamW(model.parameters(), **{"lr": 1e-3, "weight_decay": 0.1, "eps": EPS, **settings})
    train_plain(model, data, optimizer, max_norm=max_norm)
    return weights_of(model)


@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_identity_projectors_are_adamw(name: str, offload: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    identity_projectors(monkeypatch)
    json = lsp_json(lr=1e-3, offload=offload, params={"weight_decay": 0.1, "eps": EPS})
    engine = start(json, small(name))
    assert sum(matrix.subspace is not None for matrix in engine.backend._matrices) > 8
    train(engine, batches(name, NUM_STEPS))
    assert_close(parameters_of(engine), adamw(name, batches(name, NUM_STEPS)), atol=1e-5)


def test_global_clipping_is_adamws(monkeypatch: pytest.MonkeyPatch) -> None:
    identity_projectors(monkeypatch)
    json = lsp_json(lr=1e-3, clipping=0.5, params={"weight_decay": 0.1, "eps": EPS, "clip_scope": "global"})
    engine = start(json, small())
    norms = []
    for batch in batches("llama", 8):
        train(engine, [batch])
        norms.append(engine.get_global_grad_norm())
    assert_close(parameters_of(engine), adamw("llama", batches("llama", 8), max_norm=0.5), atol=1e-5)
    model = small()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1, eps=EPS)
    _, expected = train_plain(model, batches("llama", 8), optimizer, max_norm=0.5)
    assert norms == pytest.approx(expected, rel=1e-4)


class ByHand:
    """One projected matrix in dense algebra: Adam on P^T G Q clipped by its own norm, W moved by P D Q^T times what
    makes a D of random signs as large as they are."""

    def __init__(self, P: torch.Tensor, Q: torch.Tensor) -> None:
        self.P, self.Q = P, Q
        self.scale = math.sqrt(len(P) * len(Q)) / float(P.norm() * Q.norm())
        self.virtual = torch.nn.Parameter(torch.zeros(P.shape[1], Q.shape[1]))
        self.adam = torch.optim.Adam([self.virtual], lr=1.0)

    def direction(self, G: torch.Tensor, *, clip: float) -> torch.Tensor:
        S = self.P.T @ G @ self.Q
        S = S * min(1.0, clip / (float(S.norm()) + 1e-6))
        with torch.no_grad():
            self.virtual.zero_()
        self.virtual.grad = S
        self.adam.step()
        return -self.scale * self.P @ self.virtual.detach() @ self.Q.T


@pytest.mark.parametrize("offload", [False, True])
def test_it_is_adam_in_the_subspace_by_dense_algebra(offload: bool) -> None:
    """The reference steps the same model: its matrices by hand, its whole parameters by AdamW with the same clip."""
    lr, decay, clip_all = 1e-2, 0.1, 0.2
    json = lsp_json(lr=lr, offload=offload, clipping=clip_all, params={"weight_decay": decay})
    engine = start(json, small())
    model = small()
    matrices = {matrix.name: matrix for matrix in engine.backend._matrices}
    hands = {
        name: ByHand(matrix.subspace.P.dense(), matrix.subspace.Q.dense())
        for name, matrix in matrices.items()
        if matrix.subspace is not None
    }
    assert {"model.embed_tokens.weight", "lm_head.weight", "model.layers.0.self_attn.k_proj.weight"} <= hands.keys()
    rest = [(n, p) for n, p in model.named_parameters() if n not in hands]
    clip = clip_all / math.sqrt(len(list(model.parameters())))
    optimizer = torch.optim.AdamW([p for _, p in rest], lr=lr, weight_decay=decay)
    for batch in batches("llama", 6):
        train(engine, [batch])
        model(**batch).loss.backward()
        for _, p in rest:
            torch.nn.utils.clip_grad_norm_([p], clip)
        optimizer.step()
        with torch.no_grad():
            for n, p in model.named_parameters():
                if n in hands:
                    p.mul_(1 - lr * decay).sub_(hands[n].direction(p.grad, clip=clip), alpha=lr)
        model.zero_grad()
    assert_close(parameters_of(engine), weights_of(model), atol=1e-5)
