"""Adapters over a frozen base: engines of the backend `adapter`, and the same run as a plain PEFT loop."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import deepspeed
import pytest
import torch
from torch import nn

from tests.helpers.lomo_runs import train
from tests.helpers.tiny_models import tiny_batch, tiny_model
from tests.helpers.weights import assert_equal, weights

peft = pytest.importorskip("peft")
LR = 1e-2
TARGETS = ["q_proj", "v_proj", "down_proj"]
METHODS: dict[str, Callable[[], Any]] = {
    "lora": lambda: peft.LoraConfig(r=2, lora_alpha=4, target_modules=TARGETS, lora_dropout=0.1),
    "rslora": lambda: peft.LoraConfig(r=4, lora_alpha=4, target_modules=TARGETS, use_rslora=True),
    "dora": lambda: peft.LoraConfig(r=2, lora_alpha=4, target_modules=TARGETS, use_dora=True),
    "prompt": lambda: peft.PromptTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM"),
    "wide": lambda: peft.LoraConfig(r=64, target_modules="all-linear"),
}
"""`wide` has more trained parameters in a block than frozen ones."""


def adapted(
    method: str = "lora", *, dtype: torch.dtype = torch.float32, seed: int = 0, name: str = "llama", **overrides: Any
) -> Any:
    """A tiny model with adapters that differ from zero."""
    base = tiny_model(name, **overrides).to(dtype)
    torch.manual_seed(seed)
    model = peft.get_peft_model(base, METHODS[method]())
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "lora_B" in name:
                p.normal_(std=0.05)
    return model.to(dtype).train()


def batches(num: int, *, seed: int = 0) -> list[dict[str, torch.Tensor]]:
    return [tiny_batch("llama", seed=seed + i, batch_size=2, length=8) for i in range(num)]


def adapter_json(*, offload: bool = True, own: bool = True, **more: Any) -> dict[str, Any]:
    """Keys of `stream` are passed by name; anything else is a top-level key. `own`: the script makes its optimizer."""
    stream_keys = (
        *("resident_blocks", "device_slots", "device_memory_gb"),
        *("blocks", "frozen_dtype", "offload_activations", "tiles"),
    )
    stream = {name: more.pop(name) for name in stream_keys if name in more}
    json = {
        "train_micro_batch_size_per_gpu": 2,
        "steps_per_print": 1000,
        "zero_optimization": {"stage": 0, "offload_param": {"device": "cpu" if offload else "none"}},
        "ds_zo": {"backend": "adapter", "stream": stream},
        **more,
    }
    if not own:
        json["optimizer"] = {"type": "AdamW", "params": {"lr": LR, "weight_decay": 0.1}}
    return json


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=LR, weight_decay=0.1)


def start(model: nn.Module, json: dict[str, Any] | None = None, **arguments: Any) -> Any:
    json = json or adapter_json()
    if "optimizer" not in json:
        arguments.setdefault("optimizer", optimizer_of(model))
    else:
        arguments.setdefault("model_parameters", list(model.parameters()))
    return deepspeed.initialize(model=model, config=json, **arguments)[0]


def run(model: nn.Module, data: Sequence[dict[str, torch.Tensor]], **options: Any) -> tuple[Any, Any]:
    """Losses, and the weights at the end."""
    engine = start(copy.deepcopy(model), adapter_json(**options))
    torch.manual_seed(7)
    losses = train(engine, data)
    found = weights(engine.module)
    engine.destroy()
    return losses, found


def run_plain(
    model: nn.Module,
    data: Sequence[dict[str, torch.Tensor]],
    *,
    accumulation: int = 1,
    clipping: float = 0.0,
    schedule: Callable[[torch.optim.Optimizer], Any] | None = None,
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """The loop of PEFT's documentation. Losses, and the weights at the end."""
    model = copy.deepcopy(model)
    model.config.use_cache = False
    optimizer = optimizer_of(model)
    scheduler = None if schedule is None else schedule(optimizer)
    torch.manual_seed(7)
    losses = []
    for i, batch in enumerate(data, 1):
        loss = model(**batch).loss
        (loss / accumulation).backward()
        losses.append(loss.item())
        if i % accumulation:
            continue
        if clipping:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clipping)
        optimizer.step()
        optimizer.zero_grad()
        if scheduler is not None:
            scheduler.step()
    return losses, weights(model)


def assert_same(ours: tuple[Any, Any], theirs: tuple[Any, Any]) -> None:
    """Losses and weights are equal bit for bit."""
    assert ours[0] == theirs[0]
    assert_equal(ours[1], theirs[1])


def assert_moved(model: nn.Module, end: dict[str, torch.Tensor]) -> None:
    """Trained parameters have changed, and no other."""
    for name, p in model.named_parameters():
        assert torch.equal(p, end[name]) is not p.requires_grad, name
