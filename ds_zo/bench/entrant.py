"""Runs one contender's case in its child process: build, warm up, time steps, time their parts, profile."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ds_zo.bench.builds import load_extensions
from ds_zo.bench.contenders import ALL, Contender, settings_of
from ds_zo.bench.measure import cap_device_memory, cpu_adam_gparams_per_s, link_gbps, measure_steps, start_device
from ds_zo.bench.shapes import config_of_model, lazy_model, materialise
from ds_zo.bench.traces import profile_steps
from ds_zo.bench.trainer import Batch, Trainer, engine_trainer, part_seconds, set_checkpointing, torch_adamw_trainer
from ds_zo.bench.workload import batches_of
from ds_zo.planner.models import DTYPES
from ds_zo.records.rows import Row
from ds_zo.versions import no_init_weights

EXTRA_STEPS = ((0.2, 4), (3.0, 2), (math.inf, 1))
"""(seconds of a step at most, number of steps whose parts are timed). As many more steps are profiled."""
_LONGEST_AGEING = 16
_FIRST_ONES = 2


@dataclass(frozen=True)
class EntrantSpec:
    """The settings that all contenders of a table share."""

    model: str
    batch: int
    length: int
    steps: int
    warmup: int
    dtype: str
    device: str
    layers: int | None = None
    device_memory_gb: float | None = None
    checkpointing: bool = True
    data: str | None = None
    seed: int = 0
    profile: bool = True
    accumulation: int = 1
    """Micro-batches of a step: `batch` is divided by it."""
    starts_uncapped: bool = False
    """Whether `device_memory_gb` limits the steps only, and the model and its engine are made on the whole card."""
    max_s: float | None = None
    """Most seconds that the timed steps may take: fewer steps are timed if they would take longer. None: no limit."""

    @property
    def where(self) -> torch.device:
        return torch.device(self.device, 0) if self.device == "cuda" else torch.device(self.device)

    def lazy_model(self) -> nn.Module:
        return lazy_model(
            self.model,
            dtype=DTYPES[self.dtype],
            device=self.where,
            num_layers=self.layers,
            max_length=self.length,
            seed=self.seed,
        )


def measure_machine(*, device: str) -> Row:
    """Measures the bandwidth of the link and of the CPU's Adam, in the same run as the cases that they explain."""
    if device == "cuda":
        load_extensions()
    row: Row = {"cpu_adam_gparams_per_s": cpu_adam_gparams_per_s(numel=2**27 if device == "cuda" else 2**20)}
    if device == "cuda":
        row["link_gbps"] = link_gbps(torch.device("cuda", 0))
        row["gpu_total_gb"] = torch.cuda.get_device_properties(0).total_memory / 1e9
    row["omp_num_threads"] = os.environ.get("OMP_NUM_THREADS")
    return row


