"""Turns a JSON of stock DeepSpeed, or of one of our backends, into a JSON of a given backend.

`convert` returns the new JSON and a record of every change with its reason. A key that the backend does not read is
removed, and so is a feature that it refuses. `"auto"` stays where Trainer and Accelerate replace it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from deepspeed.runtime.config import DEEPSPEED_OPTIMIZERS

from ds_zo.config.base import is_number, is_written
from ds_zo.config.draft import Change, Draft
from ds_zo.config.errors import ConfigError, Errors, shown, type_remedy
from ds_zo.config.keys import SECTION_AT, unread_keys
from ds_zo.config.learning_rates import StartingRate, far_rate, starting_rate
from ds_zo.config.marks import Needs, Trait, marks_in
from ds_zo.config.optimizers import STOCK_PARAMS
from ds_zo.config.registry import entry_of, readers, unknown_optimizer
from ds_zo.config.resolve import backend_of, resolve, with_section_on_top
from ds_zo.config.resolved import Resolved
from ds_zo.config.rules import check_top_level
from ds_zo.config.schedulers import MOMENTUM_SCHEDULERS, OTHER_RATES, peak_key, peak_rate
from ds_zo.config.section import KAHAN_REMOVAL, DsZoConfig
from ds_zo.config.stock import block, is_on, lookup, optimizer_params, read_stock

_FILLED = ("lr", "weight_decay", "betas", "eps")
"""Keys of `optimizer.params` in which Trainer or Accelerate replace "auto". They refuse it in keys of ours."""
_DEFAULT_LR = 1e-3
"""Learning rate of Adam and AdamW where the JSON names none."""
_MAX_DECAY = 1000.0
_DTYPE_KEYS = ("fp16", "bf16", "bfloat16")
_ON_HOST = {"device": "cpu", "pin_memory": True}


@dataclass(frozen=True)
class Conversion:
    """The result of `convert`."""

    config: dict[str, Any]
    changes: tuple[Change, ...]
    notes: tuple[str, ...]
    """Sentences about settings that the JSON does not contain or that stay as they are."""
    lr: float
    """The learning rate to start from."""
    lr_source: str
    resolved: Resolved


def convert(
    ds_config: dict[str, Any],
    *,
    to: str,
    stream: bool | None = None,
    form: Mapping[str, Any] | None = None,
    device_memory_gb: float | None = None,
    num_parameters: int | None = None,
) -> Conversion:
    """Converts a JSON to the backend `to`. The input stays as it is.

    `stream` says whether blocks stream; None: as the JSON says, or as its stage needs. `form` are keys of
    `ds_zo.stream` without which the run does not fit. `device_memory_gb` limits the
    device memory of a streamed run. `num_parameters` chooses the learning rate; None: that of a 7B model.
    """
    entry = entry_of(to)
    source = backend_of(ds_config)
    # A misspelt key would be removed as unused.
    if source is None:
        check_stock(ds_config)
    else:
        check(ds_config)
    draft = Draft(ds_config, entry)
    if not draft.config.get("optimizer"):
        draft.remove("optimizer", "it is empty, so the script makes the optimizer")
    _write_zero_as_object(draft)
    _convert_placement(draft, source, stream=stream)
    _convert_optimizer(draft, source)
    if draft.get("torch_autocast.enabled") is True and any(draft.get(f"{key}.enabled") is True for key in _DTYPE_KEYS):
        draft.remove("torch_autocast", "autocast is for a float32 model, and this one is in 16 bits")
    if device_memory_gb is not None and stream and draft.get(f"{SECTION_AT}.stream.device_memory_gb") is None:
        draft.set(f"{SECTION_AT}.stream.device_memory_gb", device_memory_gb, "planned for a GPU of this size")
    _remove_idle(draft)
    _convert_forced_optimizer(draft)
    for key, value in (form or {}).items():
        draft.set(f"{SECTION_AT}.stream.{key}", value, "planned: without it the run does not fit")
    _convert_accumulation(draft)
    start = starting_rate(to, num_parameters=num_parameters, is_clipped=_clips(draft))
    lr, lr_source = _convert_rates(draft, source, start)
    if entry.has(Trait.UPDATES_IN_BACKWARD) and _clips(draft) and draft.get(f"{draft.params_at}.norm_scope") != "group":
        draft.note(
            "{type} computes the norm for gradient_clipping in a backward pass of its own; gradient_clipping 0 "
            '(max_grad_norm=0 of Trainer) or "norm_scope": "group" avoids it'
        )
    return Conversion(draft.config, tuple(draft.changes), tuple(draft.notes), lr, lr_source, check(draft.config))


def check(ds_config: dict[str, Any]) -> Resolved:
    """Resolves a JSON as if Trainer or Accelerate had replaced each "auto"; the world is one rank."""
    plain = without_auto(ds_config)
    peak = peak_rate(plain)
    if peak is not None and lookup(plain, "optimizer.params.lr") == "auto":  # Trainer insists that they are equal
        plain["optimizer"] = {**plain["optimizer"], "params": {**plain["optimizer"]["params"], "lr": peak}}
    return resolve(plain, client_optimizer="optimizer" not in ds_config, world_size=1)


def rate_warning_of(ds_config: dict[str, Any], resolved: Resolved) -> str | None:
    """The warning of a learning rate far from the usual ones; None for a usual one, and where the script names it."""
    if resolved.params_at != "optimizer.params":
        return None
    peak = peak_rate(ds_config)
    at = "optimizer.params.lr" if peak is None else f"scheduler.params.{peak_key(ds_config['scheduler'])}"
    return far_rate(resolved, resolved.optimizer.lr if peak is None else peak, at=at)


def without_auto(ds_config: dict[str, Any]) -> dict[str, Any]:
    """The JSON without top-level keys of value "auto". The models of sections leave out "auto" themselves."""
    return {key: value for key, value in ds_config.items() if value != "auto"}


def autos_of(ds_config: Mapping[str, Any], at: str = "") -> list[str]:
    """Dotted names of all keys of value "auto"."""
    found = []
    for key, value in ds_config.items():
        path = f"{at}{key}"
        found += autos_of(value, f"{path}.") if isinstance(value, Mapping) else [path] if value == "auto" else []
    return found


def refused_autos(ds_config: Mapping[str, Any]) -> list[str]:
    """Dotted names of keys of value "auto" that Trainer and Accelerate do not replace, because they are ours."""
    filled = {f"optimizer.params.{key}" for key in _FILLED}
    ours = ("optimizer.params.", "ds_zo.", "zero_optimization.ds_zo.")
    return [path for path in autos_of(ds_config) if path.startswith(ours) and path not in filled]


def check_stock(ds_config: dict[str, Any]) -> None:
    """Raises for errors in a JSON that names no backend of ours, as if each "auto" had been replaced."""
    plain = without_auto(with_section_on_top(ds_config))
    errors = Errors()
    with errors:
        check_top_level(plain)
    with errors:
        _check_stock_optimizer(block(plain, "optimizer"))
    with errors:
        read_stock(plain, world_size=1)
    errors.raise_all()


def _check_stock_optimizer(optimizer: dict[str, Any]) -> None:
    errors = Errors()
    params: dict[str, Any] = {}
    kind = optimizer.get("type")
    is_known = isinstance(kind, str) and (kind.lower() in DEEPSPEED_OPTIMIZERS or hasattr(torch.optim, kind))
    if optimizer and not is_known:
        errors.add(unknown_optimizer(kind))
    with errors:
        params = optimizer_params(optimizer)
    for key in ("lr", "weight_decay", "eps"):
        found = params.get(key, "auto")
        if found != "auto" and not is_number(found):
            text = f"{key} must be a number, got {shown(found)}; {type_remedy(found) or 'write a number'}"
            errors.add(ConfigError(text, at=f"optimizer.params.{key}"))
    errors.raise_all()


def _write_zero_as_object(draft: Draft) -> None:
    zero = draft.config.get("zero_optimization")
    if isinstance(zero, bool):
        draft.set("zero_optimization", {"stage": int(zero)}, "the same in the form of an object")
    for old, new in (("cpu_offload", "offload_optimizer"), ("cpu_offload_param", "offload_param")):
        if draft.get(f"zero_optimization.{old}") is True and not draft.has(f"zero_optimization.{new}"):
            draft.set(f"zero_optimization.{new}", _ON_HOST, f"the present name of {old}")
    if draft.config.get("ds_zo"):
        draft.set(SECTION_AT, draft.config["ds_zo"], "without `import ds_zo` DeepSpeed refuses it there")
    draft.remove("ds_zo", "it is read in one place")


def _convert_placement(draft: Draft, source: str | None, *, stream: bool | None) -> None:
    """Converts the placement of weights and optimizer states, then the stage."""
    entry = draft.entry
    param = "zero_optimization.offload_param"
    device, stage = draft.get(f"{param}.device"), draft.get("zero_optimization.stage") or 0
    shards_host_alone = entry.has(Trait.SHARDS_HOST) and not entry.has(Trait.SHARDS_DEVICE)
    if device == "nvme":
        draft.set(f"{param}.device", "cpu", "weights stream from host memory, not from NVMe")
    if stream is True:
        _move_to_host(draft, param, "planned: the whole model does not fit the GPU")
    elif stream is False:
        draft.remove(param, "planned: the whole model fits the GPU")
    elif stage == 3 and device in (None, "none") and shards_host_alone:
        draft.set(param, _ON_HOST, "{type} divides no weights among GPUs; the ranks of a machine share a host copy")
    if draft.streams and not draft.has(f"{param}.pin_memory"):
        draft.set(f"{param}.pin_memory", True, "copies from memory that is not pinned are several times slower")
    _convert_offload_optimizer(draft, source)
    _convert_stage(draft, stage)


def _move_to_host(draft: Draft, at: str, why: str) -> None:
    draft.set(at, _ON_HOST | draft.object(at) | {"device": "cpu"}, why)


def _convert_offload_optimizer(draft: Draft, source: str | None) -> None:
    at = "zero_optimization.offload_optimizer"
    if not draft.entry.has(Trait.OFFLOADS_OPTIMIZER):
        return
    device = draft.get(f"{at}.device")
    if device == "nvme":
        draft.set(f"{at}.device", "cpu", "{type}'s Adam states are in host memory, not on NVMe")
    elif draft.streams and device != "cpu":
        _move_to_host(draft, at, "{type} with streamed weights runs Adam on the host")
    elif source != draft.entry.name and device in (None, "none"):
        draft.set(at, _ON_HOST, "{type} runs Adam on the host, which is how it saves device memory")
    if draft.streams:
        draft.note("{type} streams weights on one rank only: start one process, or remove offload_param")


def _convert_forced_optimizer(draft: Draft) -> None:
    """Keeps Accelerate from compiling DeepSpeed's CPU Adam for a script that makes its own optimizer."""
    at = "zero_force_ds_cpu_optimizer"
    if draft.is_client and draft.get("zero_optimization.offload_optimizer.device") not in (None, "none"):
        why = "otherwise Accelerate replaces the script's optimizer by DeepSpeed's CPU Adam, which is then not used"
        draft.set(at, False, why)
    else:
        draft.remove(at, "no optimizer is replaced by DeepSpeed's CPU Adam here")


