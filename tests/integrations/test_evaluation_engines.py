"""Engines without an optimizer, which only evaluate: TRL's reference models, and a Trainer that never trains.

TRL and Trainer make such an engine from a copy of the JSON without its optimizer. The `ds_zo` section stays.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
from torch import nn

from ds_zo import ConfigError
from ds_zo.plugin.engine import PluginEngine
from tests.helpers.tiny_models import tiny_model
from tests.integrations.library_runs import (
    LEARNING_RATE,
    accelerator_for,
    arguments,
    assert_moved,
    assert_same,
    batches,
    config_for,
    engine_of,
    forget,
    fresh_libraries,  # noqa: F401
    loop,
    on_device,
    section_for,
    start,
    trainer_for,
    weights_of,
    zero_for,
)
from tests.integrations.trl_data import PAIRS, tokenizer

SECTIONS: list[tuple[dict[str, Any], int, bool]] = [
    ({"stream": {"device_slots": 3, "writeback_interval": 4}}, 0, True),
    ({"stream": {"writeback_interval": 4}}, 3, False),
    ({"checkpoint": {"trajectory": True}}, 3, True),
    ({"rounding": "kahan"}, 0, False),
    ({"compile_blocks": True}, 1, True),
    ({"backend": "lomo"}, 2, False),
    ({"backend": "lsp"}, 2, True),
]
"""A `ds_zo` section, the ZeRO stage, and whether parameters are offloaded."""


def without_optimizer(config: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in config.items() if key != "optimizer"}


def plain_loss(weights: dict[str, torch.Tensor] | None = None, **batch: torch.Tensor) -> torch.Tensor:
    model = tiny_model("llama").eval()
    if weights is not None:
        model.load_state_dict(weights)
    with torch.no_grad():
        loss: torch.Tensor = model(**batch).loss
        return loss


@pytest.mark.parametrize(("section", "stage", "stream"), SECTIONS)
def test_an_engine_without_an_optimizer_evaluates_and_refuses_to_train(
    section: dict[str, Any], stage: int, stream: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    zero = zero_for("zo", stage=stage, stream=stream)
    config = without_optimizer(config_for("zo", accumulation=2, zero_optimization=zero, ds_zo=section))
    engine = start(config)
    assert type(engine) is PluginEngine
    [batch] = batches(1)
    expected = plain_loss(**batch)
    engine.eval()
    loss = engine(**on_device(engine, batch)).loss  # ZO would perturb a model that was never in train mode
    assert torch.equal(loss.cpu(), expected)
    assert not loss.requires_grad
    with pytest.raises(RuntimeError, match=r"engine\.backward needs an optimizer.* name a backend in optimizer\.type"):
        engine.backward(loss)
    with pytest.raises(RuntimeError, match=r"engine\.step needs an optimizer"):
        engine.step()
    engine.train()
    with pytest.raises(RuntimeError, match=r"a training forward needs an optimizer"):
        engine(**on_device(engine, batch))
    with torch.no_grad():
        assert torch.equal(engine(**on_device(engine, batch)).loss.cpu(), expected)
    assert_same(weights_of(engine), dict(tiny_model("llama").state_dict()))
    engine.destroy()
    assert not list(tmp_path.iterdir())


def test_a_misspelt_key_is_refused_without_an_optimizer_too() -> None:
    config = without_optimizer(config_for("zo", ds_zo={"stream": {"device_slot": 2}}))
    with pytest.raises(ConfigError, match="device_slots"):
        start(config)


def test_a_stock_optimizer_beside_the_section_is_refused() -> None:
    config = without_optimizer(config_for("zo", ds_zo={"stream": {"device_slots": 2}}))
    model = tiny_model("llama")
    with pytest.raises(ConfigError, match="must be named"):
        start({**config, "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}}, model)
    with pytest.raises(ConfigError, match="must be named"):
        start(config, model, optimizer=torch.optim.AdamW(model.parameters()))


@pytest.mark.parametrize("stage", [0, 3])
def test_trainer_evaluates_and_predicts_from_a_json_without_an_optimizer(stage: int, tmp_path: Path) -> None:
    """Trainer's own preparation refuses an evaluation below stage 3."""
    section = {"stream": {"resident_blocks": 0}}
    config = without_optimizer(config_for("zo", zero_optimization=zero_for("zo", stage=stage), ds_zo=section))
    expected = torch.stack([plain_loss(**batch) for batch in batches(2)]).mean().item()
    model = tiny_model("llama")
    trainer = trainer_for(arguments(tmp_path, config, max_steps=1), 2, model)
    assert trainer.evaluate()["eval_loss"] == pytest.approx(expected, rel=1e-5)
    assert trainer.predict(trainer.eval_dataset).metrics["test_loss"] == pytest.approx(expected, rel=1e-5)
    assert not engine_of(trainer).resolved.trains
    with pytest.raises(RuntimeError, match="needs an optimizer"):
        trainer.train()


