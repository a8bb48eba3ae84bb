"""Models with random weights for LoRA: adapters on the linear layers of all blocks, equal weights in all blocks."""

from __future__ import annotations

import importlib.util
from functools import partial
from typing import Any

import torch
from torch import nn

from ds_zo.bench.shapes import materialise
from ds_zo.ops import nf4
from ds_zo.streaming.blocks import find_blocks
from ds_zo.streaming.loading import attach_source

_CHUNK_NUMEL = 2**24
"""Weights that are quantised at a time."""


def repeat_first_block(model: Any) -> dict[str, nf4.Quantised]:
    """Makes the model's source return the first block's matrices, quantised to NF4, for those of all blocks. Returns
    the dictionary in which it keeps them, on the GPU."""
    draw, blocks = model._ds_zo_source, list(find_blocks(model))
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    kept: dict[str, nf4.Quantised] = {}

    def read(name: str) -> Any:
        block = next((block for block in blocks if name.startswith(f"{block}.")), None)
        if block is None or len(shapes[name]) < 2:
            return draw(name)
        rest = name.removeprefix(block)
        if rest not in kept:
            chunks = [nf4.quantise(chunk) for chunk in draw(blocks[0] + rest).view(-1).split(_CHUNK_NUMEL)]
            packed, absmax = (torch.cat(planes) for planes in zip(*chunks, strict=True))
            kept[rest] = nf4.Quantised(packed, absmax, shapes[name])
        return kept[rest]

    attach_source(model, read)
    return kept


def has_peft() -> bool:
    return importlib.util.find_spec("peft") is not None


def with_lora(model: nn.Module, *, rank: int, dtype: torch.dtype, device: torch.device) -> nn.Module:
    """Adapters on all linear layers of the blocks: PEFT's, or the same operations where PEFT is not installed."""
    if has_peft():
        from peft import LoraConfig, get_peft_model

        lora = LoraConfig(r=rank, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM")
        base: Any = model
        adapted: nn.Module = get_peft_model(base, lora, autocast_adapter_dtype=False)
        return adapted
    model.requires_grad_(False)
    for m in (m for block in find_blocks(model).values() for m in block.modules() if isinstance(m, nn.Linear)):
        a = torch.empty(rank, m.in_features, dtype=dtype, device=device).normal_(0.0, m.in_features**-0.5)
        m.register_parameter("lora_A", nn.Parameter(a))
        zeros = torch.zeros(m.out_features, rank, dtype=dtype, device=device)
        m.register_parameter("lora_B", nn.Parameter(zeros))
        m.register_forward_hook(partial(_adapt, scaling=16 / rank))
    return model


def with_lora_over_4_bits(model: Any, *, rank: int, dtype: torch.dtype, device: torch.device) -> nn.Module:
    """Adapters over linear layers in NF4 by bitsandbytes, which are drawn and quantised one at a time. The model is on
    the meta device."""
    import bitsandbytes as bnb  # type: ignore[import-not-found,unused-ignore]

    layers, source = model.model.layers, model._ds_zo_source
    for name, m in [(n, m) for n, m in layers.named_modules() if isinstance(m, nn.Linear)]:
        owner, _, leaf = name.rpartition(".")
        sizes = {"input_features": m.in_features, "output_features": m.out_features, "bias": False}
        # On the meta device, or the layer would first draw float32 values on the CPU.
        new = bnb.nn.Linear4bit(**sizes, compute_dtype=dtype, quant_type="nf4", device="meta")
        new.weight = bnb.nn.Params4bit(source(f"model.layers.{name}.weight"), requires_grad=False, quant_type="nf4")
        setattr(layers.get_submodule(owner), leaf, new.to(device))
    whole: Any = materialise(model, device)
    whole.is_loaded_in_4bit = True  # PEFT chooses its adapters for bitsandbytes by it
    return with_lora(whole, rank=rank, dtype=dtype, device=device)


def _adapt(module: Any, args: tuple[torch.Tensor, ...], output: torch.Tensor, *, scaling: float) -> torch.Tensor:
    linear = nn.functional.linear
    return output + linear(linear(args[0], module.lora_A), module.lora_B) * scaling