def run_contender(
    *, contender: str, config: Row, spec: Row, change_model: Callable[[nn.Module], nn.Module] | None = None
) -> Row:
    """Measures one contender. `config` is its whole DeepSpeed JSON, `spec` the fields of `EntrantSpec`. `change_model`
    is called with the model before the engine is made, and may add adapters to it."""
    wanted, entrant = EntrantSpec(**spec), ALL[contender]
    start_device(wanted.device, cap_gb=None if wanted.starts_uncapped else wanted.device_memory_gb, expands=True)
    torch.manual_seed(wanted.seed)
    clock = _Clock()
    trainer = _peer(entrant, config, wanted) if entrant.peer else _engine(entrant, config, wanted, change_model)
    if wanted.starts_uncapped and wanted.device == "cuda" and wanted.device_memory_gb is not None:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(wanted.where)
        cap_device_memory(wanted.device_memory_gb, wanted.where)
    clock.lap("load")

    model_config = config_of_model(wanted.model, num_layers=wanted.layers, max_length=wanted.length)
    sizes, data = {"batch": wanted.batch, "length": wanted.length}, None if wanted.data is None else Path(wanted.data)
    batches = batches_of(wanted.model, model_config, **sizes, data=data, seed=wanted.seed)
    num_done = 0
    micro_batch = wanted.batch // wanted.accumulation
    losses: list[torch.Tensor] = []

    def batch() -> Batch:
        nonlocal num_done
        index, part = divmod(num_done, wanted.accumulation)
        num_done += 1
        ids = batches(index)[part * micro_batch : (part + 1) * micro_batch].to(wanted.where, non_blocking=True)
        return {"input_ids": ids, "labels": ids}

    def step() -> torch.Tensor:
        parts = [trainer.step(batch()) for _ in range(wanted.accumulation)]
        loss = parts[0].clone() if len(parts) == 1 else torch.stack(parts).mean()
        losses.append(loss)
        return loss

    measured = measure_steps(
        step,
        warmup=wanted.warmup,
        steps=wanted.steps,
        device=wanted.where,
        max_s=wanted.max_s,
        period=entrant.period,
        ages_after=_ageing(entrant, config, trainer.engine),
    )
    clock.lap("steps")
    measured["losses"] = [round(float(loss), 5) for loss in losses]
    tokens = wanted.batch * wanted.length
    row: Row = {
        "contender": contender,
        "title": entrant.title,
        "settings": settings_of(
            entrant, os.environ, accumulation=wanted.accumulation, starts_uncapped=wanted.starts_uncapped
        ),
        **trainer.facts,
        "tokens_per_s": tokens / measured["step_s"],
        "tokens_per_s_mean": tokens / measured["step_wall_s"],
        "load_s": clock.laps["load"],
        **measured,
    }
    few = next(number for longest_s, number in EXTRA_STEPS if measured["step_s"] < longest_s)
    num_extra = max(entrant.period, few)
    row |= part_seconds(trainer, batch, wanted.where, steps=num_extra, accumulation=wanted.accumulation)
    clock.lap("parts")
    if wanted.profile and wanted.device == "cuda":
        try:
            row |= profile_steps(step, steps=num_extra)
        except Exception as error:  # the measurements without the profiler are kept
            row["profile_error"] = f"{type(error).__name__}: {error}"
        clock.lap("profile")
    return row | {"laps_s": clock.laps}


class _Clock:
    """Seconds of a case's phases. The rest of `wall_s` is the start of CUDA and the release of memory."""

    def __init__(self) -> None:
        self.laps: dict[str, float] = {}
        self._last = time.perf_counter()

    def lap(self, name: str) -> None:
        now = time.perf_counter()
        self.laps[name] = round(now - self._last, 2)
        self._last = now


def _engine(
    entrant: Contender, config: Row, spec: EntrantSpec, change_model: Callable[[nn.Module], nn.Module] | None
) -> Trainer:
    model = _model(entrant, config, spec)
    if change_model is not None:
        model = change_model(model)
    num_parameters = sum(getattr(p, "ds_numel", p.numel()) for p in model.parameters())
    set_checkpointing(model, spec.checkpointing)
    trainer = engine_trainer(model, config, entrant.settings)
    as_given = _starts_as_given(model) if entrant.backend is None else None
    trainer.facts = _facts(_classes(trainer.engine.optimizer), starts_as_given=as_given, parameters=num_parameters)
    return _offloading_activations(trainer) if entrant.offloads_activations else trainer


def _offloading_activations(trainer: Trainer) -> Trainer:
    """Keeps the inputs of recomputed blocks in host memory from the forward pass to the end of the backward pass."""
    from deepspeed.runtime.activation_checkpointing.offload_activations import CheckpointHiddenStatesOffload

    manager: Any = CheckpointHiddenStatesOffload()

    def forward(batch: Batch) -> torch.Tensor:
        manager.__enter__()
        return trainer.forward(batch)

    def backward(loss: torch.Tensor) -> None:
        trainer.backward(loss)
        trainer.facts["activations_offloaded_gb"] = manager.stats.offloaded_bytes / 1e9
        manager.__exit__(None, None, None)

    return replace(trainer, forward=forward, backward=backward)


def _facts(running: str, *, starts_as_given: bool | None, parameters: int) -> Row:
    """Facts for the row. `running` names the classes of the optimizer, so that a setting that DeepSpeed ignored can be
    seen. `starts_as_given`: whether the weights equal those that it was given; None: they cannot be compared."""
    return {"running": running, "starts_as_given": starts_as_given, "parameters": parameters}


