"""Rules that span sections of the JSON: combinations that are refused, keys that have no effect, and warnings."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

from ds_zo.config.base import is_written
from ds_zo.config.errors import ConfigError, Errors, is_near, keys_of, raises_all, shown, suggestion
from ds_zo.config.keys import unread_keys
from ds_zo.config.marks import Needs, ReadBy, Trait, written_with
from ds_zo.config.registry import readers
from ds_zo.config.resolved import Resolved
from ds_zo.config.schedulers import MOMENTUM_SCHEDULERS, scheduler_warning
from ds_zo.config.section import CheckpointConfig, DsZoConfig, StreamConfig
from ds_zo.config.stock import DTYPE_NAMES, known_keys, lookup
from ds_zo.versions import REMOVED_FEATURES, refuses_removed_features

_PLACES = {
    key: place
    for place, model in (
        ("zero_optimization", DeepSpeedZeroConfig),
        ("ds_zo.checkpoint", CheckpointConfig),
        ("ds_zo.stream", StreamConfig),
        ("ds_zo", DsZoConfig),
    )
    for key in keys_of(model)
}
"""The section of each key that has no effect at the top level."""


@raises_all
def check_top_level(ds_config: dict[str, Any]) -> Iterator[ConfigError]:
    """Refuses misspelt and misplaced top-level keys. DeepSpeed ignores top-level keys that it does not know."""
    known = {*known_keys(), "ds_zo"}
    own = 'a key of your own may begin with "_"'
    for key in map(str, ds_config):
        if key in known or not key[:1].isalpha():
            continue
        if key in _PLACES:
            text = f"{key} belongs inside {_PLACES[key]}, got it at the top level, where it is ignored; move it"
            yield ConfigError(f"{text} ({own})", at=key)
        near = [name for name in sorted(known) if is_near(key.lower(), name)]
        if near:
            text = f'unknown key "{key}" with value {shown(ds_config[key])}, which DeepSpeed would ignore'
            yield ConfigError(f"{text}; {suggestion(key, near)} ({own})", at=key)


def check_rules(ds_config: dict[str, Any], config: Resolved) -> None:
    """Raises for combinations that cannot work."""
    errors = Errors(
        (
            *_check_readers(ds_config, config),
            *_check_dtypes(config),
            *_check_needs(ds_config, config),
            *_check_momentum(ds_config, config),
            *_check_kahan(config),
        )
    )
    with errors:
        check_removed_features(ds_config)
    with errors:
        config.optimizer.check_config(ds_config, config)
    errors.raise_all()


def ignored_keys(ds_config: dict[str, Any], config: Resolved) -> list[str]:
    """Dotted names of keys that are accepted and have no effect: those that the backend does not read, and ours for
    streaming where it is off."""
    params, foreign = lookup(ds_config, "optimizer.params") or {}, config.optimizer.foreign_keys()
    ignored = [f"optimizer.params.{key}" for key, value in params.items() if key in foreign and is_written(value)]
    ignored += [path for path, mark, _ in _unread(ds_config, config) if mark.refusal is None and mark.is_told]
    ignored += [f"ds_zo.{path}" for path, _ in _idle(config, Needs.COPIES)]
    checkpoint, at = config.section.checkpoint, "ds_zo.checkpoint.trajectory_dir"
    if checkpoint.trajectory_dir is not None and not checkpoint.trajectory and at not in ignored:
        ignored.append(at)
    return ignored


def warnings_for(ds_config: dict[str, Any], config: Resolved) -> list[str]:
    """Sentences about legal settings that probably do not do what their author expects."""
    found = []
    optimizer = config.optimizer
    if config.params_at == "optimizer.params":
        found += scheduler_warning(ds_config, optimizer.lr, at="optimizer.params.lr")
    shards_host = config.stream and config.entry.has(Trait.SHARDS_HOST)
    if config.zero_stage == 3 and not (shards_host or config.shards_device):
        but = ", and a part of Adam's states" if config.entry.has(Trait.OFFLOADS_OPTIMIZER) else ""
        remedy = "; offload_param.device cpu streams it instead" if config.entry.has(Trait.STREAMS) else ""
        where = "in its host memory" if config.stream else f"on its device{remedy}"
        found.append(f"zero_optimization.stage 3 shards no weights here: every rank keeps the whole model{but} {where}")
    return found + optimizer.warnings_of_config(config)


@raises_all
def check_removed_features(ds_config: dict[str, Any]) -> Iterator[ConfigError]:
    """Refuses keys that the installed DeepSpeed refuses, even if the feature is switched off."""
    for path in REMOVED_FEATURES if refuses_removed_features() else ():
        found = lookup(ds_config, path)
        if found is not None:
            yield ConfigError(f"DeepSpeed 0.19.8 removed {path}, got {shown(found)}; remove the key", at=path)


def _check_dtypes(config: Resolved) -> Iterator[ConfigError]:
    model = DTYPE_NAMES[config.dtype]
    if config.autocast is not None and config.dtype is not torch.float32:
        text = (
            f"torch_autocast casts from a float32 model, got it enabled beside {model}.enabled; disable one of the two"
        )
        yield ConfigError(text, at="torch_autocast.enabled")
    if config.entry.has(Trait.REFUSES_FP16) and torch.float16 in (config.dtype, config.autocast):
        text = (
            f"{config.entry.optimizer_type} does not scale losses, which fp16 needs, got fp16; use bf16, whose range "
            "needs no loss scaling"
        )
        yield ConfigError(text, at="fp16.enabled" if config.dtype is torch.float16 else "torch_autocast.dtype")


def _check_needs(ds_config: dict[str, Any], config: Resolved) -> Iterator[ConfigError]:
    """Refuses keys that limit memory only with streaming where streaming is off."""
    if lookup(ds_config, "zero_optimization.offload_param.device") == "nvme":  # refused, and it asks for streaming
        return
    for path, value in _idle(config, Needs.STREAMING):
        if value is not False:
            text = (
                f"{path.rpartition('.')[2]} needs block streaming, got {shown(value)} without it; set "
                'zero_optimization.offload_param.device to "cpu", or leave the key out'
            )
            yield ConfigError(text, at=f"ds_zo.{path}")


def _idle(config: Resolved, needs: Needs) -> list[tuple[str, Any]]:
    """Keys of the `ds_zo` section and their values, which have no effect where the weights are."""
    if needs.are_met(streams=config.stream, shards=config.shards_device):
        return []
    return written_with(config.section, needs)


def _unread(ds_config: dict[str, Any], config: Resolved) -> Iterator[tuple[str, ReadBy, Any]]:
    """Keys whose values ask for a trait that the backend lacks, with their marks and values."""
    for path, mark, value in unread_keys(ds_config, config.entry):
        if mark.concerns(value, model_dtype=DTYPE_NAMES[config.dtype]):
            yield path, mark, value


def _check_readers(ds_config: dict[str, Any], config: Resolved) -> Iterator[ConfigError]:
    """Refuses keys that the backend does not read."""
    facts = {"backend": config.backend, "type": config.entry.optimizer_type, "model": DTYPE_NAMES[config.dtype]}
    for path, mark, value in _unread(ds_config, config):
        if mark.refusal is not None:
            key, who = path.rpartition(".")[2], readers(mark)
            yield ConfigError(
                mark.refusal.format(path=path, key=key, readers=who, value=shown(value), **facts), at=path
            )


def _check_kahan(config: Resolved) -> Iterator[ConfigError]:
    if config.stream and config.section.rounding == "kahan":
        text = (
            "kahan rounding keeps its rounding errors on the device, so it excludes block streaming, got both; write "
            "stochastic, or remove zero_optimization.offload_param"
        )
        yield ConfigError(text, at="ds_zo.rounding")


def _check_momentum(ds_config: dict[str, Any], config: Resolved) -> Iterator[ConfigError]:
    """Refuses cycled momentum before the model is moved. torch's cyclic schedulers fail without momentum after that."""
    kind = lookup(ds_config, "scheduler.type")
    cycles = lookup(ds_config, "scheduler.params.cycle_momentum")
    if kind not in MOMENTUM_SCHEDULERS or cycles is False or config.params_at != "optimizer.params":
        return
    has_betas = "betas" in type(config.optimizer).model_fields
    owner = config.entry.optimizer_type
    why = f"{owner}'s betas stay those of optimizer.params" if has_betas else "this backend has no momentum"
    text = f"cycle_momentum of {kind} must be false, because {why}, got {shown(cycles)}"
    yield ConfigError(f"{text}; set cycle_momentum to false", at="scheduler.params.cycle_momentum")
