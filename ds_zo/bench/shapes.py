"""Models to measure: published shapes with random weights made without a second copy, folders, and Hub names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from ds_zo.streaming.loading import attach_source

OPT = {
    # name: (layers, hidden size, heads, word_embed_proj_dim)
    "opt-tiny": (2, 64, 4, 64),
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
LLAMA = {
    # name: (layers, hidden size, intermediate size, heads)
    "llama-tiny": (2, 64, 176, 4),
    "llama-125m": (12, 768, 2048, 12),
    "llama-350m": (24, 1024, 2736, 16),
    "llama-1.3b": (24, 2048, 5504, 16),
    "llama-3b": (26, 3200, 8640, 32),
    "llama-7b": (32, 4096, 11008, 32),
    "llama-13b": (40, 5120, 13824, 40),
    "llama-30b": (60, 6656, 17920, 52),
    "llama-65b": (80, 8192, 22016, 64),
}
BLOOM = {
    # name: (layers, hidden size, heads)
    "bloom-tiny": (2, 64, 4),
    "bloom-560m": (24, 1024, 16),
    "bloom-7b1": (30, 4096, 32),
    "bloom-176b": (70, 14336, 112),
}
SHAPES = (*OPT, *LLAMA, *BLOOM)
TINY_VOCABULARY = 512
RANDOM = "random:"


def config_of(shape: str, *, num_layers: int | None = None, max_length: int = 2048) -> Any:
    """The transformers config of a shape such as `opt-6.7b`; `num_layers` cuts its depth."""
    from transformers import BloomConfig, LlamaConfig, OPTConfig

    def vocabulary(size: int) -> int:
        return TINY_VOCABULARY if shape.endswith("tiny") else size

    if shape in OPT:
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
            vocab_size=vocabulary(50272),
        )
    if shape in LLAMA:
        layers, hidden, intermediate, heads = LLAMA[shape]
        return LlamaConfig(
            num_hidden_layers=num_layers or layers,
            hidden_size=hidden,
            intermediate_size=intermediate,
            num_attention_heads=heads,
            num_key_value_heads=heads,
            max_position_embeddings=max_length,
            vocab_size=vocabulary(32000),
            tie_word_embeddings=False,
        )
    if shape in BLOOM:
        layers, hidden, heads = BLOOM[shape]
        return BloomConfig(
            n_layer=num_layers or layers,
            hidden_size=hidden,
            n_head=heads,
            hidden_dropout=0.0,
            attention_dropout=0.0,
            vocab_size=vocabulary(250880),
        )
    raise ValueError(f"unknown shape {shape!r}; there are {', '.join(SHAPES)}")


def config_of_model(name: str, *, num_layers: int | None = None, max_length: int = 2048) -> Any:
    """The config of what `--model` takes: `random:SHAPE`, a local folder, or a Hub name. Reads no weights."""
    if name.startswith(RANDOM):
        return config_of(name.removeprefix(RANDOM), num_layers=num_layers, max_length=max_length)
    if name in SHAPES:
        raise ValueError(f"a shape has random weights: write {RANDOM}{name}, got {name} (--model)")
    if num_layers is not None:
        raise ValueError(f"only {RANDOM}SHAPE can be cut in depth, got {name} with {num_layers} layers (--layers)")
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(name)


def lazy_model(
    name: str,
    *,
    dtype: torch.dtype,
    device: torch.device,
    num_layers: int | None = None,
    max_length: int = 2048,
    seed: int = 0,
) -> nn.Module:
    """The model on the meta device with a source for its weights, for `deepspeed.initialize` or `materialise`."""
    config = config_of_model(name, num_layers=num_layers, max_length=max_length)
    if name.startswith(RANDOM):
        return random_model(config, dtype=dtype, device=device, seed=seed)
    from transformers import AutoModelForCausalLM

    import ds_zo

    model: nn.Module = ds_zo.load_pretrained(AutoModelForCausalLM, str(Path(name).expanduser()), dtype=dtype)
    return model


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
            return value.fill_(1.0 if name.endswith(".weight") else 0.0)  # a norm's scale, or a bias
        return value.normal_(0.0, 0.02, generator=generator)

    attach_source(model, draw)
    return model


def materialise(model: nn.Module, device: torch.device | str | None = None) -> nn.Module:
    """The whole model on `device` (default: where its source makes values), drawn one parameter at a time."""
    source = getattr(model, "_ds_zo_source", None)
    for name, p in list(model.named_parameters()):
        if not p.is_meta or source is None:
            continue
        owner = model.get_submodule(name.rpartition(".")[0])
        value = source(name)
        value = value if device is None else value.to(device)
        setattr(owner, name.rpartition(".")[2], nn.Parameter(value, requires_grad=p.requires_grad))
    model.tie_weights()  # type: ignore[operator]
    return model.to(device or next(model.parameters()).device)  # buffers, and what a Hub model had in memory
