"""LOMO is SGD: bit for bit without clipping, to rounding with it, whatever the model and its checkpointing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tests.helpers.lomo_runs import batches, checkpointed, config_for, lively, start, train, train_plain, weights_of
from tests.helpers.weights import assert_close, assert_equal
from tests.helpers.zoo import seeded

pytestmark = pytest.mark.usefixtures("single_process")

MODELS = ["opt", "llama", "gpt2"]
NUM_STEPS, NUM_LONG_STEPS = 12, 50
"""One model makes the long run: equal bits after a step stay equal, so that more steps of the others show no more."""


@pytest.mark.parametrize("reentrant", [None, False, True], ids=["plain", "checkpointed", "reentrant"])
@pytest.mark.parametrize("name", MODELS)
def test_lomo_equals_sgd(name: str, reentrant: bool | None) -> None:
    num_steps = NUM_LONG_STEPS if (name, reentrant) == ("opt", None) else NUM_STEPS
    engine = start(config_for(lr=0.1), checkpointed(lively(name), reentrant))
    before = weights_of(engine.module)
    losses = train(engine, batches(name, num_steps))
    reference = checkpointed(lively(name), reentrant)
    expected, _ = train_plain(reference, batches(name, num_steps), torch.optim.SGD(reference.parameters(), lr=0.1))
    assert losses == expected
    assert_equal(weights_of(engine.module), weights_of(reference))
    assert all(not torch.equal(before[name], p) for name, p in engine.module.named_parameters())
    assert engine.global_steps == num_steps and engine.get_global_grad_norm() is None


@pytest.mark.parametrize("reentrant", [None, False, True], ids=["plain", "checkpointed", "reentrant"])
@pytest.mark.parametrize("name", MODELS)
def test_clipping_equals_clip_grad_norm(name: str, reentrant: bool | None) -> None:
    max_norm = 0.8
    engine = start(config_for(lr=0.05, clipping=max_norm), checkpointed(lively(name), reentrant))
    reference = checkpointed(lively(name), reentrant)
    sgd = torch.optim.SGD(reference.parameters(), lr=0.05)
    norms = []
    for batch in batches(name, NUM_STEPS):
        loss = train(engine, [batch])
        expected, norm = train_plain(reference, [batch], sgd, max_norm=max_norm)
        assert loss == pytest.approx(expected, rel=1e-5)
        assert engine.get_global_grad_norm() == pytest.approx(norm[0], rel=1e-5)
        norms += norm
    assert max(norms) > max_norm
    assert_close(weights_of(engine.module), weights_of(reference))


def test_dropout_masks_are_the_same_in_both_passes() -> None:
    for reentrant in (None, False, True):
        dropout = {"resid_pdrop": 0.3, "embd_pdrop": 0.3}
        engine = start(config_for(clipping=1e9), checkpointed(lively("gpt2", **dropout), reentrant))
        torch.manual_seed(5)
        train(engine, batches("gpt2", 4))
        reference = checkpointed(lively("gpt2", **dropout), reentrant)
        torch.manual_seed(5)
        train_plain(reference, batches("gpt2", 4), torch.optim.SGD(reference.parameters(), lr=0.1))
        assert_equal(weights_of(engine.module), weights_of(reference))


class Shared(nn.Module):
    """Two segments, one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, *, reentrant: bool) -> torch.Tensor:
        for _ in range(2):
            x = torch.utils.checkpoint.checkpoint(self.inner, x, use_reentrant=reentrant)
        return x.square().mean()


