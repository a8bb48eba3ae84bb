"""Models of published shapes with random weights, made without a second copy."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ds_zo.planner.shapes import BLOOM, GPT2, LLAMA, OPT, SHAPES, config_of
from ds_zo.streaming.loading import attach_source

__all__ = ["BLOOM", "GPT2", "LLAMA", "OPT", "SHAPES", "config_of", "materialise", "random_model"]


def random_model(config: Any, *, dtype: torch.dtype, device: torch.device, seed: int = 0) -> nn.Module:
    """A model on the meta device whose parameters are drawn on `device` when an engine reads them."""
    from accelerate import init_empty_weights
    from transformers import AutoModelForCausalLM

    with init_empty_weights(include_buffers=False):
        model: nn.Module = AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.tie_weights()  # type: ignore[operator]
    shapes = {name: p.shape for name, p in model.named_parameters()}
    generator = torch.Generator(device=device).manual_seed(seed)

    def draw(name: str) -> torch.Tensor:
        value = torch.empty(shapes[name], dtype=dtype, device=device)
        if value.dim() == 1:
            return value.fill_(1.0 if name.endswith("norm.weight") else 0.0)
        return value.normal_(0.0, 0.02, generator=generator)

    attach_source(model, draw)
    return model


def materialise(model: nn.Module) -> nn.Module:
    """The whole model on the device its source draws on: for contenders that hold it in memory."""
    source = model._ds_zo_source  # type: ignore[union-attr]
    for name, p in list(model.named_parameters()):
        owner = model.get_submodule(name.rpartition(".")[0])
        setattr(owner, name.rpartition(".")[2], nn.Parameter(source(name), requires_grad=p.requires_grad))  # type: ignore[operator]
    model.tie_weights()  # type: ignore[operator]
    return model
