"""Experts that are decoded in groups compute what transformers computes with all of them, and LoRA on them what PEFT
does."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from torch import nn

from ds_zo.planner import plan
from ds_zo.streaming import budget
from tests.helpers.adapter_runs import adapter_json, assert_moved, assert_same, batches, peft, run, run_plain, start
from tests.helpers.adapter_runs import train as train_engine
from tests.helpers.tiny_models import VOCAB
from tests.helpers.weights import assert_close, weights

pytestmark = pytest.mark.usefixtures("single_process")

_SIZE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "head_dim": 16,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 32,
    **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id")),
}
CONFIGS = {
    "mixtral": lambda: hf.MixtralConfig(num_local_experts=5, **_SIZE),
    "qwen3": lambda: hf.Qwen3MoeConfig(num_experts=5, moe_intermediate_size=32, **_SIZE),
    "gpt-oss": lambda: hf.GptOssConfig(num_local_experts=5, **_SIZE),
}
"""gpt-oss has transposed weights, biases, interleaved gates and an activation of its own."""
ROUNDING = 1e-4
"""A hundredth of AdamW's first step, which divides gradients by their magnitude."""
STACK_NBYTES = 64 * 64 * 4
"""The larger matrix of an expert in float32."""


@pytest.fixture(autouse=True)
def groups_of_two(monkeypatch: pytest.MonkeyPatch) -> None:
    """The five experts are in groups of two, two and one."""
    monkeypatch.setattr(budget, "GROUP_NBYTES", 2 * STACK_NBYTES)


def base_of(kind: str, *, function: str = "grouped_mm") -> Any:
    torch.manual_seed(0)
    model: Any = hf.AutoModelForCausalLM.from_config(CONFIGS[kind](), experts_implementation=function).train()
    with torch.no_grad():
        for name, p in model.named_parameters():
            if any(word in name for word in ("experts", "router", "mlp.gate")):
                p.normal_(std=0.2)
    return model


def adapted(base: nn.Module, *, experts: bool = True) -> Any:
    """LoRA on attention, and on the experts. Adapters differ from zero."""
    stacks = ["experts.gate_up_proj", "experts.down_proj"] if experts else None
    torch.manual_seed(1)
    config = peft.LoraConfig(
        r=3, lora_alpha=6, target_modules=["q_proj", "v_proj"], target_parameters=stacks, init_lora_weights=False
    )
    return peft.get_peft_model(base, config).train()


def decoded(kind: str, form: str, *, function: str = "grouped_mm", dtype: torch.dtype = torch.float32) -> Any:
    """The base with the values that a format stores."""
    more = {"bf16": {"enabled": dtype is torch.bfloat16}}
    engine = start(adapted(base_of(kind).to(dtype), experts=False), adapter_json(frozen_dtype=form, **more))
    stored = {name.replace(".base_layer", ""): value for name, value in weights(engine.module).items()}
    engine.destroy()
    base = base_of(kind, function=function).to(dtype)
    base.load_state_dict({n: stored[f"base_model.model.{n}"] for n in base.state_dict()})
    return base


@pytest.mark.parametrize(("kind", "form"), [("mixtral", "nf4"), ("qwen3", "nf4_nested"), ("gpt-oss", "nf4")])
def test_runs_equal_those_over_decoded_values(kind: str, form: str) -> None:
    data = batches(2)
    expected = run_plain(adapted(decoded(kind, form), experts=False), data)
    model = adapted(base_of(kind), experts=False)
    for options in ({}, {"resident_blocks": 2}, {"tiles": 1, "device_memory_gb": 1e-3}):
        assert_same(run(model, data, frozen_dtype=form, gradient_clipping=0.0, **options), expected)
    tiled = run(model, data, frozen_dtype=form, gradient_clipping=0.0, tiles=2)
    assert_close(tiled[1], expected[1], atol=ROUNDING)


@pytest.mark.parametrize("kind", CONFIGS)
def test_adapters_of_experts_equal_those_of_peft(kind: str) -> None:
    data = batches(2)
    model = adapted(base_of(kind))
    ours = run(model, data, frozen_dtype="nf4", gradient_clipping=0.0)
    assert_moved(model, ours[1] | {n: p for n, p in model.named_parameters() if not p.requires_grad})
    for function in ("grouped_mm", "eager", "batched_mm"):
        theirs = run_plain(adapted(decoded(kind, "nf4", function=function)), data)
        assert ours[0] == pytest.approx(theirs[0], rel=1e-5)
        assert_close(ours[1], theirs[1], atol=ROUNDING)


