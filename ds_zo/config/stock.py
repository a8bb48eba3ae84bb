"""Reads DeepSpeed's own keys with DeepSpeed's own models, and reports errors in one line."""

from __future__ import annotations

import inspect
import math
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeVar

import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime import lr_schedules
from deepspeed.runtime.config import DeepSpeedConfig
from deepspeed.runtime.constants import GRADIENT_CLIPPING_DEFAULT
from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
from pydantic import BaseModel, ValidationError

from ds_zo.config.errors import ConfigError, Errors, shown, suggestion, translate, type_remedy

Model = TypeVar("Model", bound=BaseModel)

DTYPE_NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
MAX_SCALE_POWER = 126
_NULLABLE = ("ds_zo", "bf16")
_TYPED = ("optimizer", "scheduler")
_KEYS_OF_INITIALIZE = frozenset({"data_parallel_size", "sequence_parallel_size"})
"""Top-level keys that `deepspeed.initialize` reads itself."""
_SCHEDULER_MODULES = (lr_schedules, torch.optim.lr_scheduler)
_AUTOCAST_DTYPES = {
    "bfloat16": torch.bfloat16,
    "bf16": torch.bfloat16,
    "torch.bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "fp16": torch.float16,
    "half": torch.float16,
    "torch.float16": torch.float16,
}


@dataclass(frozen=True)
class LossScale:
    """Loss scaling of the `fp16` block. `loss_scale` 0 is dynamic. `written` has the keys that the JSON contains."""

    loss_scale: float
    initial_scale_power: int
    loss_scale_window: int
    hysteresis: int
    min_loss_scale: int
    written: tuple[str, ...]


@dataclass(frozen=True)
class StockKeys:
    """Values of DeepSpeed's keys that have the same meaning under our backends."""

    dtype: torch.dtype
    autocast: torch.dtype | None
    loss_scale: LossScale
    zero: DeepSpeedZeroConfig
    gradient_clipping: float
    clipping_explicit: bool
    gradient_accumulation_steps: int


def read_stock(ds_config: dict[str, Any], *, world_size: int | None) -> StockKeys:
    """Checks and reads DeepSpeed's keys. With `world_size` None, it is that of the running process group."""
    errors = Errors()
    bf16_key = "bf16" if ds_config.get("bf16") is not None else "bfloat16"
    with errors:
        fp16 = parse(DeepSpeedFP16Config, block(ds_config, "fp16"), at="fp16")
        loss_scale = _loss_scale(fp16)
    with errors:
        bf16 = parse(DeepSpeedBF16Config, block(ds_config, bf16_key), at=bf16_key)
    with errors:
        _check_scheduler(block(ds_config, "scheduler"))
    with errors:
        clipping = number(ds_config, "gradient_clipping")
    with errors:
        autocast = _autocast(ds_config)
    with errors:
        zero = _zero(ds_config)
    with errors:
        accumulation_steps = _accumulation_steps(ds_config, world_size)
    errors.raise_all()
    if fp16.enabled and bf16.enabled:
        text = "a model has one dtype, got both fp16.enabled and bf16.enabled true; set one of them to false"
        raise ConfigError(text, at=f"{bf16_key}.enabled")
    return StockKeys(
        dtype=torch.float16 if fp16.enabled else torch.bfloat16 if bf16.enabled else torch.float32,
        autocast=autocast,
        loss_scale=loss_scale,
        zero=zero,
        gradient_clipping=GRADIENT_CLIPPING_DEFAULT if clipping is None else clipping,
        clipping_explicit=clipping is not None,
        gradient_accumulation_steps=accumulation_steps,
    )


def block(ds_config: dict[str, Any], key: str) -> dict[str, Any]:
    """The object at a top-level key; empty where it is left out. Null is refused where DeepSpeed fails on it."""
    found = ds_config.get(key, {})
    if found is None and key in _NULLABLE:
        return {}
    if not isinstance(found, dict):
        form = f'{{"type": {shown(found)}, "params": {{...}}}}' if key in _TYPED and isinstance(found, str) else "{...}"
        raise ConfigError(f"{key} must be an object, got {shown(found)}; write {form} or leave it out", at=key)
    return found


def optimizer_params(optimizer: dict[str, Any]) -> dict[str, Any]:
    """The object at `params` of an `optimizer` block; empty where it is left out or null."""
    params = optimizer.get("params")
    if not isinstance(params, dict | None):
        text = f"params must be an object, got {shown(params)}; write {{...}} or leave it out"
        raise ConfigError(text, at="optimizer.params")
    return params or {}


def lookup(ds_config: dict[str, Any], path: str) -> Any:
    """The value at a dotted key; None where it is left out."""
    found: Any = ds_config
    for key in path.split("."):
        found = found.get(key) if isinstance(found, dict) else None
    return found


def is_on(value: Any) -> bool:
    """Whether a section or switch is on: by its `enabled`, `device` or parallel sizes, or else by not being empty."""
    if isinstance(value, dict):
        if "enabled" in value:
            return value["enabled"] is True
        if "device" in value:
            return value["device"] not in (None, "none", "auto")
        sizes = [size for key, size in value.items() if key in ("autotp_size", "tp_size", "stages")]
        inner = [part for key, part in value.items() if key in ("tp", "tensor_parallel")]
        if sizes or inner:
            return any(is_on(part) for part in sizes + inner)
        return bool(value)
    if isinstance(value, bool):
        return value
    if isinstance(value, int):
        return value > 1
    return False


@cache
def known_keys() -> frozenset[str]:
    """Top-level keys that DeepSpeed reads, found by letting it read a JSON that records the keys looked up in it."""
    probe = _RecordingDict(train_micro_batch_size_per_gpu=1)
    DeepSpeedConfig(probe)
    return frozenset(probe.asked_for) | _KEYS_OF_INITIALIZE


