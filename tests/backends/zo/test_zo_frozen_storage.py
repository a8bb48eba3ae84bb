"""Frozen matrices of blocks in narrow storage (`frozen_dtype`): training equals that over the decoded base."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from ds_zo import ConfigError, ops
from tests.helpers.decoded_values import with_decoded_base
from tests.helpers.loaded_models import lora_over
from tests.helpers.tiny_models import tiny_batch, tiny_model
from tests.helpers.weights import assert_equal, weights
from tests.helpers.zo_runs import engine_for, train, zo_json

peft = pytest.importorskip("peft")
pytestmark = pytest.mark.usefixtures("single_process")

BF16 = {"bf16": {"enabled": True}}
BATCHES = [tiny_batch("llama", seed=seed, batch_size=2, length=8) for seed in range(3)]


def lora(**overrides: Any) -> Any:
    return lora_over(tiny_model("llama", **overrides).bfloat16(), target_modules=["q_proj", "down_proj"])


def partly_frozen() -> nn.Module:
    """Blocks whose trained parameters stay in the block's own unit, because most are trained. The head's working copy
    takes more scratch than a block's, which passes share."""
    model = tiny_model("llama", vocab_size=300).bfloat16()
    for name, p in model.named_parameters():
        p.requires_grad = "k_proj" not in name and "o_proj" not in name
    return model.train()


def run(model: nn.Module, **options: Any) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses, and the weights at the end."""
    engine = engine_for(copy.deepcopy(model), zo_json(**BF16, **options))
    losses = train(engine, BATCHES)
    assert engine.backend._passes.runner.interleave, (
        "passes that overwrite each other's weights run one after the other"
    )
    found = weights(engine.module)
    engine.destroy()
    return losses, found


@pytest.mark.parametrize(
    ("make", "form", "interval"),
    [(lora, "nf4", 1), (lora, "nf4_nested", 1), (lora, "fp8", 1), (lora, "bf12", 1), (partly_frozen, "nf4", 2)],
)
def test_a_stored_base_equals_its_decoded_values(make: Any, form: str, interval: int) -> None:
    """Streamed and resident, and as a model that holds the decoded values in bf16."""
    model = make()
    losses, end = run(with_decoded_base(model, form), interval=interval)
    assert any(not torch.equal(end[name], p) for name, p in model.state_dict().items())
    for options in ({}, {"resident_blocks": 1, "device_slots": 3}):
        ours = run(model, frozen_dtype=form, interval=interval, **options)
        assert ours[0] == losses, options
        assert_equal(ours[1], end)


def counted_decodings(monkeypatch: pytest.MonkeyPatch) -> list[None]:
    """An entry for each time that NF4 planes are decoded from now on."""
    found: list[None] = []
    nf4 = ops.PACKED[ops.NF4.dtype]
    counting = replace(nf4, dequantise_=lambda *planes: (found.append(None), nf4.dequantise_(*planes)))
    monkeypatch.setitem(ops.PACKED, ops.NF4.dtype, counting)
    return found


def test_directions_share_one_upload_and_nothing_is_written_back(monkeypatch: pytest.MonkeyPatch) -> None:
    decoded = counted_decodings(monkeypatch)
    engine = engine_for(lora(), zo_json(**BF16, frozen_dtype="nf4", params={"num_directions": 3}))
    blocks, runtime = engine.backend.store.blocks.placement.blocks, engine.backend.store.blocks.runtime
    before = [unit.store_buffer.clone() for unit in blocks]
    train(engine, BATCHES[:1])  # the first forward also runs one pass after the other
    up = runtime.transport.bytes_up
    decoded.clear()
    train(engine, BATCHES[1:])
    assert runtime.transport.bytes_up - up == 2 * sum(unit.nbytes for unit in blocks), "one upload of each block a step"
    assert len(decoded) == 2 * len(blocks)
    assert runtime.transport.bytes_down == 0
    assert all(unit.streamed and not unit.trainable for unit in blocks)
    assert all(torch.equal(unit.store_buffer, was) for unit, was in zip(blocks, before, strict=True))


def test_a_stored_parameter_that_is_asked_to_train_is_refused() -> None:
    model = lora()
    engine = engine_for(model, zo_json(**BF16, frozen_dtype="nf4"), model_parameters=list(model.parameters()))
    train(engine, BATCHES[:1])
    name, weight = next((n, p) for n, p in model.named_parameters() if "k_proj" in n)
    weight.requires_grad = True
    with pytest.raises(ValueError, match=f"{name} was frozen when deepspeed.initialize ran.*unfreeze it before"):
        train(engine, BATCHES[:1])


def test_a_model_without_frozen_matrices_is_refused() -> None:
    with pytest.raises(ConfigError, match="got nf4 and a model that trains all of them: freeze the base model"):
        engine_for(tiny_model("llama"), zo_json(frozen_dtype="nf4"))


def test_a_frozen_second_adapter_keeps_its_precision() -> None:
    """Its values pass through NF4 unchanged only if they are not stored in it."""
    model = lora()
    model.add_adapter("reference", peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))
    model.set_adapter("default")
    before = {n: p.detach().clone() for n, p in model.named_parameters() if "reference" in n}
    engine = engine_for(model, zo_json(**BF16, frozen_dtype="nf4"))
    train(engine, BATCHES[:1])
    assert before and all(".lora_" in name for name in before)
    found = engine.module.state_dict()
    assert all(torch.equal(found[name], value) for name, value in before.items())


def test_saving_adapters_decodes_no_base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both adapters are saved with their values, and no block is decoded for it, nor for a state dict without frozen
    weights."""
    model = lora()
    model.add_adapter("second", peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))
    model.set_adapter("default")
    engine = engine_for(model, zo_json(**BF16, frozen_dtype="nf4"))
    train(engine, BATCHES[:1])
    whole = weights(engine.module)
    decoded = counted_decodings(monkeypatch)
    engine.module.save_pretrained(str(tmp_path))
    trained = engine.module_state_dict(exclude_frozen_parameters=True)
    assert decoded == []
    assert_equal(trained, {name: whole[name] for name in trained})
    for name, folder in (("default", tmp_path), ("second", tmp_path / "second")):
        saved = load_file(folder / "adapter_model.safetensors")
        assert saved and all(torch.equal(v, whole[k.replace(".weight", f".{name}.weight")]) for k, v in saved.items())
    engine.destroy()
    assert "save_pretrained" not in model.__dict__
