"""Adapters in random settings, against a plain PEFT loop over the decoded base, bit for bit."""

from __future__ import annotations

import copy
import random
import tempfile
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

from ds_zo.streaming.blocks import find_blocks
from tests.helpers.adapter_runs import adapter_json, peft, start
from tests.helpers.decoded_values import decoded
from tests.helpers.tiny_models import tiny_batch, tiny_model
from tests.random.sizes import seeds

OPTIMIZERS: dict[str, Any] = {
    "adamw": lambda params: torch.optim.AdamW(params, lr=1e-2, weight_decay=0.1),
    "adam": lambda params: torch.optim.Adam(params, lr=1e-2, amsgrad=True),
    "sgd": lambda params: torch.optim.SGD(params, lr=1e-1, momentum=0.9),
}


@dataclass(frozen=True)
class Case:
    family: str
    method: str
    layers: tuple[int, ...] | None
    """Layers with adapters; None: all."""
    also_trained: bool
    """The output head is trained too."""
    form: str
    offload: bool
    resident: int
    num_slots: int
    inputs_on_host: bool
    accumulation: int
    clipping: float
    optimizer: str
    evaluates: bool
    resumes_at: int | None
    dropout: float


def draw(seed: int) -> Case:
    rng = random.Random(seed)
    offload = rng.random() < 0.85
    method = rng.choice(["lora", "lora", "rslora", "dora", "prompt"])
    return Case(
        family=rng.choice(["llama", "opt", "gpt2", "qwen2", "gpt-neox"]),
        method=method,
        layers=rng.choice([None, None, (1,), (2,), (0, 2)]) if method not in ("prompt",) else None,
        also_trained=method != "prompt" and rng.random() < 0.2,
        form=rng.choice(["auto", "nf4", "fp8"]) if offload else "auto",
        offload=offload,
        resident=rng.choice([0, 0, 1, 3]),
        num_slots=rng.choice([2, 3]),
        inputs_on_host=offload and rng.random() < 0.5,
        accumulation=rng.choice([1, 1, 2, 3]),
        clipping=rng.choice([0.0, 0.05]),
        optimizer=rng.choice(list(OPTIMIZERS)),
        evaluates=rng.random() < 0.4,
        resumes_at=rng.choice([None, 2, 3]),
        dropout=rng.choice([0.0, 0.2]),
    )


def model_of(case: Case) -> Any:
    base = tiny_model(case.family)
    torch.manual_seed(1)
    if case.method == "prompt":
        return peft.get_peft_model(base, peft.PromptTuningConfig(num_virtual_tokens=2, task_type="CAUSAL_LM")).train()
    kinds = [(n, m) for block in find_blocks(base).values() for n, m in block.named_modules()]
    linear = {n.rpartition(".")[2] for n, m in kinds if isinstance(m, nn.Linear) or type(m).__name__ == "Conv1D"}
    settings = peft.LoraConfig(
        r=3,
        target_modules=sorted(linear),
        layers_to_transform=None if case.layers is None else list(case.layers),
        lora_dropout=case.dropout,
        use_rslora=case.method == "rslora",
        use_dora=case.method == "dora",
        modules_to_save=["embed_out" if case.family == "gpt-neox" else "lm_head"] if case.also_trained else None,
    )
    return peft.get_peft_model(base, settings).train()


def decode_base(model: nn.Module, form: str) -> None:
    for block in find_blocks(model).values():
        for name, p in block.named_parameters():
            if p.dim() == 2 and not p.requires_grad and "lora" not in name:
                p.data = decoded(p.data, form)


def check(seed: int) -> None:
    case = draw(seed)
    data = [tiny_batch("llama", seed=seed + i, batch_size=2, length=8) for i in range(6)]
    plain = model_of(case)
    if case.form != "auto":
        decode_base(plain, case.form)
    plain.config.use_cache = False
    trained = [p for p in plain.parameters() if p.requires_grad]
    optimizer = OPTIMIZERS[case.optimizer](trained)
    torch.manual_seed(3)
    expected = []
    for i, batch in enumerate(data, 1):
        loss = plain(**batch).loss
        (loss / case.accumulation).backward()
        expected.append(loss.item())
        if i % case.accumulation == 0:
            if case.clipping:
                nn.utils.clip_grad_norm_(trained, case.clipping)
            optimizer.step()
            optimizer.zero_grad()

    stream = {"frozen_dtype": case.form, "resident_blocks": case.resident, "offload_activations": case.inputs_on_host}
    options = {**stream, "device_slots": case.num_slots} if case.offload else {}
    config = adapter_json(
        offload=case.offload,
        gradient_accumulation_steps=case.accumulation,
        gradient_clipping=case.clipping,
        **options,
    )

    def engine_of(model: nn.Module) -> Any:
        own = OPTIMIZERS[case.optimizer]([p for p in model.parameters() if p.requires_grad])
        return start(model, copy.deepcopy(config), optimizer=own)

    engine = engine_of(model_of(case))
    torch.manual_seed(3)
    losses = []
    for i, batch in enumerate(data):
        if case.resumes_at == i:
            with tempfile.TemporaryDirectory() as folder:
                engine.save_checkpoint(folder)
                engine.destroy()
                engine = engine_of(model_of(case))
                engine.load_checkpoint(folder)
        if case.evaluates:
            engine.eval()
            with torch.no_grad():
                engine(**data[0])
            engine.train()
        loss = engine(**batch).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    assert losses == expected
    state = engine.module.state_dict()
    for name, value in plain.state_dict().items():
        assert torch.equal(state[name], value), name
    engine.destroy()


@pytest.mark.usefixtures("single_process")
@pytest.mark.parametrize("seed", seeds(12))
def test_a_run_equals_a_plain_loop(seed: int) -> None:
    print(draw(seed))
    check(seed)
