"""Makes models to measure: published shapes with random weights and no second copy of them, folders, and Hub names."""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ds_zo.planner.models import load_config
from ds_zo.planner.shapes import RANDOM, SHAPES, config_of
from ds_zo.streaming.loading import attach_source


def config_of_model(name: str, *, num_layers: int | None = None, max_length: int = 2048) -> Any:
    """Returns the config of a `--model` argument: `random:SHAPE`, a local folder, or a Hub name. Reads no weights."""
    if name.startswith(RANDOM):
        return config_of(name.removeprefix(RANDOM), num_layers=num_layers, max_length=max_length)
    if name in SHAPES:
        raise ValueError(f"a shape has random weights: write {RANDOM}{name}, got {name} (--model)")
    if num_layers is not None:
        raise ValueError(f"only {RANDOM}SHAPE can be cut in depth, got {name} with {num_layers} layers (--layers)")
    return load_config(name, seq=max_length)


def lazy_model(
    name: str,
    *,
    dtype: torch.dtype,
    device: torch.device,
    num_layers: int | None = None,
    max_length: int = 2048,
    seed: int = 0,
) -> nn.Module:
    """Makes the model on the meta device with a source for its weights, for `deepspeed.initialize` or `materialise`."""
    config = config_of_model(name, num_layers=num_layers, max_length=max_length)
    if name.startswith(RANDOM):
        return random_model(config, dtype=dtype, device=device, seed=seed)
    from transformers import AutoModelForCausalLM

    import ds_zo

    model: nn.Module = ds_zo.load_pretrained(AutoModelForCausalLM, str(Path(name).expanduser()), dtype=dtype)
    return model


def random_model(config: Any, *, dtype: torch.dtype, device: torch.device, seed: int = 0) -> nn.Module:
    """Makes a model on the meta device whose parameters are drawn on `device` when an engine reads them.

    A value depends on seed and name alone, in any order of reading: all contenders start from the same weights.
    """
    from accelerate import init_empty_weights
    from transformers import AutoModelForCausalLM

    with init_empty_weights(include_buffers=False):
        model: nn.Module = AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.tie_weights()  # type: ignore[operator]
    shapes = {name: p.shape for name, p in model.named_parameters()}
    generator = torch.Generator(device=device)

    def draw(name: str) -> torch.Tensor:
        value = torch.empty(shapes[name], dtype=dtype, device=device)
        if value.dim() == 1:
            return value.fill_(1.0 if name.endswith(".weight") else 0.0)  # a norm's scale, or a bias
        generator.manual_seed((seed << 32) + zlib.crc32(name.encode()))
        return value.normal_(0.0, 0.02, generator=generator)

    attach_source(model, draw)
    return model


def materialise(model: nn.Module, device: torch.device | str | None = None) -> nn.Module:
    """Draws the whole model on `device`, one parameter at a time. None: on the device of the model's source."""
    source = getattr(model, "_ds_zo_source", None)
    for name, p in list(model.named_parameters()):
        if not p.is_meta or source is None:
            continue
        owner = model.get_submodule(name.rpartition(".")[0])
        value = source(name)
        value = value if device is None else value.to(device)
        setattr(owner, name.rpartition(".")[2], nn.Parameter(value, requires_grad=p.requires_grad))
    model.tie_weights()  # type: ignore[operator]
    # Moves buffers too, and weights of a Hub model that are in memory.
    return model.to(device or next(model.parameters()).device)