def test_adapters_in_bf16_are_as_near_to_float32_as_those_of_peft() -> None:
    def gradients(model: Any, loss: torch.Tensor, backward: Any) -> torch.Tensor:
        backward(loss)
        found = [p.grad.float().flatten() for n, p in model.named_parameters() if "experts" in n and p.requires_grad]
        return torch.cat(found)

    batch = batches(1)[0]
    theirs = adapted(decoded("qwen3", "nf4", dtype=torch.bfloat16)).bfloat16()
    exact = copy.deepcopy(theirs)
    model = adapted(base_of("qwen3").bfloat16()).bfloat16()
    engine = start(model, adapter_json(frozen_dtype="nf4", bf16={"enabled": True}))
    of_exact = gradients(exact.float(), exact(**batch).loss, torch.Tensor.backward)
    of_theirs = gradients(theirs, theirs(**batch).loss, torch.Tensor.backward)
    ours = gradients(engine.module, engine(**batch).loss, engine.backward)
    engine.destroy()
    assert (ours - of_exact).norm() <= (of_theirs - of_exact).norm()


def test_saved_adapters_resume_generate_and_load_in_peft(tmp_path: Path) -> None:
    data, prompt = batches(3), batches(1)[0]["input_ids"][:, :4]
    engine = start(adapted(base_of("gpt-oss")), adapter_json(frozen_dtype="nf4"))
    before = weights(engine.module)
    first = train_engine(engine, data[:2])
    engine.save_checkpoint(str(tmp_path / "checkpoint"))
    engine.module.save_pretrained(tmp_path / "adapter")
    said = engine.module.eval().generate(input_ids=prompt, max_new_tokens=4, do_sample=False)
    assert_moved(engine.module, before)
    with engine.module.disable_adapter(), torch.no_grad():
        plain_logits = engine(prompt).logits
    engine.module.train()
    last = train_engine(engine, data[2:])
    engine.destroy()

    base = decoded("gpt-oss", "nf4")
    with torch.no_grad():
        assert torch.equal(base(prompt).logits, plain_logits)
    loaded = peft.PeftModel.from_pretrained(base, tmp_path / "adapter").eval()
    assert torch.equal(loaded.generate(input_ids=prompt, max_new_tokens=4, do_sample=False), said)

    again = start(adapted(base_of("gpt-oss")), adapter_json(frozen_dtype="nf4"))
    again.load_checkpoint(str(tmp_path / "checkpoint"))
    assert train_engine(again, data[2:]) == last != first[-1:]
    again.destroy()


def test_runs_and_plans_decode_one_group_of_experts(tmp_path: Path) -> None:
    base = base_of("qwen3").bfloat16()
    base.save_pretrained(tmp_path)
    engine = start(adapted(base), adapter_json(frozen_dtype="nf4", bf16={"enabled": True}))
    scratch = engine.backend.startup_summary().device_bytes["scratch"]
    engine.destroy()
    attention = 2 * 64 * (64 + 64 + 32 + 32)
    assert scratch == attention + 3 * STACK_NBYTES // 2  # two groups of three and two experts, in two bytes a weight
    planned = plan(str(tmp_path), seq=8, backends=["adapter"], stream={"frozen_dtype": "nf4"}, offload=True)
    assert planned["adapter"].device["scratch"] == scratch and "experts in groups" in planned["adapter"].setting


def test_layers_of_other_classes_are_decoded_whole(caplog: pytest.LogCaptureFixture) -> None:
    """The forward of one layer was replaced by a user."""
    model, data = adapted(base_of("qwen3"), experts=False), batches(1)
    expected = run(model, data, frozen_dtype="nf4")
    for layer in model.base_model.model.model.layers:
        layer.mlp.experts.forward = layer.mlp.experts.forward
    caplog.clear()
    assert_same(run(model, data, frozen_dtype="nf4"), expected)
    assert "3 other stacks of experts are decoded whole" in caplog.text
