"""Models of published shapes with random weights, made without a second copy."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ds_zo.streaming.loading import attach_source

OPT = {
    # name: (layers, hidden size, heads, word_embed_proj_dim)
    "opt-125m": (12, 768, 12, 768),
    "opt-350m": (24, 1024, 16, 512),
    "opt-1.3b": (24, 2048, 32, 2048),
    "opt-2.7b": (32, 2560, 32, 2560),
    "opt-6.7b": (32, 4096, 32, 4096),
    "opt-13b": (40, 5120, 40, 5120),
    "opt-30b": (48, 7168, 56, 7168),
    "opt-66b": (64, 9216, 72, 9216),
    "opt-175b": (96, 12288, 96, 12288),
}


def config_of(shape: str, *, num_layers: int | None = None, max_length: int = 2048) -> Any:
    """The transformers config of a shape such as `opt-6.7b`; `num_layers` cuts its depth."""
    from transformers import OPTConfig

    if shape not in OPT:
        raise ValueError(f"unknown shape {shape!r}; there are {', '.join(OPT)}")
    layers, hidden, heads, projected = OPT[shape]
    return OPTConfig(
        num_hidden_layers=num_layers or layers,
        hidden_size=hidden,
        ffn_dim=4 * hidden,
        num_attention_heads=heads,
        word_embed_proj_dim=projected,
        max_position_embeddings=max_length,
        do_layer_norm_before=shape != "opt-350m",
        dropout=0.0,
        attention_dropout=0.0,
        layerdrop=0.0,
        vocab_size=50272,
    )


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
