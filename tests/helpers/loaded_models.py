"""Engines over models that `load_pretrained` reads."""

from __future__ import annotations

from typing import Any

import deepspeed
import pytest
import torch
from torch import nn


def zo_json(*, offload: bool = True, **more: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "ZO", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": 0, "offload_param": {"device": "cpu" if offload else "none"}},
        **more,
    }


def engine_for(model: nn.Module, config: dict[str, Any]) -> Any:
    return deepspeed.initialize(model=model, config=config)[0]


def lora_over(base: nn.Module, **settings: Any) -> Any:
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    adapters = peft.LoraConfig(**{"r": 2, "target_modules": ["q_proj"], "init_lora_weights": False, **settings})
    return peft.get_peft_model(base, adapters).train()
