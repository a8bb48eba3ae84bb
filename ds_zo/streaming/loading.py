"""Loading without a second copy of the model: parameters on the meta device, with a source that reads them one by
one."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn

from ds_zo.streaming.units import PlacedParameter
from ds_zo.versions import dtype_without_request

_SOURCE = "_ds_zo_source"
Source = Callable[[str], torch.Tensor]
"""Returns a parameter's value for its name."""


def attach_source(module: nn.Module, source: Source) -> None:
    """Attaches a source of values to a module with parameters on the meta device. An engine reads it when it stores the
    parameters."""
    object.__setattr__(module, _SOURCE, source)


def read_all(module: nn.Module) -> None:
    """Reads the meta parameters of a module with a source into host memory, for an engine that moves the whole module.
    Parameters stay the same Python objects."""
    source: Source | None = getattr(module, _SOURCE, None)
    if source is None:
        return
    for name, p in module.named_parameters():
        if p.is_meta:
            value = nn.Parameter(source(name).to(p.dtype), requires_grad=p.requires_grad)
            torch._C._swap_tensor_impl(p, value)  # as in Unit.leave_meta


def reader_of(module: nn.Module) -> Callable[[PlacedParameter], torch.Tensor]:
    """A function that returns each parameter's value: from memory, or from the attached source if the parameter is on
    the meta device."""
    source: Source | None = getattr(module, _SOURCE, None)

    def read(placed: PlacedParameter) -> torch.Tensor:
        if not placed.parameter.is_meta:
            return placed.parameter.data
        if source is None:
            raise ValueError(
                f"parameter {placed.name} is on the meta device and the model has no source of its value: load the "
                "model with ds_zo.load_pretrained, or call ds_zo.streaming.loading.attach_source"
            )
        return source(placed.name)

    return read


class SafetensorsSource:
    """Reads tensors by name from a folder with `model.safetensors` or an index and its shards."""

    def __init__(self, folder: Path) -> None:
        index = folder / "model.safetensors.index.json"
        single = folder / "model.safetensors"
        if index.exists():
            self._file_of = {name: folder / file for name, file in json.loads(index.read_text())["weight_map"].items()}
        elif single.exists():
            with safe_open(single, framework="pt") as file:
                self._file_of = dict.fromkeys(file.keys(), single)
        else:
            raise FileNotFoundError(f"{folder} has neither model.safetensors nor model.safetensors.index.json")

    def names(self) -> set[str]:
        return set(self._file_of)

    def header(self, name: str) -> tuple[str, tuple[int, ...]]:
        """A tensor's dtype, as safetensors names it, and its shape, without reading its values."""
        with safe_open(self._file_of[name], framework="pt") as file:
            found = file.get_slice(name)
            return found.get_dtype(), tuple(found.get_shape())

    def __call__(self, name: str) -> torch.Tensor:
        with safe_open(self._file_of[name], framework="pt") as file:
            tensor: torch.Tensor = file.get_tensor(name)
            return tensor


def load_pretrained(
    auto_class: Any, name_or_path: str, *, dtype: torch.dtype | None = None, **kwargs: Any
) -> nn.Module:
    """Loads a pretrained model whose weights `deepspeed.initialize` reads directly into the host store.

    `auto_class` is one of transformers' Auto classes, or a model's own class.

    This needs a folder of safetensors with the model's own parameter names. All other models (Hub names not on disk,
    checkpoints that transformers converts while loading) are loaded by `from_pretrained`. `deepspeed.initialize` then
    frees their weights unit by unit as it stores them.
    """
    from accelerate import init_empty_weights
    from transformers import AutoConfig, GenerationConfig

    folder = Path(name_or_path)
    if folder.is_dir() and not kwargs:
        try:
            source = SafetensorsSource(folder)
        except FileNotFoundError:
            source = None
        if source is not None:
            config = AutoConfig.from_pretrained(name_or_path)
            make = getattr(auto_class, "from_config", None) or auto_class._from_config
            with init_empty_weights(include_buffers=False):
                model: nn.Module = make(config, dtype=dtype or dtype_without_request(config) or torch.float32)
            model.tie_weights()  # type: ignore[operator]
            if {name for name, _ in model.named_parameters()} <= source.names():
                model.eval()
                for name, buffer in model.named_buffers():
                    if name in source.names():
                        buffer.copy_(source(name))
                if (folder / "generation_config.json").exists():
                    model.generation_config = GenerationConfig.from_pretrained(name_or_path)  # type: ignore[assignment]
                attach_source(model, source)
                return model
    loaded: nn.Module = auto_class.from_pretrained(name_or_path, dtype=dtype, **kwargs)
    return loaded
