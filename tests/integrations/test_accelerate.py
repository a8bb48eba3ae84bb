"""Accelerate's own verbs on our engines: prepare in all its forms, accumulate, clip, save and load state, unwrap."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from accelerate import Accelerator
from accelerate.utils import DummyOptim, DummyScheduler
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

from ds_zo.plugin.engine import PluginEngine
from tests.helpers.tiny_models import tiny_model
from tests.integrations.library_runs import (
    ENGINE_BACKENDS,
    LEARNING_RATE,
    accelerator_for,
    assert_moved,
    assert_same,
    batches,
    config_for,
    fresh_libraries,  # noqa: F401
    loader,
    loop,
    section_for,
    start,
    train,
    weights_of,
    zero_for,
)

pytestmark = pytest.mark.parametrize("backend", ENGINE_BACKENDS)

CONFIGS = Path(__file__).parents[2] / "ds_configs"


def prepared(accelerator: Accelerator, data: Any, seed: int = 0, optimizer: Any = DummyOptim) -> tuple[Any, Any, Any]:
    model = tiny_model("llama", seed=seed)
    return accelerator.prepare(model, optimizer(model.parameters()), loader(data))


def test_the_shipped_json_trains_with_dummy_optimizer_and_scheduler(backend: str) -> None:
    """Its batch size is the JSON's own, and so are lr and schedule: the dummies fill only what says "auto"."""
    file = CONFIGS / f"{backend}.json"
    accelerator = accelerator_for(str(file))  # type: ignore[arg-type]
    model = tiny_model("llama")
    optimizer = DummyOptim(model.parameters(), lr=123.0)
    model, optimizer, data, schedule = accelerator.prepare(
        model, optimizer, loader(batches(3)), DummyScheduler(optimizer, total_num_steps=7, warmup_num_steps=7)
    )
    assert type(model) is PluginEngine
    before = weights_of(model)
    rates = []
    for batch in data:
        loop(accelerator, model, optimizer, [batch], schedule)
        rates.append(schedule.get_last_lr()[0])
    peak = model.resolved.optimizer.lr
    assert peak < 1 and rates[0] == pytest.approx(0.1 * peak) and rates[0] < rates[1] < rates[2] < peak
    assert_moved(before, weights_of(model))


def test_dummies_fill_auto(backend: str) -> None:
    config = config_for(backend)
    config["optimizer"]["params"] |= {"lr": "auto", "weight_decay": "auto"}
    config |= {"gradient_clipping": "auto", "gradient_accumulation_steps": "auto"}
    names = ("warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "total_num_steps")
    config["scheduler"] = {"type": "WarmupDecayLR", "params": dict.fromkeys(names, "auto")}
    accelerator = accelerator_for(config)
    model = tiny_model("llama")
    optimizer = DummyOptim(model.parameters(), lr=2e-4, weight_decay=0.1)
    schedule = DummyScheduler(optimizer, total_num_steps=4, warmup_num_steps=1)
    model, *_ = accelerator.prepare(model, optimizer, loader(batches(1)), schedule)
    assert (model.resolved.optimizer.lr, model.resolved.optimizer.weight_decay) == (2e-4, 0.1)
    assert model.gradient_accumulation_steps() == 1


def test_a_scheduler_of_the_script_drives_its_own_optimizer(backend: str) -> None:
    accelerator = accelerator_for(section_for(backend))
    model = tiny_model("llama")
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE[backend], weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.5, total_iters=2)
    model, optimizer, data, schedule = accelerator.prepare(model, optimizer, loader(batches(3)), schedule)
    loop(accelerator, model, optimizer, data, schedule)
    in_json = {"type": "LinearLR", "params": {"start_factor": 0.5, "total_iters": 2}}
    reference = start(config_for(backend, scheduler=in_json))
    train(reference, batches(3))
    assert_same(weights_of(model), weights_of(reference))
    assert model.get_lr() == reference.get_lr()