@pytest.mark.parametrize("clipping", [0.0, 1.0])
def test_a_weight_shared_by_reentrant_segments_is_refused_with_the_remedy(clipping: float) -> None:
    model = seeded(Shared)
    engine = start(config_for(clipping=clipping), model)
    x = torch.randn(3, 4, requires_grad=True)
    before = weights_of(model)
    with pytest.raises(RuntimeError, match=r"inner\.(weight|bias) came in parts.*use_reentrant"):
        engine.backward(engine(x, reentrant=True))
    if clipping:
        assert_equal(before, weights_of(model))  # found in the first pass
    else:
        with pytest.raises(RuntimeError, match=r"inner\.(weight|bias) came in parts.*use_reentrant"):
            engine(x, reentrant=True).backward()
    assert all(p.grad is None for p in model.parameters())
    engine.zero_grad()
    engine.backward(engine(x, reentrant=False))


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    matrices = [p for p in model.parameters() if p.ndim > 1]
    return [{"params": matrices, "weight_decay": 0.1}, {"params": [p for p in model.parameters() if p.ndim < 2]}]


@pytest.mark.parametrize("clipping", [0.0, 0.5])
def test_decay_is_decoupled_and_groups_and_schedules_are_read_at_the_update(clipping: float) -> None:
    model, reference = lively("llama"), lively("llama")
    schedule = {"type": "LinearLR", "params": {"start_factor": 0.25, "total_iters": 4}}
    config = config_for(clipping=clipping, scheduler=schedule)
    engine = start(config, model, model_parameters=groups_of(model))
    for step, batch in enumerate(batches("llama", 6)):
        lr = 0.1 * (0.25 + 0.75 * min(step, 4) / 4)
        if step == 1:
            engine.optimizer.load_state_dict(engine.optimizer.state_dict())  # which makes groups anew
        train(engine, [batch])
        reference(**batch).loss.backward()
        if clipping:
            nn.utils.clip_grad_norm_(reference.parameters(), clipping)
        with torch.no_grad():
            for p in reference.parameters():
                p.mul_(1 - lr * (0.1 if p.ndim > 1 else 0.0)).sub_(p.grad, alpha=lr)
                p.grad = None
    assert_close(weights_of(model), weights_of(reference))


def test_values_are_clipped_after_unscaling() -> None:
    limit = 0.01
    engine = start(config_for(params={"clip_grad_value": limit}, lr=0.1), lively("opt"))
    reference = lively("opt")
    sgd = torch.optim.SGD(reference.parameters(), lr=0.1)
    for batch in batches("opt", 5):
        train(engine, [batch])
        reference(**batch).loss.backward()
        assert max(p.grad.abs().max() for p in reference.parameters()) > limit
        nn.utils.clip_grad_value_(reference.parameters(), limit)
        sgd.step()
        sgd.zero_grad()
    assert_equal(weights_of(engine.module), weights_of(reference))


def test_grouped_norms_clip_each_layer_by_its_own() -> None:
    max_norm = 0.2
    engine = start(config_for(clipping=max_norm, params={"norm_scope": "group"}), lively("llama"))
    reference = lively("llama")
    sgd = torch.optim.SGD(reference.parameters(), lr=0.1)
    layers = [list(layer.parameters()) for layer in reference.model.layers]
    inside = {id(p) for layer in layers for p in layer}
    edge = [[p] for p in reference.parameters() if id(p) not in inside]
    for batch in batches("llama", 5):
        train(engine, [batch])
        reference(**batch).loss.backward()
        norms = torch.stack([nn.utils.clip_grad_norm_(layer, max_norm) for layer in layers + edge])
        assert (norms > max_norm).any()
        assert engine.get_global_grad_norm() == pytest.approx(norms.norm().item(), rel=1e-5)
        sgd.step()
        sgd.zero_grad()
    assert_close(weights_of(engine.module), weights_of(reference))
    assert "one backward pass" in engine.backend.describe()


def test_sequential_accumulation_is_one_small_step_a_micro_batch() -> None:
    config = config_for(params={"accumulation": "sequential"}, gradient_accumulation_steps=2)
    engine = start(config, lively("llama"))
    train(engine, batches("llama", 6))
    assert engine.global_steps == 3
    reference = lively("llama")
    sgd = torch.optim.SGD(reference.parameters(), lr=0.1)
    for batch in batches("llama", 6):
        (reference(**batch).loss / 2).backward()
        sgd.step()
        sgd.zero_grad()
    assert_equal(weights_of(engine.module), weights_of(reference))