class _RecordingDict(dict[str, Any]):
    """A JSON object that records every key that is looked up. A shallow copy records in the same set."""

    def __init__(self, **items: Any) -> None:
        super().__init__(items)
        self.asked_for: set[str] = set()

    def get(self, key: str, default: Any = None) -> Any:
        self.asked_for.add(key)
        return super().get(key, default)

    def __contains__(self, key: object) -> bool:
        self.asked_for.add(str(key))
        return super().__contains__(key)

    def keys(self) -> Any:
        return self  # DeepSpeed evaluates `key in config.keys()`


def parse(model: type[Model], data: dict[str, Any], *, at: str) -> Model:
    """Makes a `model` from the object at the key `at`, or raises a `ConfigError`."""
    try:
        return model(**data)
    except ValidationError as error:
        raise translate(error, model, at=at) from None


def number(ds_config: dict[str, Any], key: str) -> float | None:
    """A finite number >= 0 at a top-level key; None where it is left out."""
    found = ds_config.get(key)
    if found is None:
        return None
    if isinstance(found, bool) or not isinstance(found, (int, float)):
        raise ConfigError(f"{key} must be a number, got {shown(found)}; {_number_remedy(found)}", at=key)
    if not math.isfinite(found) or found < 0:
        raise ConfigError(f"{key} must be finite and >= 0, got {shown(found)}; write 0 to switch it off", at=key)
    return float(found)


def count(ds_config: dict[str, Any], key: str) -> int | None:
    """An integer >= 1 at a top-level key; None where it is left out."""
    found = ds_config.get(key)
    if found is None:
        return None
    if isinstance(found, bool) or not isinstance(found, int):
        raise ConfigError(f"{key} must be an integer, got {shown(found)}; {_number_remedy(found)}", at=key)
    if found < 1:
        raise ConfigError(f"{key} must be >= 1, got {found}; write 1 or more", at=key)
    return found


def _number_remedy(value: Any) -> str:
    if value == "auto":
        return 'write a number, because only Trainer and Accelerate replace "auto", and DeepSpeed does not'
    return type_remedy(value) or "write a number"


def _accumulation_steps(ds_config: dict[str, Any], world_size: int | None) -> int:
    """The accumulation steps as DeepSpeed computes them: as written, else from the two batch sizes, else 1."""
    errors = Errors()
    with errors:
        written = count(ds_config, "gradient_accumulation_steps")
    with errors:
        total = count(ds_config, "train_batch_size")
    with errors:
        micro = count(ds_config, "train_micro_batch_size_per_gpu")
    errors.raise_all()
    if written is not None or total is None or micro is None:
        return written or 1
    if world_size is None:
        group_is_up = torch.distributed.is_available() and torch.distributed.is_initialized()
        world_size = torch.distributed.get_world_size() if group_is_up else 1
    return max(1, total // micro // world_size)


def _loss_scale(fp16: DeepSpeedFP16Config) -> LossScale:
    keys = ("loss_scale", "initial_scale_power", "loss_scale_window", "hysteresis", "min_loss_scale")
    if fp16.enabled and not 0 <= fp16.initial_scale_power <= MAX_SCALE_POWER:
        text = (
            f"initial_scale_power must be in 0..{MAX_SCALE_POWER} for 2 ** power to be a float32, "
            f"got {fp16.initial_scale_power}; leave it out for the default 16"
        )
        raise ConfigError(text, at="fp16.initial_scale_power")
    if fp16.enabled and fp16.hysteresis < 1:
        text = f"hysteresis must be >= 1, got {fp16.hysteresis}; leave it out for the default 2"
        raise ConfigError(text, at="fp16.hysteresis")
    written = tuple(key for key in keys if key in fp16.model_fields_set)
    return LossScale(**{key: getattr(fp16, key) for key in keys}, written=written)


def _zero(ds_config: dict[str, Any]) -> DeepSpeedZeroConfig:
    found = ds_config.get("zero_optimization")
    if isinstance(found, bool):  # DeepSpeed's old spelling of stage 1 and stage 0
        return DeepSpeedZeroConfig(stage=int(found))
    return parse(DeepSpeedZeroConfig, block(ds_config, "zero_optimization"), at="zero_optimization")


def _check_scheduler(settings: dict[str, Any]) -> None:
    """Refuses a wrong scheduler before the model is moved. DeepSpeed makes the scheduler after that."""
    name, params = settings.get("type"), settings.get("params")
    if name is None:
        return
    maker = next((getattr(module, str(name)) for module in _SCHEDULER_MODULES if hasattr(module, str(name))), None)
    if maker is None:
        known = [key for module in _SCHEDULER_MODULES for key in vars(module) if key.endswith("LR") and key[0] != "_"]
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


def _autocast(ds_config: dict[str, Any]) -> torch.dtype | None:
    settings = block(ds_config, "torch_autocast")
    enabled, dtype = settings.get("enabled", False), settings.get("dtype")
    if not isinstance(enabled, bool):
        text = f"enabled must be true or false, got {shown(enabled)}; {type_remedy(enabled) or 'write true or false'}"
        raise ConfigError(text, at="torch_autocast.enabled")
    if not enabled:
        return None
    if dtype is None:
        return torch.get_autocast_dtype(get_accelerator().device_name())
    if isinstance(dtype, torch.dtype):
        dtype = str(dtype)
    if not isinstance(dtype, str) or dtype not in _AUTOCAST_DTYPES:
        text = f"dtype must be bfloat16 or float16, got {shown(dtype)}; write one of them"
        raise ConfigError(text, at="torch_autocast.dtype")
    return _AUTOCAST_DTYPES[dtype]
