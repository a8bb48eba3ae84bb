"""The lines that an engine logs when it is made: a table of method, model, memory, write-back interval, learning rate
and ranks, then warnings.

Units are decimal: 1 GB is 10**9 bytes.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from deepspeed.utils import logger
from torch import nn

from ds_zo.backends.common.startup import StartupSummary
from ds_zo.config import Resolved
from ds_zo.config.learning_rates import far_rate
from ds_zo.config.marks import Trait
from ds_zo.logs import show, show_details, warn
from ds_zo.streaming.blocks import find_blocks

_LR_KEYS = ("lr", "initial_lr", "max_lr")
"""Keys of learning rates in a parameter group; torch's schedulers write the last two."""
_PEAK_LR_ATTRIBUTES = ("max_lrs", "org_lrs")
"""Attributes in which schedulers of DeepSpeed (and torch's CyclicLR) keep their largest learning rates."""
_HOW_TO_SEE_MORE = 'deepspeed.utils.set_log_level_from_string("debug") before deepspeed.initialize'


@dataclass(frozen=True)
class ModelFacts:
    """Facts of a module's parameters."""

    name: str
    """Class of the module."""
    num_parameters: int
    num_trained: int
    dtypes: tuple[torch.dtype, ...]
    """The dtype of most parameters first."""

    @classmethod
    def of(cls, module: nn.Module) -> ModelFacts:
        """Counts the elements of parameters. Call it before a backend is made: parameters of blocks that ranks shard
        are empty afterwards."""
        numels: Counter[torch.dtype] = Counter()
        for parameter in module.parameters():
            numels[parameter.dtype] += parameter.numel()
        num_trained = sum(p.numel() for p in module.parameters() if p.requires_grad)
        dtypes = tuple(dtype for dtype, _ in numels.most_common())
        return cls(type(module).__name__, numels.total(), num_trained, dtypes)


def log_start(engine: Any, model: ModelFacts) -> None:
    """Shows the start-up table, then warnings. Settings in full and the backend's details are shown at DEBUG."""
    config: Resolved = engine.resolved
    if not config.trains:
        place = "streamed from host memory" if config.stream else "kept on the device"
        show(f"ds_zo: no optimizer is given, so this engine only evaluates; its blocks are {place}")
        return
    show(startup_table(engine, model))
    groups, scheduler = engine.optimizer.param_groups, engine.lr_scheduler
    # The groups of an optimizer that the script made have values that the JSON does not.
    rates = {key: [group[key] for group in groups] for key in ("lr", "weight_decay")}
    details = (
        f"ds_zo: {model.num_trained:,} trainable parameters in {len(groups)} group(s), model dtype {config.dtype}, "
        f"autocast {config.autocast or 'off'}, ZeRO stage {config.zero_stage}, streaming "
        f"{'on' if config.stream else 'off'}, device {engine.device}\n"
        f"ds_zo: optimizer {config.optimizer.model_dump() | rates}"
        f"{' (lr as its scheduler starts)' if scheduler is not None else ''}, ds_zo section "
        f"{config.section.model_dump(exclude={'params'})}"
    )
    show_details("\n".join(filter(None, (details, engine.backend.describe()))))
    _warn(engine, model)


def _warn(engine: Any, model: ModelFacts) -> None:
    """Warns of settings that have no effect, and of a learning rate far from the usual ones."""
    config: Resolved = engine.resolved
    if config.ignored:
        warn(f"backend {config.backend} ignores {', '.join(config.ignored)}")
    if not config.entry.has(Trait.CLIPS_GRADIENTS) and config.gradient_clipping > 0:
        own = ": set clip_projected_grad instead" if config.entry.has(Trait.ZEROTH_ORDER) else ""
        text = f"gradient_clipping {config.gradient_clipping:g} does not change {config.entry.optimizer_type}{own}"
        warn(text, level=logging.WARNING if config.clipping_explicit else logging.INFO)
    if config.stream and not find_blocks(engine.module, config.section.stream.blocks):
        warn(
            "offload_param has no effect: the model has no list of like modules and stays on the device; name its "
            "blocks in ds_zo.stream.blocks, or remove offload_param"
        )
    slow = _slow_dtype(config, model) if engine.device.type == "cpu" else None
    given = "optimizer.params.lr" if config.params_at == "optimizer.params" else "the script's own optimizer"
    at = given if engine.lr_scheduler is None else f"{given} and its scheduler"
    is_known = not config.entry.stock_types or any("Adam" in kind.__name__ for kind in type(engine.optimizer).__mro__)
    rate = far_rate(config, _peak_lr(engine), at=at, num_trained=model.num_trained) if is_known else None
    for warning in (slow, rate, *config.warnings):
        if warning is not None:
            warn(warning)


def _slow_dtype(config: Resolved, model: ModelFacts) -> str | None:
    """The warning of a 16-bit model on a CPU that the JSON does not ask for, and of fp16."""
    dtype = next(iter(model.dtypes), torch.float32)
    if config.dtype is torch.float16:
        return "fp16 is slow on a CPU, got it there: leave fp16.enabled out for float32 (fp16.enabled)"
    if dtype is config.dtype or dtype.itemsize != 2:
        return None
    return (
        f"the model is in {_name(dtype)}, as its files are, and the JSON names no 16-bit dtype: on a CPU pass "
        f"dtype=torch.float32 to load_pretrained or from_pretrained, or set bf16.enabled (bf16.enabled)"
    )


