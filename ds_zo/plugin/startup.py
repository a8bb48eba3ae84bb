"""The table that an engine logs when it is made: method, model, memory, write-back interval, learning rate, ranks.

Units are decimal: 1 GB is 10**9 bytes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ds_zo.backends.common.startup import StartupSummary
from ds_zo.config import Resolved

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


@dataclass(frozen=True)
class EngineFacts:
    """Facts that the engine knows and the backend does not."""

    model: ModelFacts
    device: torch.device
    param_groups: Sequence[Mapping[str, Any]]
    scheduler: str | None
    """Class of the learning-rate scheduler; None without one."""
    peak_lr: float
    """The largest learning rate that is known; a scheduler may begin with a smaller one."""
    micro_batch: int
    accumulation: int
    num_ranks: int


def startup_table(
    config: Resolved, facts: EngineFacts, summary: StartupSummary, *, details_follow: bool = False
) -> str:
    """One line that names the backend, then one aligned line per row. `details_follow`: the logger's level is DEBUG, so
    that the table need not say how to see more."""
    rows = {
        "method": ": ".join(filter(None, (config.entry.optimizer_type, summary.settings))),
        "model": _model(config, facts.model),
        "weights": summary.weights,
        "GPU" if facts.device.type == "cuda" else "device": _device_memory(config, summary),
        "host": _host_memory(summary),
        "write-back": summary.write_back,
        "learning rate": _learning_rate(facts),
        "batch": _batch(facts),
        "ranks": "1" if facts.num_ranks == 1 else summary.ranks or f"{facts.num_ranks}, each with its own batch",
        "details": None if details_follow else _HOW_TO_SEE_MORE,
    }
    shown = {name: text for name, text in rows.items() if text is not None}
    width = max(map(len, shown))
    lines = [f"  {name:<{width}}  {text}" for name, text in shown.items()]
    return "\n".join([f"ds_zo: backend {config.backend} on {facts.device}", *lines])


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


def _learning_rate(facts: EngineFacts) -> str:
    rates = dict.fromkeys(float(group["lr"]) for group in facts.param_groups)
    decays = dict.fromkeys(float(group["weight_decay"]) for group in facts.param_groups)
    lr = ", ".join(f"{rate:g}" for rate in rates)
    if facts.scheduler is not None:
        lr = f"{lr} at first, {facts.scheduler} (largest known {facts.peak_lr:g})"
    else:
        lr = f"{lr}, no scheduler"
    return lr if not any(decays) else f"{lr}, weight decay {', '.join(f'{decay:g}' for decay in decays)}"


def _batch(facts: EngineFacts) -> str:
    batch = f"{facts.micro_batch} samples per rank and micro-batch"
    return batch if facts.accumulation == 1 else f"{batch}, {facts.accumulation} micro-batches a step"
