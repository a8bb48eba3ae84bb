"""Adapters on a GPU: placements give the same bits, inputs of blocks on the host save device memory."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from ds_zo.streaming import budget
from tests.helpers.adapter_runs import adapted, adapter_json, assert_same, peft, run, start
from tests.helpers.tiny_models import tiny_batch, tiny_model

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("single_process")]
SIZES = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 6, "max_position_embeddings": 2048}


@pytest.mark.parametrize("form", ["auto", "nf4", "nf4_nested", "fp8"])
def test_placements_give_the_same_bits(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Large weights and few tokens: a copy that a kernel does not wait for would show."""
    model = adapted("rslora", dtype=torch.bfloat16, **SIZES)
    data = [tiny_batch("llama", seed=i, batch_size=1, length=8) for i in range(6)]
    more: dict[str, Any] = {"bf16": {"enabled": True}, "frozen_dtype": form}
    expected = run(model, data, resident_blocks=6, **more)
    for options in ({"resident_blocks": 0}, {"resident_blocks": 2, "device_slots": 3}, {}):
        assert_same(run(model, data, **options, **more), expected)
    assert_same(run(model, data, resident_blocks=0, offload_activations=True, **more), expected)
    if form.startswith("nf4"):
        monkeypatch.setattr("ds_zo.backends.adapter.streamed.decodes_by_matrix", lambda *_, **__: True)
        for options in ({"resident_blocks": 0}, {"resident_blocks": 2, "device_slots": 3}, {}):
            assert_same(run(model, data, **options, **more), expected)


@pytest.mark.parametrize("group_nbytes", [1, budget.GROUP_NBYTES])
@pytest.mark.parametrize("rank", [4, 16])
def test_placements_of_experts_give_the_same_bits(
    rank: int, group_nbytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(budget, "GROUP_NBYTES", group_nbytes)
    stacks = ["experts.gate_up_proj", "experts.down_proj"]
    torch.manual_seed(0)
    adapters = peft.LoraConfig(r=rank, target_modules=["q_proj"], target_parameters=stacks, init_lora_weights=False)
    model = peft.get_peft_model(tiny_model("mixtral", **SIZES).bfloat16(), adapters).bfloat16().train()
    data = [tiny_batch("llama", seed=i, batch_size=2, length=64) for i in range(4)]
    more: dict[str, Any] = {"bf16": {"enabled": True}, "frozen_dtype": "nf4"}
    expected = run(model, data, resident_blocks=6, **more)
    for options in ({"resident_blocks": 0}, {"resident_blocks": 2, "device_slots": 3}):
        assert_same(run(model, data, **options, **more), expected)


def test_inputs_on_the_host_save_device_memory() -> None:
    model = adapted("rslora", dtype=torch.bfloat16, **{**SIZES, "num_hidden_layers": 24})
    batch = {name: value.cuda() for name, value in tiny_batch("llama", batch_size=8, length=1024).items()}
    peaks, losses = [], []
    for on_host in (False, False, True):
        config = adapter_json(bf16={"enabled": True}, resident_blocks=0, offload_activations=on_host)
        engine = start(copy.deepcopy(model), config)
        with sdpa_kernel(SDPBackend.MATH):  # other kernels add in any order in the backward pass
            for _ in range(3):
                torch.cuda.reset_peak_memory_stats()
                loss = engine(**batch).loss
                engine.backward(loss)
                engine.step()
        losses.append(loss.item())
        peaks.append(torch.cuda.max_memory_allocated())
        engine.destroy()
    input_nbytes = 8 * 1024 * 512 * 2
    assert losses[0] == losses[1], "the same run twice"
    assert losses[1] == losses[2]
    assert peaks[1] - peaks[2] > 18 * input_nbytes, [peak / 1e6 for peak in peaks]