def _peak_lr(engine: Any) -> float:
    """The largest learning rate found in the parameter groups and in the attributes of the scheduler.

    Most schedules begin at a smaller one. A schedule may reach a larger one that none of its attributes holds.
    """
    found = [group[key] for group in engine.optimizer.param_groups for key in _LR_KEYS if key in group]
    found += [lr for name in _PEAK_LR_ATTRIBUTES for lr in getattr(engine.lr_scheduler, name, ())]
    return max(map(float, found), default=0.0)


def startup_table(engine: Any, model: ModelFacts) -> str:
    """One line that names the backend, then one aligned line per row."""
    config: Resolved = engine.resolved
    summary: StartupSummary = engine.backend.startup_summary()
    ranks = summary.ranks or f"{engine.dp_world_size}, each with its own batch"
    details_follow = logger.getEffectiveLevel() <= logging.DEBUG
    rows = {
        "method": ": ".join(filter(None, (config.entry.optimizer_type, summary.settings))),
        "model": _model(config, model),
        "weights": summary.weights,
        "GPU" if engine.device.type == "cuda" else "device": _device_memory(config, summary),
        "host": _host_memory(summary),
        "write-back": summary.write_back,
        "learning rate": _learning_rate(engine),
        "batch": _batch(engine),
        "ranks": "1" if engine.dp_world_size == 1 else ranks,
        "details": None if details_follow else _HOW_TO_SEE_MORE,
    }
    shown = {name: text for name, text in rows.items() if text is not None}
    width = max(map(len, shown))
    lines = [f"  {name:<{width}}  {text}" for name, text in shown.items()]
    return "\n".join([f"ds_zo: backend {config.backend} on {engine.device}", *lines])


def format_bytes(nbytes: int) -> str:
    """In GB of 10**9 bytes; below 0.1 GB in MB, and below 0.1 MB in kB."""
    if nbytes >= 10**8:
        return f"{nbytes / 1e9:.2f} GB"
    return f"{nbytes / 1e6:.1f} MB" if nbytes >= 10**5 else f"{nbytes / 1e3:.1f} kB"


def _model(config: Resolved, model: ModelFacts) -> str:
    if model.num_trained == model.num_parameters:
        trained = "all trained"
    else:
        share = model.num_trained / max(1, model.num_parameters)
        trained = f"{model.num_trained:,} trained ({share:.2%})"
    autocast = "" if config.autocast is None else f", autocast {_name(config.autocast)}"
    dtypes = " and ".join(map(_name, model.dtypes)) or "no dtype"
    return f"{model.name}, {model.num_parameters:,} parameters, {trained}, {dtypes}{autocast}"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _sizes(sizes: Mapping[str, int]) -> str:
    """The sum, and the bytes of each use if there are several."""
    total = format_bytes(sum(sizes.values()))
    if len(sizes) < 2:
        return f"{total} ({next(iter(sizes), 'no tensors')})"
    return f"{total} ({', '.join(f'{use} {format_bytes(nbytes)}' for use, nbytes in sizes.items())})"


def _device_memory(config: Resolved, summary: StartupSummary) -> str:
    budget = config.section.stream.device_memory_gb
    limit = "" if budget is None else f" of a budget of {budget:g} GB"
    return f"{_sizes(summary.device_bytes)}{limit}; {summary.added_by_steps} come on top"


def _host_memory(summary: StartupSummary) -> str:
    if not summary.host_bytes:
        return "0 GB: weights and states are on the device"
    pinned = f"{format_bytes(summary.pinned_bytes)} pinned" if summary.pinned_bytes else "not pinned"
    if summary.ring_bytes:
        ring = f"a pinned ring of {summary.ring_bytes / 2**20:.0f} MiB over pageable memory"
        pinned = f"{pinned}, the rest through {ring}" if summary.pinned_bytes else ring
    return ", ".join(filter(None, (_sizes(summary.host_bytes), pinned, summary.host_note)))


def _learning_rate(engine: Any) -> str:
    groups, scheduler = engine.optimizer.param_groups, engine.lr_scheduler
    lr = ", ".join(f"{rate:g}" for rate in dict.fromkeys(float(group["lr"]) for group in groups))
    if scheduler is None:
        lr = f"{lr}, no scheduler"
    else:
        lr = f"{lr} at first, {type(scheduler).__name__} (largest known {_peak_lr(engine):g})"
    decays = dict.fromkeys(float(group["weight_decay"]) for group in groups)
    return lr if not any(decays) else f"{lr}, weight decay {', '.join(f'{decay:g}' for decay in decays)}"


def _batch(engine: Any) -> str:
    batch = f"{engine.train_micro_batch_size_per_gpu()} samples per rank and micro-batch"
    accumulation = engine.gradient_accumulation_steps()
    return batch if accumulation == 1 else f"{batch}, {accumulation} micro-batches a step"
