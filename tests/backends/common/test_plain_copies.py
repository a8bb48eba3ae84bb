"""`copy.deepcopy` of a module under an engine: a reference model, as PEFT and TRL make one."""

from __future__ import annotations

import copy
import gc
import weakref
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
import transformers

import ds_zo  # noqa: F401
from ds_zo.backends.common.plain_copies import StandIn
from tests.helpers.tiny_models import tiny_batch, tiny_model
from tests.helpers.weights import assert_equal, weights
from tests.helpers.zo_runs import log_lines, train

LEARNING_RATE = {"zo": 1e-3, "lomo": 1e-1, "lsp": 1e-3}
BATCHES = [tiny_batch("llama", seed=seed) for seed in range(4)]


def engine_for(backend: str, *, stream: bool, wire: str = "auto") -> Any:
    offload = {f"offload_{place}": {"device": "cpu"} for place in ("param", "optimizer") if stream or place != "param"}
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": backend, "params": {"lr": LEARNING_RATE[backend]}},
        "zero_optimization": {"stage": 0, **(offload if backend == "lsp" or stream else {})},
        "ds_zo": {"stream": {"wire_dtype": wire}} if stream else {},
    }
    return deepspeed.initialize(model=tiny_model("llama"), config=config)[0]


@pytest.mark.parametrize(
    ("backend", "stream", "wire"),
    [
        ("zo", False, "auto"),
        ("zo", True, "fp8"),  # what a parameter shows is no weight
        ("lomo", True, "auto"),
        ("lsp", False, "auto"),
        ("lsp", True, "auto"),
    ],
)
def test_a_copy_is_a_plain_module_of_this_step(
    backend: str, stream: bool, wire: str, tmp_path: Path, single_process: None
) -> None:
    engine = engine_for(backend, stream=stream, wire=wire)
    train(engine, BATCHES[:2])
    reference = copy.deepcopy(engine.module)
    layer = copy.deepcopy(engine.module.model.layers[0])
    then = weights(engine.module)
    assert_equal({name: p.detach().cpu() for name, p in reference.named_parameters()}, then)
    assert_equal(weights(layer), weights(reference.model.layers[0]))

    # The one that is trained goes on as if nobody had copied it, and the copy stays. It alone can be converted; weights
    # that live in an engine's store stay, as Trainer's bf16_full_eval would otherwise leave them behind.
    assert copy.deepcopy(reference).to(torch.bfloat16).dtype is torch.bfloat16
    if backend == "zo" or stream:
        assert engine.module.to(torch.bfloat16).dtype is torch.float32
    train(engine, BATCHES[2:])
    assert_equal(weights(reference), then)
    other = engine_for(backend, stream=stream, wire=wire)
    train(other, BATCHES)
    assert_equal(weights(engine.module), weights(other.module))

    # The copy computes, saves and is trained by itself, and outlives its engine without keeping it.
    plain = tiny_model("llama")
    plain.load_state_dict(then)
    reference.save_pretrained(tmp_path)
    saved = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype="float32")
    assert_equal(saved.state_dict(), then)
    kept = weakref.ref(engine.backend)
    engine.destroy()
    del engine
    gc.collect()
    assert kept() is None
    for module in (plain, reference.cpu()):
        module.train()
        loss = module(**BATCHES[0], use_cache=False).loss
        loss.backward()
        torch.optim.SGD(module.parameters(), lr=0.1).step()
    assert_equal(weights(reference), weights(plain))


@pytest.mark.parametrize(("backend", "wire"), [("zo", "auto"), ("zo", "fp8"), ("lomo", "auto"), ("lsp", "auto")])
def test_what_is_assigned_to_data_is_trained_on(backend: str, wire: str, single_process: None) -> None:
    runs = []
    for assigns in (True, False):
        engine = engine_for(backend, stream=True, wire=wire)
        train(engine, BATCHES[:2])
        for p in engine.module.parameters():
            if assigns:
                p.data = p.data * 2
            else:
                with deepspeed.zero.GatheredParameters([p], modifier_rank=0):
                    p.data.mul_(2)
        train(engine, BATCHES[2:])
        runs.append(weights(engine.module))
    assert_equal(*runs)


def test_copies_that_a_read_makes_are_told_of_once(single_process: None) -> None:
    engine = engine_for("zo", stream=True, wire="fp8")
    train(engine, BATCHES[:1])
    with log_lines() as lines:
        for p in engine.module.parameters():
            p.detach()
    assert ["GatheredParameters" in line for line in lines] == [True]
    with log_lines() as lines:
        train(engine, BATCHES[1:2])
        for p in engine.module.parameters():
            assert p.detach().is_contiguous()  # not a placeholder
    assert lines == []


def test_a_copy_of_gathered_parameters_has_what_they_show(single_process: None) -> None:
    engine = engine_for("zo", stream=True)
    train(engine, BATCHES[:1])
    with deepspeed.zero.GatheredParameters(list(engine.module.parameters()), modifier_rank=0):
        engine.module.lm_head.weight.data.fill_(0.5)
        reference = copy.deepcopy(engine.module)
    assert_equal(weights(engine.module), weights(reference))
    assert (reference.lm_head.weight == 0.5).all()


def test_a_removed_stand_in_leaves_the_attribute_that_it_found() -> None:
    module = torch.nn.Linear(1, 1)
    own = module.forward
    StandIn.put(module, "forward", lambda x: x).remove()
    assert "forward" not in vars(module) and module.forward == own
    module.forward = set_by_user = lambda x: x + 1
    first = StandIn.put(module, "forward", lambda x: x + 2)
    second = StandIn.put(module, "forward", lambda x: x + 3)
    assert module.forward(0) == 3
    first.remove()
    assert module.forward(0) == 3, "another replacement is left alone"
    second.remove()
    first.remove()
    assert module.forward is set_by_user