def _convert_stage(draft: Draft, stage: Any) -> None:
    entry, at = draft.entry, "zero_optimization.stage"
    if stage == 3:
        may_stream = draft.streams or draft.get("zero_optimization.offload_param.device") == "auto"
        if (may_stream and entry.has(Trait.SHARDS_HOST)) or (not draft.streams and entry.has(Trait.SHARDS_DEVICE)):
            return
    if entry.has(Trait.OFFLOADS_OPTIMIZER) and stage in (2, 3):
        draft.set(at, 1, "{type} divides Adam's states among ranks from stage 1 on, and nothing more at higher stages")
    elif not entry.has(Trait.OFFLOADS_OPTIMIZER) and stage in (1, 2, 3):
        draft.set(at, 0, "{type} divides no gradients or optimizer states; each rank has the whole model")


def _convert_optimizer(draft: Draft, source: str | None) -> None:
    entry, written = draft.entry, draft.get("optimizer.type")
    owner = written or "another optimizer" if source is None else entry_of(source).optimizer_type
    names_itself = source == entry.name == str(written).lower()
    draft.remove("optimizer.legacy_fusion", "it chooses among DeepSpeed's own optimizers")
    if draft.is_client:
        why = "the script makes its own optimizer, so the section names {type}"
        draft.set(f"{SECTION_AT}.backend", entry.name, why)
    elif entry.stock_types and not names_itself:
        if str(written).lower() not in entry.stock_types:
            draft.set("optimizer.type", "AdamW", "AdamW trains the adapters")
        why = "the section names {type}, which calls the optimizer of the JSON"
        draft.set(f"{SECTION_AT}.backend", entry.name, why)
    else:
        if source != entry.name:
            draft.set("optimizer.type", entry.optimizer_type, "the update is {type}'s")
        draft.remove(f"{SECTION_AT}.backend", "optimizer.type names the backend")
    for key in list(draft.object(draft.params_at)):
        if key not in entry.params.model_fields:
            whose = "stock optimizers" if key in STOCK_PARAMS else owner
            draft.remove(f"{draft.params_at}.{key}", f"a parameter of {whose}; {{type}} has none of this name")


