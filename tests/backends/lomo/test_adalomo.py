"""AdaLOMO against a plain one, and its state through checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ds_zo.config import AdaLOMOParams
from ds_zo.optim import FactoredMoments, adalomo_update_
from tests.helpers.adalomo_reference import PlainAdaLOMO
from tests.helpers.lomo_runs import batches, checkpointed, config_for, lively, start, train, weights_of
from tests.helpers.weights import assert_close
from tests.helpers.zoo import CASES

pytestmark = pytest.mark.usefixtures("single_process")


def train_reference(model: nn.Module, data: Any, optimizer: PlainAdaLOMO, *, clipping: float = 0.0) -> None:
    for batch in data:
        output = model(**batch)
        (output if isinstance(output, torch.Tensor) else output.loss).backward()
        if clipping:
            nn.utils.clip_grad_norm_(model.parameters(), clipping)
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("clipping", [0.0, 0.3])
@pytest.mark.parametrize(("name", "reentrant"), [("opt", None), ("llama", False), ("gpt2", True)])
def test_it_equals_the_plain_one(name: str, reentrant: bool | None, clipping: float) -> None:
    config = config_for("AdaLOMO", clipping=clipping, lr=1e-2, params={"weight_decay": 0.1})
    engine = start(config, checkpointed(lively(name), reentrant))
    reference = lively(name)
    plain = PlainAdaLOMO(reference, lr=1e-2, weight_decay=0.1)
    before = weights_of(reference)
    train(engine, batches(name, 20))
    train_reference(reference, batches(name, 20), plain, clipping=clipping)
    ours, theirs = weights_of(engine.module), weights_of(reference)
    for key_bias in [name for name in ours if name.endswith(("k_proj.bias", "c_attn.bias"))]:
        # Softmax does not see it: its gradient is rounding noise, which the rule normalises to a full step.
        del ours[key_bias], theirs[key_bias]
    assert_close(ours, theirs, atol=2e-5)
    moved = max((p.detach() - before[name]).abs().max().item() for name, p in reference.named_parameters())
    assert moved > 1e-2


def test_settings_reach_the_rule_and_stacks_of_matrices_are_factored() -> None:
    case = CASES["listless"]  # has a convolution
    settings: dict[str, Any] = {"decay_rate": -0.5, "adalomo_eps": [1e-6, 0.5], "clip_threshold": 0.5}
    model, reference = case.make(), case.make()
    engine = start(config_for("AdaLOMO", lr=1e-2, params=settings), model)
    plain = PlainAdaLOMO(reference, lr=1e-2, decay_rate=-0.5, eps=(1e-6, 0.5), clip_threshold=0.5)
    for seed in range(6):
        batch = case.batch(seed)
        engine.backward(engine(**batch))
        engine.step()
        train_reference(reference, [batch], plain)
    assert_close(weights_of(model), weights_of(reference), atol=2e-5)
    state = engine.backend.state_dict()["moments"]["mix.weight"]
    assert state["rows"].shape == (16, 16) and state["cols"].shape == (16, 3)


@pytest.mark.parametrize("seed", range(3))
def test_rows_without_a_gradient_stay_finite_at_the_smallest_eps(seed: int) -> None:
    """Most rows of an embedding have no gradient. Gradients of up to 1e6 stand for a loss that has left its range."""
    settings = AdaLOMOParams(adalomo_eps=(1e-30, 0.0))
    generator = torch.Generator().manual_seed(seed)
    p = torch.randn(40, 8, generator=generator)
    before, moments = p.clone(), FactoredMoments.zeros(p)
    for power in (-12, 0, 6, -6):
        grad = torch.randn(p.shape, generator=generator) * 10.0**power
        grad[torch.rand(40, generator=generator) < 0.8] = 0.0
        grad[0], grad[1] = 0.0, 10.0**power
        adalomo_update_(p, grad, moments, settings, lr=1e-2, decay=1.0)
        assert p.isfinite().all()
    assert torch.equal(p[0], before[0])
    assert not torch.equal(p[1], before[1])


def test_a_parameter_that_is_thawed_late_begins_its_averages_then() -> None:
    engine = start(config_for("AdaLOMO", lr=1e-2), lively("llama"))
    head = engine.module.lm_head.weight
    head.requires_grad_(False)
    train(engine, batches("llama", 3))
    head.requires_grad_(True)
    before = head.detach().clone()
    train(engine, batches("llama", 1))
    moments = engine.backend.state_dict()["moments"]
    assert moments["lm_head.weight"]["num_updates"] == 1 and moments["model.norm.weight"]["num_updates"] == 4
    assert 0 < (head - before).abs().max() < 1


def test_weights_alone_begin_afresh(tmp_path: Path) -> None:
    config = config_for("AdaLOMO", lr=1e-2)
    engine = start(config, lively("llama"))
    train(engine, batches("llama", 2))
    engine.save_checkpoint(str(tmp_path))
    engine.load_checkpoint(str(tmp_path), load_optimizer_states=False)
    assert engine.backend.state_dict()["moments"] == {} and engine.backend.state_dict()["step"] == 0
