"""What one process measures for LSP and those beside it: tokens a second, memory, and what of a step does not overlap.

[Note: taken apart by switching off] Work that overlaps has no time of its own. What of it a step waits for is the time
that the step saves when the work is left out: first the CPU's Adam, then the copies too. What remains above forward and
backward is the GPU's own update (for LSP: compressing and applying). The kinds of step take turns, so that a machine
that grows slower does so for all of them; a difference below `exposed_spread_s`, by which the same steps differ between
turns, is noise, and may be negative.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

from ds_zo.bench.contenders import ALL, Contender, config_of, shared_config
from ds_zo.bench.measure import host_peak_gb, measure_steps, start_device, synchronize
from ds_zo.bench.rows import Row
from ds_zo.bench.shapes import materialise, random_model
from ds_zo.bench.trainer import (
    Batch,
    Trainer,
    drop_gradients,
    loss_of,
    part_seconds,
    random_batch,
    set_checkpointing,
)
from ds_zo.planner.shapes import config_of as shape_config


def speed(
    *,
    method: str,
    shape: str,
    batch: int,
    length: int,
    params: Mapping[str, Any] | None = None,
    clipping: float = 1.0,
    warmup: int = 4,
    steps: int = 12,
    max_s: float | None = None,
    then_batch: int | None = None,
    take_apart: bool = False,
    cap_gb: float | None = None,
    streams: bool = False,
    compiled: bool = False,
    overrides: Mapping[str, Any] | None = None,
    device: str = "cuda",
) -> Row:
    """One method on random weights and one random batch, checkpointed. `method` is `forward_backward`, `adamw-torch` or
    a contender's name; `params` changes its optimizer's. `streams`: weights on the host, within `cap_gb` of the device.
    `compiled`: blocks are, as `ds_zo.compile_blocks` has them; a compiler that fails ends the case. `max_s`: of timed
    steps, of which there are then fewer. `then_batch`: the same engine goes on with batches of that size, whose row is
    under `then`: to set up is what some cases take longest for."""
    where = start_device(device, cap_gb=cap_gb)
    model = _model(shape, length=length, overrides=overrides, device=where, lazy=streams)
    numel = sum(p.numel() for p in model.parameters())
    host_before_gb = host_peak_gb()
    begin = time.perf_counter()
    set_checkpointing(model, True)
    model.train()
    if method in _WITHOUT_DEEPSPEED:
        trainer = _WITHOUT_DEEPSPEED[method](model, clipping)
    else:
        stream: dict[str, Any] | None = {"device_memory_gb": cap_gb} if streams else None
        options: Row = {"params": params or {}, "stream": stream, "compiled": compiled}
        trainer = _engine(ALL[method], model, batch=batch, clipping=clipping, **options)
    if compiled:
        trainer.compile(model)
    ids = random_batch(model, batch, length, where)
    synchronize(where)
    load_s = time.perf_counter() - begin
    trainer.step(ids)
    synchronize(where)
    first_step_s = time.perf_counter() - begin - load_s
    counts = _Counts(warmup, steps, max_s, period=ALL[method].period if method in ALL else 1)
    measured = _measured(trainer, ids, counts, where)
    row: Row = {
        "method": method,
        "shape": shape,
        "parameters": numel,
        "settings": trainer.settings,
        "gradient_clipping": clipping,
        "compiled": compiled,
        "cap_gb": cap_gb,
        "load_s": load_s,
        "first_step_s": first_step_s,
        **measured,
        "host_gb_added": measured["host_peak_gb"] - host_before_gb,
        **trainer.facts,
    }
    if take_apart:
        row |= _taken_apart(trainer, ids, counts, where)
    if then_batch is not None:
        row["then"] = _measured(trainer, random_batch(model, then_batch, length, where), counts, where)
        row["then"]["host_gb_added"] = row["then"]["host_peak_gb"] - host_before_gb
    biases = getattr(getattr(trainer.engine, "backend", None), "biases", None)
    if biases:
        row |= {
            "fit_s": trainer.engine.backend.fit_s,
            "bias_median": statistics.median(biases.values()),
            "bias_max": max(biases.values()),
        }
    return row


@dataclass(frozen=True)
class _Counts:
    warmup: int
    steps: int
    max_s: float | None
    period: int
    """See `measure_steps`."""

    def measure(self, trainer: Trainer, ids: Batch, where: torch.device, *, warmup: int) -> Row:
        options: Row = {"steps": self.steps, "max_s": self.max_s, "period": self.period, "device": where}
        return measure_steps(lambda: trainer.step(ids), warmup=warmup, **options)


def _measured(trainer: Trainer, ids: Batch, counts: _Counts, where: torch.device) -> Row:
    """Of batches like this one. A step is the median's, but a mean where steps differ in turns."""
    measured = counts.measure(trainer, ids, where, warmup=counts.warmup - 1)
    if counts.period > 1:
        measured["step_s"] = measured["step_wall_s"]
    batch, length = ids["input_ids"].shape
    repeats = 4 if counts.max_s is None or 4 * measured["step_s"] < counts.max_s else 2
    parts = part_seconds(trainer, lambda: ids, where, steps=-(-repeats // counts.period) * counts.period)
    rates = {"batch": batch, "length": length, "tokens_per_s": batch * length / measured["step_s"]}
    return {**rates, **measured, **parts}


# [Note: taken apart by switching off]


_TURNS = 3


def _taken_apart(trainer: Trainer, ids: Batch, counts: _Counts, where: torch.device) -> Row:
    is_lsp = hasattr(getattr(trainer.engine, "backend", None), "apply_pending_updates")
    left_out = {"as it is": (), "no CPU": (_no_lsp_adam if is_lsp else _no_zero_adam,)}
    if is_lsp:
        left_out["no copies"] = (_no_lsp_adam, _no_lsp_copies)
    fewer = replace(counts, steps=-(-counts.steps // _TURNS), max_s=counts.max_s and counts.max_s / _TURNS)
    turns: dict[str, list[list[float]]] = {name: [] for name in left_out}
    for _ in range(_TURNS):
        for name, parts in left_out.items():
            with ExitStack() as stack:
                for part in parts:
                    stack.enter_context(part(trainer.engine))
                turns[name].append(fewer.measure(trainer, ids, where, warmup=2)["seconds"])
    as_is, no_cpu, *rest = (statistics.median(chain.from_iterable(found)) for found in turns.values())
    medians = [statistics.median(found) for found in turns["as it is"]]
    row: Row = {"exposed_cpu_s": as_is - no_cpu, "rest_s": no_cpu, "apart_step_s": as_is}
    if rest:
        row |= {"exposed_copy_s": no_cpu - rest[0], "rest_s": rest[0]}
    return {**row, "exposed_spread_s": max(medians) - min(medians), "apart_seconds": turns}


@contextmanager
def _no_lsp_adam(engine: Any) -> Iterator[None]:
    """Directions stay those of the last step that had them."""
    from ds_zo.backends.lsp.host_group import HostGroup

    with patch.object(HostGroup, "_update", lambda group: torch.ones(len(group._active))):
        yield
        engine.backend.apply_pending_updates()


@contextmanager
def _no_lsp_copies(engine: Any) -> Iterator[None]:
    from ds_zo.backends.lsp.host_group import HostGroup, TransferStreams

    def upload(streams: Any, group: Any, source: torch.Tensor) -> Any:
        free = (buffer for buffer in streams._upload_buffers if buffer.group is None)
        buffer = next(free, streams._upload_buffers[0])
        buffer.group = group
        return buffer

    def download(group: Any) -> None:
        for matrix in group.matrices:
            matrix.parameter.grad = None

    with patch.object(TransferStreams, "upload", upload), patch.object(HostGroup, "_download", download):
        yield
        engine.backend.apply_pending_updates()


@contextmanager
def _no_zero_adam(engine: Any) -> Iterator[None]:
    """ZeRO-Offload without its CPU step: gradients go down, parameters come up."""
    with patch.object(engine.optimizer.optimizer, "step", lambda *args, **kwargs: None):
        yield


# Who trains


def _engine(
    contender: Contender,
    model: Any,
    *,
    batch: int,
    params: Mapping[str, Any],
    clipping: float,
    stream: dict[str, Any] | None,
    compiled: bool,
) -> Trainer:
    import deepspeed

    import ds_zo  # noqa: F401

    dtype = {torch.bfloat16: "bf16", torch.float32: "fp32"}[next(model.parameters()).dtype]
    config = config_of(contender, shared_config(batch=batch, dtype=dtype, gradient_clipping=clipping))
    config["optimizer"]["params"] |= params
    if stream is not None:
        config["zero_optimization"]["offload_param"] = {"device": "cpu", "pin_memory": True}
        config["ds_zo"] = {"stream": stream}
    is_lsp = contender.backend == "lsp"
    if compiled and is_lsp:
        config["ds_zo"] = {**config.get("ds_zo", {}), "compile_blocks": True}
    engine, *_ = deepspeed.initialize(model=model, model_parameters=list(model.parameters()), config=config)
    engine.train()
    facts: Row = {"config": config}
    if is_lsp:
        facts |= {"described": engine.backend.describe(), **engine.backend.footprint()}
    return Trainer(loss_of(engine), engine.backward, engine.step, contender.settings, engine, facts=facts)


def _forward_backward(model: nn.Module, clipping: float) -> Trainer:
    """The ceiling: nothing is updated."""
    drop_gradients(model)
    return Trainer(loss_of(model), torch.Tensor.backward, lambda: None, "gradients dropped, no update")


def _torch_adamw(model: nn.Module, clipping: float) -> Trainer:
    """The fastest AdamW that torch has: weights, gradients and moments in bf16, nothing in float32. It trains worse,
    since small updates are rounded away."""
    parameters = list(model.parameters())
    fused = parameters[0].device.type == "cuda"
    optimizer = torch.optim.AdamW(parameters, lr=1e-4, weight_decay=0.0, fused=fused)

    def update() -> None:
        if clipping > 0:
            nn.utils.clip_grad_norm_(parameters, clipping, foreach=True)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    settings = "torch alone, fused kernel, weights and moments in bf16, no master weights"
    return Trainer(loss_of(model), torch.Tensor.backward, update, settings)


_WITHOUT_DEEPSPEED: dict[str, Callable[[nn.Module, float], Trainer]] = {
    "forward_backward": _forward_backward,
    "adamw-torch": _torch_adamw,
}


def _model(
    shape: str, *, length: int, overrides: Mapping[str, Any] | None, device: torch.device, lazy: bool
) -> nn.Module:
    """`lazy`: on the meta device, drawn block by block when a streaming engine reads it."""
    config = shape_config(shape, max_length=max(length, 2048))
    for name, value in (overrides or {}).items():
        setattr(config, name, value)
    config._attn_implementation = "sdpa"
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    model = random_model(config, dtype=dtype, device=device)
    return model if lazy else materialise(model, device)
