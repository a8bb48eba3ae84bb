"""DeepSpeed's `GatheredParameters` on a running ZO engine: weights are whole and current inside, and written back when
asked for."""

from __future__ import annotations

import deepspeed
import pytest
import torch

from tests.helpers.tiny_models import tiny_batch, tiny_model
from tests.helpers.zo_runs import engine_for, one_step, weights, zo_json

pytestmark = pytest.mark.usefixtures("single_process")


@pytest.mark.parametrize("wire", ["auto", "bf16"])
@pytest.mark.parametrize("offload", [True, False])
def test_gathered_parameters_are_those_of_the_current_step(offload: bool, wire: str) -> None:
    if wire == "bf16" and not offload:
        pytest.skip("wire_dtype goes with offload_param")
    model = tiny_model("llama").train()
    engine = engine_for(model, zo_json(offload=offload, interval=5, **({"wire_dtype": wire} if offload else {})))
    for _ in range(3):
        one_step(engine, tiny_batch("llama"))
    expected = weights(model)
    with deepspeed.zero.GatheredParameters(model.parameters()):
        for name, p in model.named_parameters():
            assert torch.equal(p.data.cpu(), expected[name]), name
    after = one_step(engine, tiny_batch("llama"))
    again = tiny_model("llama").train()
    other = engine_for(again, zo_json(offload=offload, interval=5, **({"wire_dtype": wire} if offload else {})))
    for _ in range(3):
        one_step(other, tiny_batch("llama"))
    assert one_step(other, tiny_batch("llama")) == after, "looking changes nothing"


def test_what_the_modifier_rank_writes_is_kept_and_only_that() -> None:
    model = tiny_model("llama").train()
    engine = engine_for(model, zo_json(interval=5))
    for _ in range(3):
        one_step(engine, tiny_batch("llama"))
    before = weights(model)
    touched = {f"model.layers.1.mlp.{name}_proj.weight": 0.25 * i for i, name in enumerate(("up", "gate", "down"), 1)}
    parameters = [dict(model.named_parameters())[name] for name in touched]
    with deepspeed.zero.GatheredParameters(parameters, modifier_rank=0):
        for parameter, value in zip(parameters, touched.values(), strict=True):
            parameter.data.fill_(value)
    with deepspeed.zero.GatheredParameters(parameters):
        parameters[0].data.fill_(9.0)  # nobody is to keep this
    after = weights(model)
    for name, value in touched.items():
        assert torch.equal(after.pop(name), torch.full_like(before.pop(name), value)), name
    for name, value in before.items():
        assert torch.equal(after[name], value), name