def test_offload_optimizer_beside_the_scripts_adamw(backend: str) -> None:
    """Accelerate then swaps AdamW for DeepSpeed's CPU Adam; its groups, which the script's scheduler holds, count."""
    config = section_for(backend)
    config["zero_optimization"] = {"stage": 2, "offload_optimizer": {"device": "cpu"}}
    config["zero_force_ds_cpu_optimizer"] = False
    accelerator = accelerator_for(config)

    def adamw(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr=LEARNING_RATE[backend], weight_decay=0.0)

    model, optimizer, data = prepared(accelerator, batches(2), optimizer=adamw)
    loop(accelerator, model, optimizer, data)
    reference = start(config_for(backend, zero_optimization={"stage": 0, "offload_optimizer": {"device": "cpu"}}))
    train(reference, batches(2))
    assert_same(weights_of(model), weights_of(reference))


def test_clip_grad_norm_returns_the_engines_norm(backend: str) -> None:
    accelerator = accelerator_for(config_for(backend))
    model, _, data = prepared(accelerator, batches(1))
    for batch in data:
        accelerator.backward(model(**batch).loss)
        assert accelerator.clip_grad_norm_(model.parameters(), 1e-9) == model.get_global_grad_norm()
    reference = start(config_for(backend))
    train(reference, batches(1))
    assert_same(weights_of(model), weights_of(reference))  # the call itself clips nothing, as with any DeepSpeed engine


@pytest.mark.parametrize("stream", [False, True])
def test_load_state_goes_on_exactly(backend: str, stream: bool, tmp_path: Path) -> None:
    accelerator = accelerator_for(config_for(backend, stream=stream))
    model, optimizer, data = prepared(accelerator, batches(5))
    expected: list[float] = []
    for number, batch in enumerate(data):
        if number == 2:
            accelerator.save_state(str(tmp_path))
        expected += loop(accelerator, model, optimizer, [batch])
    weights = weights_of(model)

    accelerator.load_state(str(tmp_path))  # the same engine goes back
    assert loop(accelerator, model, optimizer, batches(5)[2:]) == expected[2:]
    assert_same(weights, weights_of(model))

    accelerator.free_memory()
    other, optimizer, _ = prepared(accelerator, batches(5), seed=1)  # another engine is brought there
    accelerator.load_state(str(tmp_path))
    assert loop(accelerator, other, optimizer, batches(5)[2:]) == expected[2:]
    assert_same(weights, weights_of(other))


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_the_state_dict_and_the_unwrapped_model_are_current(backend: str, stage: int, tmp_path: Path) -> None:
    config = config_for(backend)
    config["zero_optimization"] = zero_for(backend, stage=stage)
    accelerator = accelerator_for(config)
    model, optimizer, data = prepared(accelerator, batches(3))
    before = weights_of(model)
    loop(accelerator, model, optimizer, data)
    state = accelerator.get_state_dict(model)
    assert_moved(before, state)
    assert_same(state, weights_of(model))
    unwrapped = accelerator.unwrap_model(model)
    assert isinstance(unwrapped, transformers.PreTrainedModel)
    unwrapped.save_pretrained(tmp_path, state_dict=dict(state), save_function=accelerator.save)
    unset_hf_deepspeed_config()  # or stage 3 would partition what is loaded
    assert_same(transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype="float32").state_dict(), state)


AUTO = {
    "ds_zo": ({"ds_zo": {"stream": {"device_memory_gb": "auto"}}}, "ds_zo.stream.device_memory_gb"),
    "zo_eps": ({"optimizer": {"type": "ZO", "params": {"lr": 1e-3, "zo_eps": "auto"}}}, "optimizer.params.zo_eps"),
    "betas": ({"optimizer": {"type": "ZO", "params": {"lr": 1e-3, "betas": "auto"}}}, "optimizer.params.betas"),
}


@pytest.mark.parametrize("name", AUTO)
def test_accelerate_refuses_the_autos_that_the_migration_page_names(backend: str, name: str) -> None:
    edit, key = AUTO[name]
    accelerator = accelerator_for({**config_for("zo", stream=True), **edit})
    with pytest.raises(ValueError, match=key):
        prepared(accelerator, batches(1))


def test_accelerate_takes_an_automatic_offload_for_none(backend: str) -> None:
    config = config_for(backend)
    config["zero_optimization"]["offload_param"] = {"device": "auto"}
    model, *_ = prepared(accelerator_for(config), batches(1))
    assert model.resolved.stream is False
