"""A forward while parameters show copies, as under DeepSpeed's `GatheredParameters`: it changes nothing, and where it
would miss what somebody has changed, it is refused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import deepspeed
import pytest
import torch
from torch import nn

from tests.helpers.equivalence_runs import on_device
from tests.helpers.lomo_runs import batches, config_for, lively, start, streamed, train
from tests.helpers.weights import assert_close, assert_equal

pytestmark = pytest.mark.usefixtures("single_process")
OFFLOAD = {f"offload_{what}": {"device": "cpu"} for what in ("param", "optimizer")}
RUNS: dict[str, dict[str, Any]] = {
    "zo": config_for("ZO", lr=1e-3),
    "zo, streamed": streamed("ZO", lr=1e-3, stream={"writeback_interval": 3}),
    "zo, fp8": streamed("ZO", lr=1e-3, stream={"wire_dtype": "fp8"}),  # what a parameter shows at home is no weight
    "lomo": config_for("LOMO"),
    "lomo, streamed": streamed("LOMO"),
    "lsp": config_for("LSP", lr=1e-3, params={"projector": "random"}),
    "lsp, streamed": config_for("LSP", lr=1e-3, params={"projector": "random"}, zero_optimization=OFFLOAD),
}
DIRECT = {"lomo", "lsp"}
"""Whose forward runs on what parameters show, copies or not."""
CHANGED = "model.layers.1.mlp.up_proj.weight"
NEIGHBOUR = CHANGED.replace("up", "down")
TIED = "model.embed_tokens.weight"
BATCH = next(batches("llama", 1, first=9))


plain, tied = partial(lively, "llama"), partial(lively, "llama", tie_word_embeddings=True)


def started(kind: str, make: Callable[[], nn.Module] = plain) -> Any:
    engine = start(RUNS[kind], make().train())
    train(engine, batches("llama", 2))
    return engine


@pytest.fixture(scope="module")
def running() -> Callable[..., Any]:
    """The engine of a kind and a model, for tests that take it as it is."""
    return cache(started)


def state_of(engine: Any) -> dict[str, torch.Tensor]:
    return {name: value.to("cpu", copy=True) for name, value in engine.module.state_dict().items()}


def loss_of(engine: Any, *, trains: bool = False) -> float:
    with torch.set_grad_enabled(trains):
        loss: torch.Tensor = (engine if trains else engine.module)(**on_device(engine, BATCH)).loss
    return loss.item()


@pytest.mark.parametrize("kind", RUNS)
def test_a_forward_inside_leaves_what_is_shown_and_stored(kind: str) -> None:
    engine, reference = started(kind), started(kind)
    before = state_of(engine)
    expected = loss_of(reference)
    with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
        assert loss_of(engine) == expected
        shown = {name: p.detach().cpu().clone() for name, p in engine.module.named_parameters()}
        assert_equal(shown, {name: before[name] for name in shown})
        assert_equal(state_of(engine), before)
        for train_inside in (partial(loss_of, engine, trains=True), partial(engine.backward, torch.ones(()))):
            with pytest.raises(RuntimeError, match=r"must not train inside .*GatheredParameters.*leave it first"):
                train_inside()
    assert_equal(state_of(engine), before)
    for one in (engine, reference):
        train(one, batches("llama", 2, first=2))
    assert_equal(state_of(engine), state_of(reference))


@pytest.mark.parametrize("how", ["through .data", "in place", "replaced"])
@pytest.mark.parametrize("kind", RUNS)
def test_a_forward_on_changed_copies_sees_them_or_is_refused(kind: str, how: str) -> None:
    """A write through `.data` is seen in a context with a `modifier_rank`, which allows no forward at all."""
    engine, reference = started(kind), started(kind)
    changed, its = (one.module.get_parameter(CHANGED) for one in (engine, reference))
    keeps = how == "through .data" or kind in DIRECT
    if keeps:
        with deepspeed.zero.GatheredParameters([its], modifier_rank=0):
            its.data.mul_(2.0)
    with deepspeed.zero.GatheredParameters([changed], modifier_rank=0 if keeps else None):
        if how == "replaced":
            changed.data = changed.data * 2.0
        elif how == "in place":
            with torch.no_grad():
                changed.mul_(2.0)
        else:
            changed.data.mul_(2.0)
        if kind in DIRECT:
            assert loss_of(engine) == loss_of(reference)
        else:
            with pytest.raises(RuntimeError, match=rf"GatheredParameters.*{CHANGED}.*leave it first"):
                loss_of(engine)
    assert_equal(state_of(engine), state_of(reference))
    assert loss_of(engine) == loss_of(reference)
    for one in (engine, reference):
        train(one, batches("llama", 1, first=2))
    assert_equal(state_of(engine), state_of(reference))


@pytest.mark.parametrize("kind", RUNS)
def test_contexts_inside_one_another_show_one_copy(kind: str) -> None:
    engine = started(kind)
    before = state_of(engine)
    changed, other = engine.module.get_parameter(CHANGED), engine.module.get_parameter(NEIGHBOUR)
    with deepspeed.zero.GatheredParameters([changed]):
        changed.data.fill_(0.25)
        with deepspeed.zero.GatheredParameters([changed, other], modifier_rank=0):
            assert (changed.data == 0.25).all() and torch.equal(other.data.cpu(), before[NEIGHBOUR])
            other.data.fill_(0.5)
        assert (changed.data == 0.25).all(), "the outer one still shows it"
        loss_of(engine)  # it is stored now
        with deepspeed.zero.GatheredParameters([changed, other]):
            pass
        assert (changed.data == 0.25).all()
    before[CHANGED], before[NEIGHBOUR] = (torch.full_like(before[CHANGED], 0.25), torch.full_like(other.cpu(), 0.5))
    assert_close(state_of(engine), before, atol=2e-6)
    train(engine, batches("llama", 1, first=2))
    assert not torch.equal(state_of(engine)[CHANGED], before[CHANGED])


class Scaled(nn.Module):
    """Has a parameter of its own, which is alive through a whole forward."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = lively("llama")
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, **batch: torch.Tensor) -> Any:
        output = self.inner(**batch)
        output.loss = output.loss * self.scale.mean()
        return output


