"""A forward while parameters show copies, as under DeepSpeed's `GatheredParameters`: it changes nothing, and where it
would miss what somebody has changed, it is refused."""

from __future__ import annotations

from typing import Any

import deepspeed
import pytest
import torch
from equivalence_runs import on_device
from lomo_runs import assert_close, assert_equal, batches, config_for, lively, start, streamed, train

pytestmark = pytest.mark.usefixtures("single_process")
OFFLOAD = {f"offload_{what}": {"device": "cpu"} for what in ("param", "optimizer")}
RUNS: dict[str, dict[str, Any]] = {
    "zo": config_for("ZO", lr=1e-3),
    "zo, streamed": streamed("ZO", lr=1e-3, stream={"writeback_interval": 3}),
    "zo, fp8": streamed("ZO", lr=1e-3, stream={"wire_dtype": "fp8"}),  # what a parameter shows at home is no weight
    "lomo": config_for("LOMO"),
    "lomo, streamed": streamed("LOMO"),
    "lsp, streamed": config_for("LSP", lr=1e-3, params={"projector": "random"}, zero_optimization=OFFLOAD),
}
DIRECT = {"lomo"}
"""Whose forward runs on what parameters show, copies or not."""
CHANGED = "model.layers.1.mlp.up_proj.weight"
BATCH = next(batches("llama", 1, first=9))


def started(kind: str) -> Any:
    engine = start(RUNS[kind], lively("llama").train())
    train(engine, batches("llama", 2))
    return engine


def state_of(engine: Any) -> dict[str, torch.Tensor]:
    return {name: value.to("cpu", copy=True) for name, value in engine.module.state_dict().items()}


def loss_of(engine: Any, *, trains: bool = False) -> float:
    with torch.set_grad_enabled(trains):
        loss: torch.Tensor = (engine if trains else engine.module)(**on_device(engine, BATCH)).loss
    return loss.item()


@pytest.mark.parametrize("trains", [False, True])
@pytest.mark.parametrize("kind", RUNS)
def test_a_forward_inside_leaves_what_is_shown_and_stored(kind: str, trains: bool) -> None:
    engine, reference = started(kind), started(kind)
    before = state_of(engine)
    expected = loss_of(reference, trains=trains)
    with deepspeed.zero.GatheredParameters(list(engine.module.parameters()), modifier_rank=0):
        assert loss_of(engine, trains=trains) == expected
        shown = {name: p.detach().cpu().clone() for name, p in engine.module.named_parameters()}
        assert_equal(shown, {name: before[name] for name in shown})
        assert_equal(state_of(engine), before)
        engine.module.get_parameter(CHANGED).data.mul_(2.0)
        assert torch.equal(state_of(engine)[CHANGED], 2 * before[CHANGED])
    before[CHANGED] = 2 * before[CHANGED]
    assert_close(state_of(engine), before, atol=2e-6)  # an fp8 weight and what it leaves have 24 bits together
    with deepspeed.zero.GatheredParameters(list(reference.module.parameters()), modifier_rank=0):
        reference.module.get_parameter(CHANGED).data.mul_(2.0)
    for one in (engine, reference):
        train(one, batches("llama", 2, first=2))
    assert_equal(state_of(engine), state_of(reference))


@pytest.mark.parametrize("how", ["written to", "replaced"])
@pytest.mark.parametrize("trains", [False, True])
@pytest.mark.parametrize("kind", RUNS)
def test_a_forward_on_changed_copies_sees_them_or_is_refused(kind: str, trains: bool, how: str) -> None:
    engine, reference = started(kind), started(kind)
    changed, its = (one.module.get_parameter(CHANGED) for one in (engine, reference))
    with deepspeed.zero.GatheredParameters([its], modifier_rank=0):
        its.data.mul_(2.0)
    with deepspeed.zero.GatheredParameters([changed], modifier_rank=0):
        if how == "replaced":
            changed.data = changed.data * 2.0
        else:
            changed.data[3] *= 2.0
            changed.data[:3] *= 2.0
            changed.data[4:] *= 2.0
        if kind in DIRECT:
            assert loss_of(engine) == loss_of(reference)
        else:
            with pytest.raises(RuntimeError, match=rf"GatheredParameters.*{CHANGED}.*leave it first"):
                loss_of(engine, trains=trains)
    assert_equal(state_of(engine), state_of(reference))
    assert loss_of(engine) == loss_of(reference)
    for one in (engine, reference):
        train(one, batches("llama", 1, first=2))
    assert_equal(state_of(engine), state_of(reference))


@pytest.mark.parametrize("kind", RUNS)
def test_contexts_inside_one_another_show_one_copy(kind: str) -> None:
    engine = started(kind)
    before = state_of(engine)
    neighbour = CHANGED.replace("up", "down")
    changed, other = engine.module.get_parameter(CHANGED), engine.module.get_parameter(neighbour)
    with deepspeed.zero.GatheredParameters([changed]):
        changed.data.fill_(0.25)
        with deepspeed.zero.GatheredParameters([changed, other], modifier_rank=0):
            assert (changed.data == 0.25).all() and torch.equal(other.data.cpu(), before[neighbour])
            other.data.fill_(0.5)
        assert (changed.data == 0.25).all(), "the outer one still shows it"
        loss_of(engine)  # it is stored now
        with deepspeed.zero.GatheredParameters([changed, other]):
            pass
        assert (changed.data == 0.25).all()
    before[CHANGED], before[neighbour] = (torch.full_like(before[CHANGED], 0.25), torch.full_like(other.cpu(), 0.5))
    assert_close(state_of(engine), before, atol=2e-6)
