"""Plans of mixtures of experts: each kind in transformers where `tools/random.sh` runs this, else some kinds."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest
import torch
import transformers as hf
from torch import nn

from ds_zo.cli import main
from ds_zo.planner import load_model, plan
from ds_zo.planner.models import LOW_RANK
from tests.helpers.adapter_runs import adapter_json, peft, start
from tests.helpers.live_bytes import LiveBytes
from tests.helpers.moe_configs import moe_configs

NEED_VALUES = {"jetmoe", "longcat_flash", "switch_transformers"}
"""Model types whose forward reads values, which a plan does not have."""
NUM_DRAWN = 8
"""Kinds in addition to these, drawn by DS_ZO_RANDOM_SEED. With DS_ZO_RANDOM_TIMES all kinds are planned."""


@pytest.mark.slow
def test_mixtures_of_experts_are_planned_with_adapters(tmp_path: Path) -> None:
    configs = moe_configs()
    kinds = sorted(configs)
    if "DS_ZO_RANDOM_TIMES" not in os.environ:
        draw = random.Random(int(os.environ.get("DS_ZO_RANDOM_SEED", "0")))
        kinds = [*NEED_VALUES, *draw.sample(sorted(set(kinds) - NEED_VALUES), k=NUM_DRAWN)]
    for name in kinds:
        configs[name].save_pretrained(tmp_path / name)
        model = load_model(str(tmp_path / name), batch=1, seq=16)
        if name in NEED_VALUES:
            with pytest.raises(ValueError, match="can't be planned: its forward depends on values"):
                plan(model, backends=["adapter"], checkpointing=False)
            continue
        adapter = plan(model, backends=["adapter"], checkpointing=False)["adapter"]
        layers = [m for block in model.blocks for m in block.modules() if isinstance(m, nn.Linear)]
        assert adapter.reduced_nbytes == 4 * LOW_RANK * sum(m.in_features + m.out_features for m in layers), name


def test_plans_count_adapters_of_experts(tmp_path: Path) -> None:
    moe_configs()["mixtral"].save_pretrained(tmp_path)
    plans = [plan(str(tmp_path), seq=16, backends=["adapter"], experts_rank=rank)["adapter"] for rank in (0, 3)]
    sizes = 32 + 2 * 48 + 48 + 32  # in and out of gate_up_proj and down_proj
    assert plans[1].reduced_nbytes - plans[0].reduced_nbytes == 4 * 2 * 4 * 3 * sizes  # float32, layers, experts, rank
    assert plans[1].device["states"] - plans[0].device["states"] == 8 * 2 * 4 * 3 * sizes
    with pytest.raises(ValueError, match="need a rank >= 1 and a model with stacks of experts"):
        plan("random:opt-tiny", seq=16, backends=["adapter"], experts_rank=3)


@pytest.mark.usefixtures("single_process")
@pytest.mark.parametrize("experts_rank", [0, LOW_RANK])
def test_a_streamed_mixture_takes_the_planned_memory(experts_rank: int, tmp_path: Path) -> None:
    """The gradients are in float32. With LoRA on experts, the inputs of both products are kept for its gradients."""
    rows = {"batch": 8, "seq": 128}
    size = {"hidden_size": 128, "moe_intermediate_size": 128, "vocab_size": 512, "num_hidden_layers": 3}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 32}
    config = hf.Qwen3MoeConfig(num_experts=16, num_experts_per_tok=8, **size, **heads)
    config.save_pretrained(tmp_path)
    stream = {"frozen_dtype": "nf4", "resident_blocks": 0, "offload_activations": True}
    found = plan(
        str(tmp_path), **rows, backends=["adapter"], experts_rank=experts_rank, offload=True, stream=stream
    ).estimates[0]
    planned = sum(found.device.get(part, 0) for part in ("gradients", "activations", "logits"))

    base = hf.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    stacks = ["experts.gate_up_proj", "experts.down_proj"] if experts_rank else None
    targets = ["q_proj", "k_proj", "v_proj", "o_proj"]
    lora = peft.LoraConfig(r=LOW_RANK, target_modules=targets, target_parameters=stacks)
    model = peft.get_peft_model(base, lora, autocast_adapter_dtype=False).train()
    engine = start(model, adapter_json(**stream, bf16={"enabled": True}, train_micro_batch_size_per_gpu=8))
    ids = torch.randint(0, 512, (rows["batch"], rows["seq"]))
    for _ in range(2):  # the first step makes the optimizer's states
        with LiveBytes() as live:
            engine.backward(engine(input_ids=ids, labels=ids, use_cache=False).loss)
        gradients = sum(p.grad.nbytes for p in model.parameters() if p.grad is not None)
        engine.step()
    assert found.device["gradients"] == gradients
    assert planned == pytest.approx(live.peak, rel=0.1)
    engine.destroy()


def test_a_backend_that_cannot_be_planned_is_one_row(capsys: pytest.CaptureFixture[str]) -> None:
    stream = ["--stream", '{"frozen_dtype": "mxfp4"}']  # the model has no experts
    command = ["plan", "--model", "random:opt-tiny", "--seq", "16", *stream]
    assert main(command) == 0
    shown = capsys.readouterr().out.splitlines()
    assert [line for line in shown if line.startswith("adapter ")] == []
    assert [line for line in shown if line.startswith("lomo ")] != []
    (said,) = (line for line in shown if "left out" in line)
    assert said.startswith("zo, adapter left out: frozen_dtype mxfp4") and said.endswith("take nf4 (--stream)")
    assert main([*command, "--backend", "adapter"]) == 1
