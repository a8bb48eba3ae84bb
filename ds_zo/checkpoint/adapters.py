"""Maps the parameter names of a PEFT model to those of its base model and of its adapter.

A checkpoint holds one model with its adapters inside. `from_pretrained` loads the base model without them, and
`PeftModel.from_pretrained` loads the adapters from another folder.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from ds_zo.checkpoint.errors import CheckpointError
from ds_zo.config.json_text import parse_json

FILE = "peft.json"
CONFIG_FILE = "adapter/adapter_config.json"
WEIGHTS_FILE = "adapter/adapter_model.safetensors"
ROOT = "base_model.model."
_WRAPPED = (".base_layer.", ".original_module.")
_COPIED = ".modules_to_save."
_MAGNITUDE = ".lora_magnitude_vector"


def base_of(module: nn.Module) -> nn.Module:
    """The model that PEFT wrapped, or `module` itself."""
    wrapped = hasattr(module, "peft_config") and hasattr(module, "get_base_model")
    base: nn.Module = module.get_base_model() if wrapped else module  # type: ignore[operator]
    return base


def description(module: nn.Module) -> dict[str, bytes]:
    """The file, by name, that `Adapters.read` reads; empty unless `module` is a PEFT model."""
    configs: Any = getattr(module, "peft_config", None)
    if base_of(module) is module or not isinstance(configs, Mapping):
        return {}
    prefix = getattr(getattr(module, "base_model", None), "prefix", None)
    content = {"prefix": prefix, "adapters": {name: config.to_dict() for name, config in configs.items()}}
    return {FILE: json.dumps(content, indent=1, default=_plain).encode()}


def settings(module: nn.Module) -> dict[str, str]:
    """The settings of PEFT that determine what the adapters compute with given weights, by adapter and name."""
    found = description(module)
    return _settings(found[FILE].decode()) if found else {}


def changed_settings(saved: str, module: nn.Module) -> dict[str, tuple[str, str]]:
    """The saved and the present value of each setting that differs. `saved`: the text of a checkpoint's `FILE`.
    Settings that one version of PEFT lacks are not compared."""
    there, here = _settings(saved), settings(module)
    return {name: (there[name], here[name]) for name in there if name in here and there[name] != here[name]}


def _settings(text: str) -> dict[str, str]:
    adapters: Mapping[str, Mapping[str, Any]] = json.loads(text)["adapters"]
    return {
        f"{adapter}.{name}": json.dumps(value, sort_keys=True)
        for adapter, config in adapters.items()
        for name, value in config.items()
        if name not in _WITHOUT_EFFECT
    }


_WITHOUT_EFFECT = {
    *("auto_mapping", "base_model_name_or_path", "inference_mode", "peft_version", "revision", "task_type"),
    *("exclude_modules", "layers_pattern", "layers_to_transform", "modules_to_save", "target_modules"),
    *("target_parameters", "trainable_token_indices", "layer_replication"),
    *("init_lora_weights", "init_weights", "corda_config", "eva_config", "loftq_config", "lora_ga_config"),
}
"""Settings that are paths, that choose parameters, which are compared by name, or that give them their first values."""


def _plain(value: Any) -> Any:
    return sorted(value) if isinstance(value, (set, frozenset)) else str(value)


@dataclass(frozen=True)
class Adapters:
    """Tells, by the name of a parameter, whether it belongs to the adapter or to the base model."""

    prefix: str
    """Beginning of the parameter names of this kind of adapter."""
    adapter: str
    """Name of the adapter."""
    config: str
    """The adapter's config as JSON."""

    @classmethod
    def read(cls, text: str | None) -> Adapters | None:
        if text is None:
            return None
        content = parse_json(text)
        configs = content["adapters"]
        remedy = "load the checkpoint into an engine and call save_pretrained there"
        if not content["prefix"]:
            kinds = sorted({str(config.get("peft_type")) for config in configs.values()})
            raise CheckpointError(
                "an export needs adapters inside the model's layers, which are told from the model by name, got "
                f"{', '.join(kinds)}: {remedy}"
            )
        if len(configs) > 1:
            raise CheckpointError(f"an export holds one adapter, got {', '.join(configs)}: {remedy}")
        ((adapter, config),) = configs.items()
        return cls(content["prefix"], adapter, json.dumps(config, indent=1))

    def place(self, name: str) -> tuple[bool, str]:
        """Whether a parameter belongs to the adapter, and its name in the adapter or in the base model."""
        copied = f"{_COPIED}{self.adapter}."
        if copied in name:
            return True, name.replace(copied, ".", 1)
        owner, _, rest = name.partition(f".{self.prefix}")
        part, _, end = rest.partition(f".{self.adapter}")
        if rest and "." not in part and (not end or end.startswith(".")):
            found = f"{owner}.{self.prefix}{part}"
            return True, found if found.endswith(_MAGNITUDE) else found + end
        plain = name.removeprefix(ROOT)
        for wrapped in _WRAPPED:
            plain = plain.replace(wrapped, ".", 1)
        return False, plain
