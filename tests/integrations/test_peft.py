"""LoRA: adapters train, the base stays as it was, frozen, streamed and never written back."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
from accelerate.utils import DummyOptim

from tests.helpers.tiny_models import tiny_model
from tests.integrations.library_runs import (
    ENGINE_BACKENDS,
    accelerator_for,
    arguments,
    assert_moved,
    assert_same,
    batches,
    config_for,
    engine_of,
    fresh_libraries,  # noqa: F401
    loader,
    loop,
    on_device,
    start,
    train,
    trainer_for,
    weights_of,
    zero_for,
)

peft = pytest.importorskip("peft")

pytestmark = pytest.mark.parametrize("backend", ENGINE_BACKENDS)


def lora_model(seed: int = 0) -> Any:
    settings = peft.LoraConfig(r=2, lora_alpha=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    torch.manual_seed(seed)
    model = peft.get_peft_model(tiny_model("llama"), settings)
    with torch.no_grad():  # B starts at zero, where ZO's update of A would be zero to first order
        for name, p in model.named_parameters():
            if "lora_B" in name:
                p.normal_(std=0.02)
    return model.train()


def adapters(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: value for name, value in weights.items() if "lora_" in name}


def base(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: value for name, value in weights.items() if "lora_" not in name}


@pytest.mark.parametrize("stream", [False, True])
def test_only_adapters_move_through_accelerate(backend: str, stream: bool) -> None:
    accelerator = accelerator_for(config_for(backend, stream=stream))
    model = lora_model()
    trainable = [p for p in model.parameters() if p.requires_grad]
    model, optimizer, data = accelerator.prepare(model, DummyOptim(trainable), loader(batches(4)))
    before = weights_of(model)
    loop(accelerator, model, optimizer, data)
    after = weights_of(model)
    assert_same(base(before), base(after))
    assert all(not torch.equal(value, after[name]) for name, value in adapters(before).items())


def test_a_streamed_frozen_base_gives_the_resident_run_and_is_never_written_back(backend: str) -> None:
    runs = []
    for stream in (False, True):
        config = config_for(backend, stream=stream)
        if backend == "lsp":  # Adam in one place: a GPU's rounds otherwise
            config["zero_optimization"]["offload_optimizer"] = {"device": "cpu"}
        engine = start(config, lora_model())
        if stream and backend == "zo":
            block_store = {
                u.name: (u, u.store_buffer.clone()) for u in engine.backend.store.blocks.placement.units if u.streamed
            }
            assert block_store, "blocks with frozen weights stream"
        losses = train(engine, batches(10))  # past the write-back interval
        runs.append((losses, weights_of(engine)))
    assert runs[0][0] == runs[1][0]
    assert_same(runs[0][1], runs[1][1])
    if backend == "zo":
        assert all(torch.equal(unit.store_buffer, first) for unit, first in block_store.values())


@pytest.mark.parametrize("stage", [0, 3])
def test_trainer_saves_adapters_alone_and_resumes(backend: str, stage: int, tmp_path: Path) -> None:
    config = config_for(backend)
    config["zero_optimization"] = zero_for(backend, stage=stage)
    changes: dict[str, Any] = {"max_steps": 2, "save_strategy": "steps", "save_steps": 1}
    model, again_model = lora_model(), lora_model()
    whole = trainer_for(arguments(tmp_path, config, **changes), 2, model)
    before = {name: value.detach().clone() for name, value in model.state_dict().items()}
    whole.train()
    expected = weights_of(engine_of(whole))
    assert_same(base(before), base(expected))
    assert_moved(adapters(before), adapters(expected))

    files = {path.name for path in (tmp_path / "checkpoint-2").iterdir()}
    assert "adapter_model.safetensors" in files and "model.safetensors" not in files
    saved = peft.load_peft_weights(str(tmp_path / "checkpoint-2"))
    assert saved and all("lora_" in name for name in saved)
    by_name = {name.replace(".default", ""): value for name, value in adapters(expected).items()}
    assert_same(saved, by_name)

    again = trainer_for(arguments(tmp_path, config, **changes), 2, again_model)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    assert_same(expected, weights_of(engine_of(again)))


def merged(engine: Any, how: str) -> torch.nn.Module:
    if how == "after an evaluation":
        logits_of(engine, engine.module)
    if how == "after state_dict":
        engine.module.state_dict()
    model = engine.module
    if how == "after destroy":
        engine.destroy()
        model = model.to(engine.device)  # blocks were left on the host
    if how == "of a gathered copy":
        with deepspeed.zero.GatheredParameters(list(model.parameters())):
            model = copy.deepcopy(model)
    if how == "in turn":
        model.merge_adapter()
        model.unmerge_adapter()
    found: torch.nn.Module = model.merge_and_unload(safe_merge=how == "safely")
    return found


def logits_of(engine: Any, model: torch.nn.Module) -> torch.Tensor:
    model.eval()
    with torch.no_grad():
        found: torch.Tensor = model(**on_device(engine, batches(1)[0])).logits
    return found


@pytest.mark.parametrize("stream", [False, True])
def test_merging_and_saving_under_a_living_engine_keep_what_was_learnt(
    backend: str, stream: bool, tmp_path: Path
) -> None:
    """The usual last lines of a script. Frozen blocks were brought up ahead of the merge, which they must not miss."""
    config = config_for(backend, stream=stream)
    if backend == "lsp":
        config["zero_optimization"]["offload_optimizer"] = {"device": "cpu"}
    config["optimizer"]["params"]["lr"] *= 10
    engine = start(config, lora_model())
    untrained = logits_of(engine, lora_model().to(engine.device))
    train(engine, batches(3))
    expected, learnt = logits_of(engine, engine.module), adapters(weights_of(engine))
    assert (expected - untrained).abs().max() > 1e-3
    ways = ["after destroy", "bare", "safely"]
    if backend == "zo":
        ways += ["after an evaluation", "after state_dict", "of a gathered copy", "in turn"]
    for how in ways:
        engine = start(config, lora_model())
        train(engine, batches(3))
        if how == "bare":
            engine.module.save_pretrained(tmp_path)
        if stream and engine.device.type == "cuda" and how != "after destroy":
            return  # merging takes adapters and blocks in one place
        found = logits_of(engine, merged(engine, how))
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-5, msg=lambda m, how=how: f"{how}: {m}")
    saved = peft.load_peft_weights(str(tmp_path))
    assert_same(saved, {name.replace(".default", ""): value for name, value in learnt.items()})


REFERENCES = ["before", "before, with gradients", "after", "after, with gradients"]


@pytest.mark.parametrize("when", REFERENCES)
def test_the_base_is_its_own_reference_inside_a_step(backend: str, when: str) -> None:
    """As in DPO without a reference model: `disable_adapter` freezes the adapters, and thaws them on leaving. Every
    pair of backend, moment and streaming, not every triple."""
    stream = (ENGINE_BACKENDS.index(backend) + REFERENCES.index(when)) % 2 == 0
    plain = tiny_model("llama").eval()
    runs = []
    for is_own in (True, False):
        engine = start(config_for(backend, stream=stream), lora_model())

        def reference(batch: Any, engine: Any = engine, is_own: bool = is_own) -> torch.Tensor:
            if not is_own:
                return plain(batch).logits.detach().to(engine.device)
            with torch.set_grad_enabled("with gradients" in when), engine.module.disable_adapter():
                return engine(batch.to(engine.device)).logits.detach()

        for batch in batches(3):
            first = reference(batch["input_ids"]) if "before" in when else None
            logits = engine(batch["input_ids"].to(engine.device)).logits
            against = reference(batch["input_ids"]) if first is None else first
            engine.backward(-torch.nn.functional.logsigmoid((logits - against)[..., :7].sum(-1)).mean())
            engine.step()
        runs.append(weights_of(engine))
    assert_moved(adapters(lora_model().state_dict()), adapters(runs[0]))
    assert_same(*runs, atol=1e-6)