def _remove_idle(draft: Draft) -> None:
    """Removes keys that the backend does not read, or that have no effect beside the others."""
    entry, at = draft.entry, SECTION_AT
    for path in refused_autos(draft.config):
        draft.remove(path, 'Trainer and Accelerate refuse "auto" here; left out means the same')
    for path, mark, value in list(unread_keys(draft.config, entry)):
        is_off = mark.is_feature and mark.refusal is not None and not is_on(value)
        if mark.removal is not None and mark.value in (None, value) and not is_off:
            draft.remove(path, mark.removal.replace("{readers}", readers(mark)))
    if draft.get(f"{at}.checkpoint.trajectory") is not True:
        draft.remove(f"{at}.checkpoint.trajectory_dir", "no trajectory is recorded")
    streams, is_sharded = draft.streams, draft.get("zero_optimization.stage") == 3
    if draft.get(f"{at}.rounding") == "kahan" and (streams or is_sharded):
        draft.remove(f"{at}.rounding", KAHAN_REMOVAL)
    for path, needs in marks_in(DsZoConfig, Needs):
        if not needs.are_met(streams=streams, shards=is_sharded and entry.has(Trait.SHARDS_DEVICE)):
            draft.remove(f"{at}.{path}", "no block streams")


def _convert_accumulation(draft: Draft) -> None:
    """Lets LOMO and AdaLOMO accept several micro-batches a step, which they refuse by default."""
    at = f"{draft.params_at}.accumulation"
    if not draft.entry.has(Trait.UPDATES_IN_BACKWARD) or draft.get(at) == "sequential":
        return
    plain = without_auto(draft.config)
    total, micro = plain.get("train_batch_size"), plain.get("train_micro_batch_size_per_gpu")
    steps = plain.get("gradient_accumulation_steps") or (total // micro if total and micro else 1)
    if steps > 1:
        why = (
            "{type} frees each gradient once it is applied, so each micro-batch makes a small update; "
            "gradient_accumulation_steps 1 avoids that"
        )
        draft.set(at, "sequential", why)
    elif draft.config.get("gradient_accumulation_steps") == "auto":
        draft.note(
            "{type} frees each gradient once it is applied: set the script's gradient_accumulation_steps to 1, or "
            f'{at} to "sequential"'
        )


def _clips(draft: Draft) -> bool:
    """Whether the gradient's norm is limited. DeepSpeed's default, and that of Trainer, is 1."""
    by_value = draft.get(f"{draft.params_at}.clip_grad_value") is not None
    return draft.config.get("gradient_clipping") != 0 and not by_value


def _convert_rates(draft: Draft, source: str | None, start: StartingRate) -> tuple[float, str]:
    """Writes the learning rate to start from, and scales all that depends on it. Returns the rate and its source."""
    entry = draft.entry
    at = "optimizer.params.lr"
    written = draft.get(at)
    old = peak_rate(draft.config) or (written if is_number(written) else None)
    if draft.get("scheduler.type") in MOMENTUM_SCHEDULERS:
        draft.set("scheduler.params.cycle_momentum", False, "no backend follows a cycled momentum")
    if source == entry.name:
        return (old, "as the JSON has it") if old is not None else (start.lr, start.basis)
    is_adam = source is None and (draft.is_client or "adam" in str(_type_before(draft)).lower())
    lr, why, basis = start.lr, start.source, start.basis
    if entry.has(Trait.ADAMW_RATES) and is_adam and old and not (entry.stock_types and old < lr):
        lr = float(old)
        why = basis = (
            "AdamW's rate: the optimizer stays"
            if entry.stock_types
            else f"AdamW's rate: {entry.optimizer_type}'s updates of a matrix are as large as AdamW's"
        )
    if draft.is_client:
        keep = " (AdamW's own is right too)" if entry.has(Trait.ADAMW_RATES) and not entry.stock_types else ""
        draft.note(
            f"the script's optimizer has the learning rate: set it to {lr:g}{keep}, for Trainer by learning_rate"
        )
    elif written == "auto":
        draft.note(f"set the script's learning rate to {lr:g}: Trainer and Accelerate write it in place of {at} auto")
    else:
        draft.set(at, lr, f"a rate to start from: {why}")
    _scale_schedule(draft, old=old, lr=lr)
    _scale_weight_decay(draft, old=old if old is not None or written == "auto" else _DEFAULT_LR, lr=lr)
    return lr, basis


def _type_before(draft: Draft) -> Any:
    """`optimizer.type` of the source."""
    return next((c.old for c in draft.changes if c.key == "optimizer.type"), draft.get("optimizer.type"))


def _scale_schedule(draft: Draft, *, old: float | None, lr: float) -> None:
    """Scales the learning rates of the scheduler as `lr` differs from `old`."""
    at, kind = "scheduler.params", draft.get("scheduler.type")
    for key in (peak_key(draft.get("scheduler")) or "", *OTHER_RATES):
        found: Any = draft.object(at).get(key)
        if old == lr or not is_written(found) or not any(found if isinstance(found, list) else [found]):
            continue
        if old:
            scaled = [_times(rate, lr / old) for rate in found] if isinstance(found, list) else _times(found, lr / old)
            draft.set(f"{at}.{key}", scaled, "it follows the learning rate")
        else:
            draft.note(f"{at}.{key} {shown(found)} is a learning rate of its own: choose it for {{type}}'s")
    if kind == "WarmupDecayLR" and draft.get(f"{at}.warmup_max_lr") is None:
        draft.set(f"{at}.warmup_max_lr", lr, "it follows the learning rate, which WarmupDecayLR's default does not")


def _scale_weight_decay(draft: Draft, *, old: float | None, lr: float) -> None:
    at = "optimizer.params.weight_decay"
    decay = draft.get(at)
    if not is_number(decay) or not decay:
        return
    if old is None:
        draft.note(f"a step multiplies weights by 1 - lr * weight_decay: choose {at} {decay:g} anew, for the new lr")
    elif old > 0:
        why = "so that lr * weight_decay, the decay of a step, stays as it was"
        draft.set(at, min(_MAX_DECAY, _times(decay, old / lr)), why)


def _times(value: float, factor: float) -> float:
    return float(f"{value * factor:.6g}")