def evaluate_in_inference_mode(engine: Any) -> None:
    with torch.inference_mode():
        loss_of(engine)


def neighbour_of(engine: Any) -> nn.Parameter:
    found: nn.Parameter = engine.module.get_parameter(NEIGHBOUR)
    return found


BETWEEN: dict[str, tuple[Callable[[], nn.Module], str, Callable[[Any], object]]] = {
    "an evaluation of a tied weight": (tied, TIED, loss_of),
    "an evaluation of a weight of the root": (Scaled, "scale", loss_of),
    "an evaluation in inference mode": (plain, CHANGED, evaluate_in_inference_mode),
    "a state_dict": (plain, CHANGED, state_of),
    "reading it": (
        plain,
        CHANGED,
        lambda engine: deepspeed.utils.safe_get_full_fp32_param(engine.module.get_parameter(CHANGED)),
    ),
    "reading another of its block": (
        plain,
        CHANGED,
        lambda engine: deepspeed.utils.safe_get_full_fp32_param(neighbour_of(engine)),
    ),
    "copying another of its block": (plain, CHANGED, lambda engine: copy.deepcopy(neighbour_of(engine))),
    "writing another of its block": (
        plain,
        CHANGED,
        lambda engine: deepspeed.utils.safe_set_full_fp32_param(
            neighbour_of(engine), torch.ones(neighbour_of(engine).shape)
        ),
    ),
    "loading another of its block": (
        plain,
        CHANGED,
        lambda engine: engine.module.load_state_dict({NEIGHBOUR: torch.ones(neighbour_of(engine).shape)}, strict=False),
    ),
}


@pytest.mark.parametrize("between", BETWEEN)
@pytest.mark.parametrize("kind", ["zo, streamed", "zo, fp8", "lomo", "lomo, streamed", "lsp, streamed"])
def test_a_copy_is_shown_until_the_end_whatever_comes_between(
    kind: str, between: str, running: Callable[..., Any]
) -> None:
    make, name, happens = BETWEEN[between]
    engine = running(kind, make)
    before = state_of(engine)[name]
    changed = engine.module.get_parameter(name)
    with deepspeed.zero.GatheredParameters([changed]):
        happens(engine)
        assert torch.equal(changed.detach().cpu(), before)
        with deepspeed.zero.GatheredParameters([changed], modifier_rank=0):
            changed.data.mul_(2.0)
            if happens not in (loss_of, evaluate_in_inference_mode):
                happens(engine)
            assert torch.equal(changed.detach().cpu(), 2 * before)
        happens(engine)
    torch.testing.assert_close(state_of(engine)[name], 2 * before, rtol=1e-6, atol=2e-6)


@pytest.mark.parametrize("kind", [kind for kind in RUNS if kind != "lomo"])  # whose parameters are ordinary ones
def test_what_is_stored_otherwise_is_shown_too(kind: str) -> None:
    engine = started(kind)
    changed = engine.module.get_parameter(CHANGED)
    one, two = (torch.full(changed.shape, value) for value in (1.0, 2.0))
    with deepspeed.zero.GatheredParameters([changed]):
        deepspeed.utils.safe_set_full_fp32_param(changed, one)
        assert torch.equal(changed.detach().cpu(), one)
        loss_of(engine)  # nothing that it would miss
        engine.module.load_state_dict({CHANGED: two}, strict=False)
        assert torch.equal(changed.detach().cpu(), two)
        loss_of(engine)
    assert torch.equal(state_of(engine)[CHANGED], two)


@pytest.mark.parametrize("kind", [kind for kind in RUNS if kind.startswith("zo")])
def test_the_head_alone_is_refused_where_the_embedding_was_changed(kind: str) -> None:
    engine = started(kind, tied)
    head, changed = engine.module.lm_head, engine.module.get_parameter(TIED)
    x = torch.ones(1, changed.shape[1])
    with deepspeed.zero.GatheredParameters([changed]), torch.no_grad():
        head(x)
        changed.mul_(2.0)
        with pytest.raises(RuntimeError, match=rf"GatheredParameters.*{TIED}"):
            head(x)


@pytest.mark.parametrize("kind", RUNS)
def test_an_engine_that_is_destroyed_meanwhile_leaves_its_module_whole(kind: str) -> None:
    engine = started(kind)
    before, module = state_of(engine), engine.module
    with deepspeed.zero.GatheredParameters(list(module.parameters()), modifier_rank=0):
        engine.destroy()
    assert_equal({name: value.cpu() for name, value in module.state_dict().items()}, before)
    assert not any(m._forward_pre_hooks for m in module.modules())
