"""Reads DeepSpeed's own keys with DeepSpeed's own models, and reports errors in one line."""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cache
from typing import Any, TypeVar

import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.config import DeepSpeedConfig, DtypeEnum
from deepspeed.runtime.constants import GRADIENT_CLIPPING_DEFAULT
from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ds_zo.config.errors import ConfigError, Errors, shown, translate
from ds_zo.config.schedulers import check_scheduler

Model = TypeVar("Model", bound=BaseModel)

DTYPE_NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
MAX_SCALE_POWER = 126
_NULLABLE = ("ds_zo", "bf16")
_TYPED = ("optimizer", "scheduler")
_KEYS_OF_INITIALIZE = frozenset({"data_parallel_size", "sequence_parallel_size"})
"""Top-level keys that `deepspeed.initialize` reads itself."""
_STRICT = ConfigDict(strict=True, allow_inf_nan=False)


class _Numbers(BaseModel):
    """DeepSpeed's top-level numbers."""

    model_config = _STRICT
    gradient_clipping: float | None = Field(None, ge=0)
    gradient_accumulation_steps: int | None = Field(None, ge=1)
    train_batch_size: int | None = Field(None, ge=1)
    train_micro_batch_size_per_gpu: int | None = Field(None, ge=1)


class _Autocast(BaseModel):
    """The keys of `torch_autocast` that this package reads."""

    model_config = _STRICT
    enabled: bool = False
    dtype: Any = None


@dataclass(frozen=True)
class LossScale:
    """Loss scaling of the `fp16` block. `loss_scale` 0 is dynamic. `written` has the keys that the JSON contains."""

    loss_scale: float
    initial_scale_power: int
    loss_scale_window: int
    hysteresis: int
    min_loss_scale: int
    written: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class StockKeys:
    """Values of DeepSpeed's keys that have the same meaning under our backends, with DeepSpeed's defaults filled in."""

    dtype: torch.dtype
    """Dtype of the model's parameters."""

    autocast: torch.dtype | None
    """Dtype of `torch_autocast`; None where it is off."""

    loss_scale: LossScale

    stream: bool
    """Whether blocks are streamed from the host: `offload_param.device` is "cpu"."""

    pin_memory: bool
    zero_stage: int

    offload_optimizer: bool
    """Whether Adam runs on the CPU: `offload_optimizer.device` is "cpu", and the backend reads it."""

    gradient_clipping: float
    """Largest gradient norm; 0 for no limit. With LOMO's `clip_grad_value` the default is 0, not DeepSpeed's."""

    clipping_explicit: bool
    """Whether the JSON contains `gradient_clipping`; otherwise it is DeepSpeed's default."""

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
        check_scheduler(block(ds_config, "scheduler"))
    with errors:
        numbers = parse(_Numbers, {key: ds_config[key] for key in _Numbers.model_fields if key in ds_config}, at="")
    with errors:
        autocast = _autocast(parse(_Autocast, block(ds_config, "torch_autocast"), at="torch_autocast"))
    with errors:
        zero = _zero(ds_config)
    errors.raise_all()
    if fp16.enabled and bf16.enabled:
        text = "a model has one dtype, got both fp16.enabled and bf16.enabled true; set one of them to false"
        raise ConfigError(text, at=f"{bf16_key}.enabled")
    param, optimizer, clipping = zero.offload_param, zero.offload_optimizer, numbers.gradient_clipping
    return StockKeys(
        dtype=torch.float16 if fp16.enabled else torch.bfloat16 if bf16.enabled else torch.float32,
        autocast=autocast,
        loss_scale=loss_scale,
        stream=param is not None and param.device == "cpu",
        pin_memory=param is not None and param.pin_memory,
        zero_stage=int(zero.stage),
        offload_optimizer=optimizer is not None and optimizer.device == "cpu",
        gradient_clipping=GRADIENT_CLIPPING_DEFAULT if clipping is None else clipping,
        clipping_explicit=clipping is not None,
        gradient_accumulation_steps=_accumulation_steps(numbers, world_size),
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
    except (AssertionError, TypeError) as error:  # of DeepSpeed's own checks, which pydantic does not see
        text = f"{at} must be valid for DeepSpeed, got {shown(data)}: {error}; correct it"
        raise ConfigError(text, at=at) from None


def _accumulation_steps(numbers: _Numbers, world_size: int | None) -> int:
    """The accumulation steps as DeepSpeed computes them: as written, else from the two batch sizes, else 1."""
    written, total = numbers.gradient_accumulation_steps, numbers.train_batch_size
    micro = numbers.train_micro_batch_size_per_gpu
    if written is not None or total is None or micro is None:
        return written or 1
    if world_size is None:
        group_is_up = torch.distributed.is_available() and torch.distributed.is_initialized()
        world_size = torch.distributed.get_world_size() if group_is_up else 1
    return max(1, total // micro // world_size)


def _loss_scale(fp16: DeepSpeedFP16Config) -> LossScale:
    if fp16.enabled and not 0 <= fp16.initial_scale_power <= MAX_SCALE_POWER:
        text = (
            f"initial_scale_power must be in 0..{MAX_SCALE_POWER} for 2 ** power to be a float32, "
            f"got {fp16.initial_scale_power}; leave it out for the default 16"
        )
        raise ConfigError(text, at="fp16.initial_scale_power")
    if fp16.enabled and fp16.hysteresis < 1:
        text = f"hysteresis must be >= 1, got {fp16.hysteresis}; leave it out for the default 2"
        raise ConfigError(text, at="fp16.hysteresis")
    values = {field.name: getattr(fp16, field.name) for field in fields(LossScale) if field.name != "written"}
    return LossScale(**values, written=tuple(key for key in values if key in fp16.model_fields_set))


def _zero(ds_config: dict[str, Any]) -> DeepSpeedZeroConfig:
    found = ds_config.get("zero_optimization")
    if isinstance(found, bool):  # DeepSpeed's old spelling of stage 1 and stage 0
        return DeepSpeedZeroConfig(stage=int(found))
    return parse(DeepSpeedZeroConfig, block(ds_config, "zero_optimization"), at="zero_optimization")


def _autocast(settings: _Autocast) -> torch.dtype | None:
    if not settings.enabled:
        return None
    if settings.dtype is None:
        return torch.get_autocast_dtype(get_accelerator().device_name())
    try:
        found = DtypeEnum(settings.dtype).value
    except ValueError:
        found = None
    if found not in (torch.bfloat16, torch.float16):
        text = f"dtype must be bfloat16 or float16, got {shown(settings.dtype)}; write one of them"
        raise ConfigError(text, at="torch_autocast.dtype")
    return found
