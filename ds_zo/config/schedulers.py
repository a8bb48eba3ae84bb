"""Learning-rate schedulers of DeepSpeed and torch: settings that they refuse, and the rates that they reach."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from deepspeed.runtime import lr_schedules

from ds_zo.config.base import is_number
from ds_zo.config.errors import ConfigError, Errors, shown, suggestion, type_remedy

PEAK_RATES = {
    "WarmupLR": "warmup_max_lr",
    "WarmupDecayLR": "warmup_max_lr",
    "OneCycle": "cycle_max_lr",
    "OneCycleLR": "max_lr",
    "CyclicLR": "max_lr",
}
"""The key of a scheduler's largest learning rate, for schedulers that do not scale the optimizer's."""
OTHER_RATES = ("warmup_min_lr", "cycle_min_lr", "base_lr", "eta_min", "min_lr", "lr_range_test_min_lr")
"""Keys of schedulers with smaller learning rates."""
MOMENTUM_SCHEDULERS = ("OneCycleLR", "CyclicLR")
"""Schedulers that cycle momentum too, unless `cycle_momentum` is false."""
_MODULES = (lr_schedules, torch.optim.lr_scheduler)


def check_scheduler(settings: dict[str, Any]) -> None:
    """Refuses a wrong `scheduler` block before the model is moved. DeepSpeed makes the scheduler after that."""
    name, params = settings.get("type"), settings.get("params")
    if name is None:
        return
    maker = _maker(str(name))
    if maker is None:
        known = [key for module in _MODULES for key in vars(module) if key.endswith("LR") and key[0] != "_"]
        text = f"type must be a scheduler of DeepSpeed or torch.optim.lr_scheduler, got {shown(name)}"
        raise ConfigError(f"{text}; {suggestion(str(name), known)}", at="scheduler.type")
    if not isinstance(params, dict):
        text = f"params must be an object, got {shown(params)}; write {{...}}, which may be empty"
        raise ConfigError(text, at="scheduler.params")
    try:
        inspect.signature(maker).bind(None, **params)
    except TypeError as error:
        text = f"params must be those of {name}, got {shown(params)}: {error}; correct them"
        raise ConfigError(text, at="scheduler.params") from None
    errors = Errors()
    for key, value in params.items():
        is_rate = key.endswith("lr") or key == "eta_min"
        for entry in value if isinstance(value, list) else [value]:
            remedy = type_remedy(entry) if isinstance(entry, str) else None
            if entry != "auto" and (remedy or (is_rate and isinstance(entry, (str, dict)))):
                rule = "must be a number" if is_rate else "must not be in quotes"
                text = f"{key} {rule}, got {shown(entry)}; {remedy or 'write a number'}"
                errors.add(ConfigError(text, at=f"scheduler.params.{key}"))
    errors.raise_all()


def peak_rate(ds_config: dict[str, Any]) -> float | None:
    """The largest learning rate of a scheduler that does not scale the optimizer's; None for one that does."""
    settings: Any = ds_config.get("scheduler")
    key = peak_key(settings)
    if key is None:
        return None
    params = settings.get("params")
    default = inspect.signature(_maker(settings["type"])).parameters[key].default
    found = params.get(key, default) if isinstance(params, dict) else default
    return max(filter(is_number, found if isinstance(found, list) else [found]), default=None)


def peak_key(settings: Any) -> str | None:
    """The key of that rate in the parameters of a `scheduler` block."""
    kind = settings.get("type") if isinstance(settings, dict) else None
    return PEAK_RATES.get(kind) if isinstance(kind, str) else None


def scheduler_warning(ds_config: dict[str, Any], lr: float, *, at: str) -> list[str]:
    """A warning that WarmupLR and WarmupDecayLR raise the rate to their own `warmup_max_lr`, not to the optimizer's.

    Where `warmup_max_lr` is left out, WarmupLR uses the optimizer's rate, and WarmupDecayLR a number.
    """
    peak = peak_rate(ds_config)
    if peak_key(ds_config.get("scheduler")) != "warmup_max_lr" or peak in (lr, None):
        return []
    return [
        f"scheduler {ds_config['scheduler']['type']} raises the learning rate to its own warmup_max_lr {shown(peak)}, "
        f"not to {at} {lr:g}; set warmup_max_lr to the rate you want, or use WarmupCosineLR, which scales lr"
    ]


def _maker(name: str) -> Any:
    """The class of a scheduler; None where there is none of this name."""
    return next((getattr(module, name) for module in _MODULES if hasattr(module, name)), None)
