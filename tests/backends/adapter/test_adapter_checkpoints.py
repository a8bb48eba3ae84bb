"""Checkpoints of adapters: a resumed run equals one without interruption, and the frozen base is left out."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf

from ds_zo import cli
from ds_zo.backends.recompute import stored_weights
from ds_zo.checkpoint import CheckpointError
from ds_zo.plugin import checkpointing
from ds_zo.streaming.loading import load_pretrained
from tests.helpers.adapter_runs import METHODS, adapted, adapter_json, batches, peft, start, train
from tests.helpers.tiny_models import tiny_model
from tests.helpers.weights import weights

pytestmark = pytest.mark.usefixtures("single_process")
BF16 = {"bf16": {"enabled": True}}
COSINE = {"type": "WarmupCosineLR", "params": {"total_num_steps": 10, "warmup_num_steps": 2}}


def loaded(folder: Path) -> Any:
    """A model that is read from `folder` into NF4, with adapters."""
    model = load_pretrained(hf.AutoModelForCausalLM, str(folder), dtype=torch.bfloat16, frozen_dtype="nf4")
    torch.manual_seed(0)
    return peft.get_peft_model(model, METHODS["lora"](), autocast_adapter_dtype=False).train()


def end_of(engine: Any) -> dict[str, Any]:
    """Weights, masters and optimizer states by name."""
    found: dict[str, Any] = weights(engine.module)
    for t in engine.backend._trained:
        for key, value in engine.optimizer.state[t.master].items():
            found[f"{t.name}:{key}"] = value.clone()
        found[f"{t.name}:master"] = t.master.detach().clone()
    return found


def test_a_resumed_run_equals_one_without_interruption(tmp_path: Path) -> None:
    """From inside an accumulation window, with a scheduler, over a base that is read from files."""
    tiny_model("llama").bfloat16().save_pretrained(tmp_path / "model")
    config = adapter_json(own=False, gradient_accumulation_steps=2, scheduler=COSINE, gradient_clipping=0.1, **BF16)
    config["ds_zo"]["checkpoint"] = {"asynchronous": True}
    engine = start(loaded(tmp_path / "model"), config)
    data = batches(8)
    train(engine, data[:3])
    engine.save_checkpoint(str(tmp_path / "saved"))
    losses = train(engine, data[3:])
    engine.wait_for_checkpoint()
    frozen = {name for name, p in engine.module.named_parameters() if not p.requires_grad}
    index = json.loads((tmp_path / "saved" / "global_step1" / "manifest.json").read_text())
    assert sum(file.stat().st_size for file in (tmp_path / "saved" / "global_step1").glob("weights-*")) < 20_000
    assert frozen and not frozen & set(json.dumps(index).split('"'))

    resumed = start(loaded(tmp_path / "model"), config)
    train(resumed, data[:1])
    resumed.load_checkpoint(str(tmp_path / "saved"))
    assert train(resumed, data[3:]) == losses
    ours, theirs = end_of(resumed), end_of(engine)
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        assert torch.equal(value, theirs[name]), name


def test_another_base_or_other_adapters_are_refused(tmp_path: Path) -> None:
    engine = start(adapted())
    train(engine, batches(1))
    engine.save_checkpoint(str(tmp_path))
    expected = weights(engine.module)
    other = adapted()
    with torch.no_grad():
        next(p for n, p in other.named_parameters() if "k_proj" in n).mul_(2)
    with pytest.raises(CheckpointError, match=r"needs the base of its run .*, got another base .*: load the same"):
        start(other).load_checkpoint(str(tmp_path))
    wider = start(adapted("rslora"))
    with pytest.raises(CheckpointError, match=r"of the saved run, default.r 2, .*, got default.r 4, .*: make the"):
        wider.load_checkpoint(str(tmp_path))
    with pytest.raises(CheckpointError, match=r"lora_A.* has shape \(2, .* there and \(4, .* here"):
        wider.load_checkpoint(str(tmp_path), load_optimizer_states=False)
    with pytest.raises(CheckpointError, match=r"default.peft_type \"LORA\".*, got .*\"PROMPT_TUNING\": make the"):
        start(adapted("prompt")).load_checkpoint(str(tmp_path))
    sgd = adapted()
    optimizer = torch.optim.SGD([p for p in sgd.parameters() if p.requires_grad], lr=0.1)
    with pytest.raises(CheckpointError, match=r"of the class of the saved one, AdamW, got SGD: make the same, or"):
        start(sgd, optimizer=optimizer).load_checkpoint(str(tmp_path))
    fresh = start(adapted(seed=3))
    fresh.load_checkpoint(str(tmp_path), load_optimizer_states=False)
    assert all(torch.equal(value, expected[name]) for name, value in weights(fresh.module).items())
    assert not fresh.optimizer.state


def test_adapters_are_exported_alone_or_merged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tiny_model("llama").bfloat16().save_pretrained(tmp_path / "model")
    engine = start(loaded(tmp_path / "model"), adapter_json(**BF16))
    train(engine, batches(2))
    engine.save_checkpoint(str(tmp_path / "saved"))
    assert cli.main(["export", str(tmp_path / "saved"), str(tmp_path / "alone")]) == 0
    assert "without the frozen base, which the checkpoint does not have: --merge writes" in capsys.readouterr().out
    assert [path.name for path in (tmp_path / "alone").iterdir()] == ["adapter"], "no config without a model"
    base = hf.AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.bfloat16)
    theirs = peft.PeftModel.from_pretrained(base, str(tmp_path / "alone" / "adapter"), autocast_adapter_dtype=False)
    for name, p in engine.module.named_parameters():
        assert not p.requires_grad or torch.equal(p, theirs.get_parameter(name)), name
    assert cli.main(["export", str(tmp_path / "saved"), str(tmp_path / "merged"), "--merge"]) == 0
    found = hf.AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype="auto").state_dict()
    expected = theirs.merge_and_unload().state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.equal(value, expected[name]) for name, value in found.items())


def test_zo_and_adamw_load_the_adapters_of_each_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny_model("llama").bfloat16().save_pretrained(tmp_path / "model")
    zo = {**adapter_json(**BF16), "ds_zo": {}, "optimizer": {"type": "ZO", "params": {"lr": 1e-2}}}
    configs = {"adapter": adapter_json(own=False, **BF16), "zo": zo}
    warned: list[str] = []
    monkeypatch.setattr(checkpointing, "warn", warned.append)
    for wrote, read in (("adapter", "zo"), ("zo", "adapter")):
        first, second = (start(loaded(tmp_path / "model"), configs[name]) for name in (wrote, read))
        train(first, batches(2))
        first.save_checkpoint(str(tmp_path / wrote))
        second.load_checkpoint(str(tmp_path / wrote), load_optimizer_states=False)
        here = weights(second.module)
        assert all(torch.equal(value, here[name]) for name, value in weights(first.module).items())
        assert "has no frozen weights, and whether the model's own" in warned.pop()


def _load(module: Any, name: str) -> None:
    values = weights(module)
    module.load_state_dict({**values, name: torch.ones_like(values[name])})


WRITES: dict[str, Callable[[Any, str], object]] = {
    "load_state_dict": _load,
    "in place": lambda module, name: module.get_parameter(name).data.mul_(2),
    "another tensor": lambda module, name: setattr(
        module.get_parameter(name), "data", torch.ones(module.get_parameter(name).shape)
    ),
    "peft": lambda module, name: module.merge_adapter(),
}


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize(
    ("place", "where"),
    [
        ({"offload": False}, "k_proj"),
        ({}, "k_proj"),
        ({"resident_blocks": 3}, "k_proj"),
        ({}, "embed_tokens"),
    ],
)
def test_a_base_that_was_written_after_a_save_has_another_hash(
    place: dict[str, Any], where: str, write: str, tmp_path: Path
) -> None:
    engine = start(adapted(), adapter_json(**place))
    train(engine, batches(1))
    engine.save_checkpoint(str(tmp_path), tag="before")
    name = next(name for name in weights(engine.module) if where in name)
    WRITES[write](engine.module, name)
    engine.save_checkpoint(str(tmp_path), tag="after")
    fresh = start(adapted(), adapter_json(**place))
    fresh.load_checkpoint(str(tmp_path), tag="before")
    with pytest.raises(CheckpointError, match="got another base"):
        fresh.load_checkpoint(str(tmp_path), tag="after")


def test_saved_models_have_the_decoded_base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = start(adapted(dtype=torch.bfloat16), adapter_json(frozen_dtype="nf4", **BF16))
    train(engine, batches(1))
    expected = weights(engine.module)
    name = next(n for n, _ in engine.module.named_parameters() if "k_proj" in n)
    assert torch.equal(engine.module.get_parameter(name).detach().clone(), expected[name]), "a direct read"
    assert expected[name].unique().numel() > 10
    engine.save_16bit_model(str(tmp_path), "model.bin")
    saved = torch.load(tmp_path / "model.bin")
    assert all(torch.equal(value, saved[name]) for name, value in expected.items())
    monkeypatch.setattr(stored_weights, "host_free_bytes", lambda: 0)  # adapters are saved without the decoded base
    engine.module.save_pretrained(tmp_path / "adapter")
    trained = engine.module_state_dict(exclude_frozen_parameters=True)
    assert trained.keys() == {name for name in expected if "lora_" in name}
    with pytest.raises(RuntimeError, match=r"no room for the decoded base, got 0.0 GB .*: save the adapters alone"):
        engine.module.state_dict()
    monkeypatch.undo()
    adapters = peft.load_peft_weights(str(tmp_path / "adapter"))
    assert adapters and all("lora_" in name for name in adapters)
    module = engine.module
    engine.destroy()
    assert all(torch.equal(value, expected[name]) for name, value in weights(module).items())
    masters = [p for group in engine.optimizer.param_groups for p in group["params"]]
    assert all(p.dtype is torch.bfloat16 for p in masters), "the optimizer has its own parameters again"
