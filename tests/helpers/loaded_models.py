"""Engines over models that `load_pretrained` reads."""

from __future__ import annotations

import json
from typing import Any

import deepspeed
import pytest
import torch
from torch import nn

from ds_zo.ops import nested, nf4

BITSANDBYTES = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
"""`quantization_config` of a model that bitsandbytes has quantised."""


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


def bitsandbytes_tensors(
    name: str, value: torch.Tensor, *, nests: bool
) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """The tensors of a matrix in NF4 as bitsandbytes saves it, and its values. `nests`: with double quantisation."""
    packed, absmax = nf4.quantise(value)
    state = {"quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": list(value.shape)}
    found = {name: packed[:, None], f"{name}.absmax": absmax, f"{name}.quant_map": nf4.CODE.clone()}
    quantised = nf4.Quantised(packed, absmax, tuple(value.shape))
    if nests:
        row = nested.encode(absmax)
        offset, *largest = row[: 4 + 4 * -(-len(absmax) // 256)].view(torch.float32).tolist()
        state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": offset}
        found[f"{name}.absmax"] = row[4 + 4 * len(largest) :][: len(absmax)].clone()
        found |= {f"{name}.nested_absmax": torch.tensor(largest), f"{name}.nested_quant_map": nested.CODE.clone()}
        quantised = nested.NestedValues(packed, row[None], tuple(value.shape))
    found[f"{name}.quant_state.bitsandbytes__nf4"] = torch.tensor(list(json.dumps(state).encode())).byte()
    return found, quantised.values()
