"""Streamed LOMO's weights by name, outside training, and what it refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
import transformers as hf
from deepspeed.utils import safe_get_full_fp32_param, safe_set_full_fp32_param
from torch import nn

from ds_zo.config import ConfigError, resolve
from tests.helpers.lomo_runs import batches, config_for, lively, start, streamed, train, weights_of
from tests.helpers.weights import assert_equal
from tests.helpers.zoo import Wandering, plain_batch, seeded

pytestmark = pytest.mark.usefixtures("single_process")


@pytest.fixture
def pair() -> tuple[Any, Any]:
    """The same run, streamed and resident, after two steps."""
    engines = start(streamed(), lively("llama")), start(config_for(), lively("llama"))
    for engine in engines:
        train(engine, batches("llama", 2))
    return engines


def go_on(pair: tuple[Any, Any]) -> None:
    """Whatever was done in between, both still make the same steps."""
    for engine in pair:
        engine.train()
        train(engine, batches("llama", 2, first=2))
    assert_equal(weights_of(pair[0].module), weights_of(pair[1].module))


def test_evaluation_and_generation(pair: tuple[Any, Any]) -> None:
    batch = next(batches("llama", 1, first=9))
    results = []
    for engine in pair:
        engine.eval()
        with torch.no_grad():
            loss = engine(**batch).loss
        with torch.inference_mode():
            logits = engine.module(**batch).logits.clone()
        ids = engine.module.generate(batch["input_ids"][:1], max_new_tokens=4, do_sample=False, pad_token_id=0)
        results.append((loss, logits, ids))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    go_on(pair)


def test_a_parameter_that_came_after_initialize_is_saved(tmp_path: Path) -> None:
    engine = start(streamed(), lively("llama"))
    train(engine, batches("llama", 1))
    late = nn.Parameter(torch.arange(3.0), requires_grad=False)
    engine.module.register_parameter("late", late)
    engine.save_checkpoint(str(tmp_path))
    late.data.zero_()
    engine.load_checkpoint(str(tmp_path))
    assert torch.equal(late, torch.arange(3.0))


def test_state_dicts_are_copies_and_load(pair: tuple[Any, Any]) -> None:
    streaming, resident = pair
    states = [engine.module.state_dict() for engine in pair]
    assert_equal(*states)
    kept = {name: value.clone() for name, value in states[0].items()}
    go_on(pair)
    in_blocks = {name for name in kept if ".layers." in name}
    assert_equal({name: states[0][name] for name in in_blocks}, {name: kept[name] for name in in_blocks})
    block = streaming.module.model.layers[1].state_dict()
    assert torch.equal(block["mlp.up_proj.weight"], resident.module.model.layers[1].mlp.up_proj.weight)
    for engine in pair:
        engine.module.load_state_dict(kept)
    assert_equal(weights_of(streaming.module), kept)
    go_on(pair)


def test_weights_for_others(pair: tuple[Any, Any], tmp_path: Path) -> None:
    streaming, resident = pair
    weight = streaming.module.model.layers[1].mlp.up_proj.weight
    expected = resident.module.model.layers[1].mlp.up_proj.weight
    with deepspeed.zero.GatheredParameters([weight]):
        assert torch.equal(weight, expected)
    with deepspeed.zero.GatheredParameters([weight], modifier_rank=0), torch.no_grad():
        weight.mul_(0.5)
    with torch.no_grad():
        expected.mul_(0.5)
    safe_set_full_fp32_param(weight, safe_get_full_fp32_param(weight) * 0.5)
    with torch.no_grad():
        expected.mul_(0.5)
    go_on(pair)
    streaming.module.save_pretrained(tmp_path / "pretrained")
    saved = hf.AutoModelForCausalLM.from_pretrained(tmp_path / "pretrained")
    assert_equal(weights_of(saved), weights_of(resident.module))
    streaming.save_16bit_model(str(tmp_path), "whole.bin")
    assert_equal(torch.load(tmp_path / "whole.bin"), resident.module.state_dict())


def test_a_destroyed_engine_leaves_a_plain_module(pair: tuple[Any, Any]) -> None:
    streaming, resident = pair
    module = streaming.module
    streaming.destroy()
    assert all("forward" not in layer.__dict__ for layer in module.model.layers)
    assert_equal(weights_of(module), weights_of(resident.module))
    module(**next(batches("llama", 1))).loss.backward()
    assert all(p.grad is not None for p in module.parameters())
    module.zero_grad()
    go_on((start(streamed(), module), resident))


def test_a_second_engine_for_the_same_module_takes_over(pair: tuple[Any, Any]) -> None:
    go_on((start(streamed(), pair[0].module), pair[1]))


def test_a_budget_that_is_too_small_is_refused() -> None:
    with pytest.raises(ValueError, match=r"needs at least.*raise it.*ds_zo\.stream\.device_memory_gb"):
        start(streamed(stream={"device_memory_gb": 1e-6}), lively("llama"))


class Boxed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> Any:
        found = type("Box", (), {})()
        found.value = self.inner(x)
        return found


def test_blocks_whose_outputs_are_not_found_are_refused() -> None:
    model = seeded(Wandering)
    model.layers = nn.ModuleList(Boxed() for _ in range(2))
    engine = start(streamed(), model)
    with pytest.raises(ValueError, match="tensors inside a Box"):
        engine(**plain_batch(0))


def test_a_cache_in_training_is_refused() -> None:
    engine = start(streamed(), lively("llama"))
    with pytest.raises(ValueError, match=r"use_cache=False"):
        engine(**next(batches("llama", 1)), use_cache=True)
    engine.eval()
    loss = engine(**next(batches("llama", 1)), use_cache=True).loss
    with pytest.raises(ValueError, match=r"cache in evaluation.*use_cache=False"):
        engine.backward(loss)
    engine.train()
    train(engine, batches("llama", 1))


class Peeking(Wandering):
    """Uses a block's weight behind its back."""

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor, order: Any = None) -> torch.Tensor:
        return super().forward(input_ids, labels) + self.layers[0].up.weight.square().mean()


def test_weights_used_outside_their_block_are_refused() -> None:
    engine = start(streamed(), seeded(Peeking))
    with pytest.raises(ValueError, match=r"layers\.0\.up\.weight was used outside.*ds_zo\.stream\.blocks"):
        engine.backward(engine(**plain_batch(0)))
    assert all(p.grad is None for p in engine.module.parameters())


def test_a_backward_without_the_engine_is_refused() -> None:
    engine = start(streamed(), lively("llama"))
    with pytest.raises(RuntimeError, match=r"call engine\.backward"):
        engine(**next(batches("llama", 1))).loss.backward()


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (streamed(stream={"wire_dtype": "fp8"}), r"auto or the model's fp32.*ds_zo\.stream\.wire_dtype"),
        (streamed(stream={"master": "split"}), r"belongs to ZO.*ds_zo\.stream\.master"),
        (streamed(ds_zo={"rounding": "kahan"}), r"excludes block streaming.*ds_zo\.rounding"),
        (config_for("ZO", lr=1e-6, ds_zo={"rounding": "kahan"}), r"belongs to LOMO.*ds_zo\.rounding"),
        (config_for("LSP", lr=1e-6, ds_zo={"rounding": "kahan"}), r"belongs to LOMO.*ds_zo\.rounding"),
    ],
    ids=["wire", "master", "kahan streamed", "kahan ZO", "kahan LSP"],
)
def test_storage_that_lomo_does_not_have_is_refused(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve(config, world_size=1)
    resolve(streamed(stream={"wire_dtype": "fp32", "master": "wire"}), world_size=1)