def _ageing(entrant: Contender, config: Row, engine: Any) -> Callable[[], int] | None:
    """Returns a function that gives the warm-up steps that the engine needs; None: no more than any method. ZO's steps
    cost more until every streamed block has been written back once, because past updates are replayed. The first step
    of ZeRO-Offload touches host memory that later steps reuse, and at stage 3 records what they prefetch. LSP fits its
    projectors in the first micro-batches, and tests them in the next."""
    if entrant.backend == "zo":
        return partial(_written_back_after, engine)
    if entrant.backend == "lsp":
        return partial(_fitted_after, engine, config["gradient_accumulation_steps"])
    return (lambda: _FIRST_ONES) if "offload_optimizer" in config["zero_optimization"] else None


def _fitted_after(engine: Any, accumulation: int) -> int:
    if not engine.backend.num_projected:
        return _FIRST_ONES
    return -(-(engine.backend.settings.calibration_batches + 1) // accumulation) + 1


def _written_back_after(engine: Any) -> int:
    store = engine.backend.store
    streams = any(unit.streamed for unit in store.blocks.placement.blocks)
    return min(store.interval, _LONGEST_AGEING) if streams else 0


def _starts_as_given(model: nn.Module) -> bool | None:
    """Compares the smallest matrix with its source; None: there is none to compare. DeepSpeed 0.19.8 flattens ZenFlow's
    matrices transposed and reads them back as if they were not (stage 1 and 2)."""
    source = getattr(model, "_ds_zo_source", None)
    matrices = [(p.numel(), name, p) for name, p in model.named_parameters() if p.ndim == 2]  # none at stage 3
    if source is None or not matrices:
        return None
    _, name, p = min(matrices, key=lambda found: found[0])
    return torch.equal(p.detach(), source(name).to(p))


def _classes(optimizer: Any) -> str:
    """Names the classes of an optimizer and of those it wraps, as `Outer(Inner)`."""
    inner = getattr(optimizer, "optimizer", None)
    name = type(optimizer).__name__
    return f"{name}({_classes(inner)})" if inner is not None else name


def _model(entrant: Contender, config: Row, spec: EntrantSpec) -> nn.Module:
    """Makes the model in the form that the method needs; the weights are the same. Streaming backends of ds_zo read the
    weights themselves, ZeRO-3 builds the model in partitions, the other methods have it on the device."""
    lazy = spec.lazy_model()
    streams = entrant.backend is not None and "offload_param" in config["zero_optimization"]
    if streams:
        return lazy
    if entrant.backend is None and config["zero_optimization"]["stage"] == 3:
        return _partitioned(lazy, config, spec)
    return materialise(lazy, spec.where)


def _partitioned(lazy: nn.Module, config: Row, spec: EntrantSpec) -> nn.Module:
    """Builds the model under `zero.Init`, so that it is never whole on the device, and gives it the values of `lazy`.
    Buffers are copied too: `zero.Init` would make them in `dtype`."""
    import deepspeed
    from transformers import AutoModelForCausalLM

    deepspeed.init_distributed()
    dtype = DTYPES[spec.dtype]
    # Initialising a parameter that is already partitioned can fail (OPT's padding).
    with deepspeed.zero.Init(config_dict_or_path=config, dtype=dtype), no_init_weights():
        model: Any = AutoModelForCausalLM.from_config(lazy.config, dtype=dtype)
    model.tie_weights()
    for name, buffer in lazy.named_buffers():
        owner, _, leaf = name.rpartition(".")
        model.get_submodule(owner)._buffers[leaf] = buffer.to(spec.where)
    source = getattr(lazy, "_ds_zo_source", None) or dict(lazy.named_parameters()).__getitem__
    for name, p in model.named_parameters():
        with deepspeed.zero.GatheredParameters([p], modifier_rank=0), torch.no_grad():
            p.copy_(source(name))
    partitioned: nn.Module = model
    return partitioned


def _peer(entrant: Contender, config: Row, spec: EntrantSpec) -> Trainer:
    from ds_zo.bench.lomo_optim import lomo_optim_trainer

    model = materialise(spec.lazy_model(), spec.where)
    set_checkpointing(model, spec.checkpointing)
    model.train()
    lr = config["optimizer"]["params"]["lr"]
    if entrant.peer == "torch":
        clipping = config["gradient_clipping"]
        trainer = torch_adamw_trainer(model, lr=lr, clipping=clipping, accumulation=spec.accumulation)
    else:
        trainer = lomo_optim_trainer(model, lr=lr)
    num_parameters = sum(p.numel() for p in model.parameters())
    trainer.facts |= _facts(entrant.peer or "", starts_as_given=None, parameters=num_parameters)
    return trainer
