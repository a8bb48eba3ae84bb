"""Blocks that are decoded matrix by matrix compute what blocks that are decoded whole compute."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ds_zo.backends.adapter.matrix_decoding import EncodedParameter
from ds_zo.streaming.budget import decodes_by_matrix, decoding_nbytes
from ds_zo.streaming.placement import WIRE, plan_units
from tests.helpers.adapter_runs import adapted, adapter_json, assert_same, batches, peft, run, start, train
from tests.helpers.decoded_values import with_decoded_base
from tests.helpers.tiny_models import tiny_batch, tiny_model
from tests.helpers.weights import weights

pytestmark = pytest.mark.usefixtures("single_process")
WIDE: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 160}
"""Blocks that are large beside the embedding."""


def whole_nbytes(model: nn.Module) -> int:
    """Bytes of the decoded weights of a block."""
    return max(u.scratch_nbytes for u in plan_units(model, [], frozen_wire=WIRE["nf4"], split=False).blocks)


def tight(model: nn.Module, form: str = "nf4") -> dict[str, Any]:
    """A budget under which blocks are decoded by matrix."""
    return {"frozen_dtype": form, "device_memory_gb": 4.9 * whole_nbytes(model) / 1e9, "tiles": 1}


@pytest.mark.parametrize(
    ("method", "form"), [("lora", "nf4"), ("lora", "nf4_nested"), ("dora", "nf4"), ("prompt", "nf4")]
)
def test_runs_equal_those_over_decoded_values(method: str, form: str) -> None:
    model, data = adapted(method, **WIDE), batches(3)
    expected = run(with_decoded_base(model, form), data, offload=False)
    for options in ({}, {"resident_blocks": 1, "offload_activations": True}, {"resident_blocks": 3}):
        assert_same(run(model, data, **tight(model, form), **options), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_runs_equal_those_of_whole_blocks(dtype: torch.dtype) -> None:
    model, data = adapted("rslora", dtype=dtype, **WIDE), batches(3)
    more: dict[str, Any] = {"bf16" if dtype is torch.bfloat16 else "fp16": {"enabled": True}}
    assert_same(run(model, data, **tight(model), **more), run(model, data, frozen_dtype="nf4", **more))


def test_random_runs_equal_those_of_whole_blocks() -> None:
    for case in range(3):
        rng = random.Random(case)
        name = rng.choice(["llama", "qwen2", "gpt2", "opt", "gpt-neox", "bloom"])
        size = {"n_embd": 32} if name == "gpt2" else {"hidden_size": 32}
        torch.manual_seed(case)
        config = peft.LoraConfig(
            r=rng.choice([1, 4]),
            target_modules="all-linear",
            use_dora=rng.random() < 0.4 and name != "gpt2",
            lora_dropout=rng.choice([0.0, 0.2]),
            bias=rng.choice(["none", "all"]),
        )
        model = peft.get_peft_model(tiny_model(name, **size), config).train()
        data = [tiny_batch(name, seed=i, batch_size=2, length=8) for i in range(3)]
        more: dict[str, Any] = {
            "resident_blocks": rng.choice([0, 2]),
            "gradient_accumulation_steps": rng.choice([1, 3]),
        }
        expected = run(model, data, frozen_dtype="nf4", **more)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("ds_zo.backends.adapter.streamed.decodes_by_matrix", lambda *_, **__: True)
            assert_same(run(model, data, frozen_dtype="nf4", **more), expected)


class _Marked(nn.Parameter):
    """A user's subclass."""


def test_a_subclass_of_parameter_keeps_its_class() -> None:
    model, data = adapted(**WIDE), batches(2)
    expected = run(with_decoded_base(model, "nf4"), data, offload=False)
    model.base_model.model.model.layers[1].self_attn.o_proj.weight.__class__ = _Marked
    ours = run(model, data, **tight(model))
    assert_same(ours, expected)


def test_scratch_holds_one_matrix_and_the_log_says_so() -> None:
    model = adapted(**WIDE)
    engine = start(model, adapter_json(**tight(model)))
    summary = engine.backend.startup_summary()
    assert summary.device_bytes["scratch"] == 64 * 160 * 4 < whole_nbytes(model) // 3
    assert "stored as float32/nf4 and decoded matrix by matrix" in summary.weights
    engine.destroy()


def test_after_a_step_parameters_are_plain_and_show_the_stored_values() -> None:
    model = adapted(**WIDE)
    engine = start(model, adapter_json(**tight(model)))
    before = weights(engine.module)
    train(engine, batches(1))
    assert not any(isinstance(p, EncodedParameter) for p in model.parameters())
    frozen = {n for n, p in model.named_parameters() if not p.requires_grad}
    assert all(torch.equal(p, before[n]) for n, p in model.named_parameters() if n in frozen)
    assert all(torch.equal(value, before[n]) for n, value in weights(engine.module).items() if n in frozen)
    plain = with_decoded_base(adapted(**WIDE), "nf4").state_dict()
    assert all(torch.equal(value, plain[n]) for n, value in before.items() if n in frozen)


def test_reads_inside_a_block_get_copies() -> None:
    """A function whose result may share memory with the weight, and one of several weights."""
    model = adapted(**WIDE)
    plain = with_decoded_base(model, "nf4")
    engine = start(model, adapter_json(**tight(model)))
    store = engine.backend.blocks.store
    unit = store.placement.blocks[0]
    with engine.backend.plain_parameters(), engine.backend.blocks.use(unit):
        attention = model.base_model.model.model.layers[0].self_attn
        query, out = attention.q_proj.base_layer.weight, attention.o_proj.weight
        first, second = query.t(), out.detach()
        both = torch.cat([query, out])
        product = query @ out
        x = torch.ones(3, 64)
        kept = F.linear(x, query)
        F.linear(x, out)
    theirs = plain.base_model.model.model.layers[0].self_attn
    weight, other = theirs.q_proj.base_layer.weight, theirs.o_proj.weight
    assert torch.equal(first, weight.t()) and torch.equal(second, other)
    assert torch.equal(both, torch.cat([weight, other])) and torch.equal(product, weight @ other)
    assert torch.equal(kept, F.linear(x, weight))
    engine.destroy()


def test_which_blocks_are_decoded_by_matrix() -> None:
    """Matrices in nf4, where those of a block take more than a fifth of the memory. A stack of experts never is."""
    for name, form, share, found in (
        ("llama", "nf4", 4.9, True),
        ("llama", "nf4", 5.1, False),
        ("llama", "nf4_nested", 4.9, True),
        ("llama", "fp8", 4.9, False),
        ("mixtral", "nf4", 4.9, False),
    ):
        model = tiny_model(name)
        placement = plan_units(model, [], frozen_wire=WIRE[form], split=False)
        whole = decoding_nbytes(placement, by_matrix=False)
        assert decodes_by_matrix(placement, budget_nbytes=int(share * whole)) is found, (name, form, share)
        assert not decodes_by_matrix(placement, budget_nbytes=None)