DPO = [("zo", 0, True), ("zo", 3, True), ("lomo", 3, True), ("lsp", 0, False)]


@pytest.mark.parametrize(("backend", "stage", "stream"), DPO)
def test_dpo_trains_against_a_reference_that_keeps_its_weights(
    backend: str, stage: int, stream: bool, tmp_path: Path
) -> None:
    trl, datasets = (pytest.importorskip(name) for name in ("trl", "datasets"))
    config = config_for(backend, zero_optimization=zero_for(backend, stage=stage, stream=stream))
    if stream:
        config["ds_zo"] = {"stream": {"device_slots": 2}}
    kept = arguments(tmp_path, config, max_steps=1).to_dict()
    args = trl.DPOConfig(**{**kept, "deepspeed": config, "max_length": 16, "bf16": False, "report_to": []})
    data = datasets.Dataset.from_list(PAIRS)
    trainer = trl.DPOTrainer(
        model=tiny_model("llama"),
        ref_model=tiny_model("llama"),
        args=args,
        train_dataset=data,
        eval_dataset=data,
        processing_class=tokenizer(),
    )
    reference = trainer.ref_model
    initial = weights_of(reference)
    assert isinstance(reference, PluginEngine) == stream  # without a ds_zo section the JSON is DeepSpeed's own
    assert trainer.evaluate()["eval_rewards/margins"] == 0  # policy and reference have the same weights
    trainer.train()
    assert trainer.evaluate()["eval_rewards/margins"] != 0
    assert_moved(initial, weights_of(engine_of(trainer)))
    assert_same(initial, weights_of(reference))
    forget()
    [batch] = batches(1)
    assert torch.equal(reference(**on_device(reference, batch)).loss.cpu(), plain_loss(initial, **batch))


@pytest.mark.parametrize(("backend", "stream"), [("zo", True), ("lomo", True), ("lomo", False), ("lsp", True)])
def test_trl_generates_at_stage_3_and_training_goes_on(backend: str, stream: bool) -> None:
    """TRL removes the hooks of ZeRO-3's optimizer before it generates, and registers them again."""
    trl_models = pytest.importorskip("trl.models")

    def generate(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        with torch.no_grad():
            return model.generate(  # type: ignore[operator, no-any-return]
                batch["input_ids"][:, :5], max_new_tokens=4, do_sample=False, pad_token_id=1
            ).cpu()

    def run(*, generates: bool) -> dict[str, torch.Tensor]:
        forget()
        plain = tiny_model("llama")  # transformers shards a model that is made after a stage 3 JSON was read
        accelerator = accelerator_for(section_for(backend, zero_optimization=zero_for(backend, stage=3, stream=stream)))
        model = tiny_model("llama")
        optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE[backend])
        model, optimizer = accelerator.prepare(model, optimizer)
        loop(accelerator, model, optimizer, batches(1))
        if generates:
            batch = on_device(model, batches(3)[2])
            plain.to(model.device).load_state_dict(weights_of(model))
            with trl_models.unwrap_model_for_generation(model, accelerator) as unwrapped:
                found = generate(unwrapped, batch)
            assert torch.equal(found, generate(plain, batch))
        loop(accelerator, model, optimizer, batches(2)[1:])
        after = weights_of(model)
        model.destroy()
        assert not hasattr(optimizer.optimizer, "parameter_offload")
        return after

    expected = run(generates=False)
    assert_same(run(generates=True), expected)


def test_a_reference_follows_its_policy() -> None:
    """TRL's `sync_ref_model` mixes the policy's weights into the reference inside `GatheredParameters`."""
    section = {"stream": {"device_slots": 2}}
    policy = start(
        config_for("zo", zero_optimization=zero_for("zo", stage=3), ds_zo=section), tiny_model("llama", seed=1)
    )
    config = without_optimizer(config_for("zo", zero_optimization=zero_for("zo", stage=3), ds_zo=section))
    reference = start(config)
    reference.eval()
    pairs = list(zip(policy.module.parameters(), reference.module.parameters(), strict=True))
    with deepspeed.zero.GatheredParameters([p for pair in pairs for p in pair], modifier_rank=0), torch.no_grad():
        for source, target in pairs:
            target.copy_(source)
    assert_same(weights_of(policy), weights_of(reference))
    [batch] = batches(1)
    found = reference(**on_device(reference, batch)).loss.cpu()
    assert torch.equal(found, plain_loss(weights_of(policy), **batch))
