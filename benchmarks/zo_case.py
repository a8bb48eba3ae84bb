"""One measured case: a model of a published shape with random weights, a method, some steps, and a row of numbers."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

from benchmarks.ablations import initialize
from benchmarks.training_case import TrainingCase, moved_bytes, slow_host_row, token_ids, traffic_row
from ds_zo.backends.zo.backend import ZOBackend
from ds_zo.backends.zo.block_store import ZOBlockStore
from ds_zo.bench.measure import link_gbps, measure_steps, start_device, synchronize
from ds_zo.bench.shapes import materialise
from ds_zo.planner.models import DTYPES
from ds_zo.planner.shapes import config_of
from ds_zo.records.rows import Row

Step = Callable[[torch.Tensor], torch.Tensor]

_ZO_EPS = 1e-3
_SETTLING_STEPS = 2
"""The first step compares two ways to run, and an automatic placement moves blocks after it."""
_LONGEST_WARMUP = 16


@dataclass
class PreparedMethod:
    """A method made ready on a model."""

    step: Step
    """One training step on a batch of token ids; returns the loss."""
    engine: Any = None
    """DeepSpeed's, where the method is one of ours."""
    facts: Row = field(default_factory=dict)


def run_case(**settings: Any) -> Row:
    """Measures one case in this process. The row has `points` for `inputs`, and `filled` for `fill_steps`."""
    case = TrainingCase(**settings)
    where = start_device(case.device, cap_gb=case.cap_gb)
    model: Any = case.lazy_model(where)
    config = model.config
    is_zo = case.method == "zo"
    row: Row = {
        "shape": case.shape,
        "method": case.method,
        "dtype": case.dtype,
        "parameters": sum(p.numel() for p in model.parameters()),
        "layers": config.num_hidden_layers,
        "full_layers": config_of(case.shape).num_hidden_layers,
        "input": "random token ids",
        "resident": not is_zo or case.resident,
        "stream": dict(case.stream or {}) if is_zo else None,
        "cap_gb": case.cap_gb,
    }
    if lacking := _lacking_memory(row, where, case.cap_gb):
        return row | lacking
    start = time.perf_counter()
    if is_zo:
        options: Row = {"stream": case.stream, "params": case.params, "resident": case.resident}
        prepared = zo(model, dtype=case.dtype, batch=case.pairs[0][0], lr=case.rate, without=case.without, **options)
    else:
        prepared = mezo(model, lr=case.rate)
    row |= {"load_s": time.perf_counter() - start, **prepared.facts}
    points = []
    for i, (b, t) in enumerate(case.pairs):
        ids = token_ids(model, b, t, where)
        points.append(_measure(prepared, ids, warmup=case.warmup, steps=case.steps, age=case.age and i == 0))
    row |= points[0] | {"points": points if case.inputs else None}
    if case.fill_steps and where.type == "cuda":
        _store_of(prepared).may_fill_device = True
        ids, steps = token_ids(model, *case.pairs[0], where), case.fill_steps - _SETTLING_STEPS
        row["filled"] = _measure(prepared, ids, warmup=_SETTLING_STEPS, steps=steps, age=False)
    if case.slow_host:
        ids = token_ids(model, *case.pairs[0], where)
        row |= slow_host_row(partial(prepared.step, ids), steps=case.steps, device=where)
    return row


def _lacking_memory(row: Row, device: torch.device, cap_gb: float | None) -> Row | None:
    """What MeZO would need where that is more than there is: recorded, not tried."""
    if row["method"] != "mezo" or device.type != "cuda":
        return None
    there = torch.cuda.get_device_properties(device).total_memory / 1e9
    there = there if cap_gb is None else min(there, cap_gb)
    needed = row["parameters"] * DTYPES[row["dtype"]].itemsize / 1e9
    return {"fits": False, "needs_gb": needed, "device_gb": there} if needed > there else None


def zo(
    model: nn.Module,
    *,
    dtype: str,
    batch: int,
    lr: float,
    stream: Mapping[str, Any] | None,
    params: Mapping[str, Any] | None = None,
    resident: bool = False,
    checkpoint: Mapping[str, Any] | None = None,
    without: Sequence[str] = (),
) -> PreparedMethod:
    """`without`: see `benchmarks.ablations`."""
    zero = {"stage": 0} if resident else {"stage": 0, "offload_param": {"device": "cpu", "pin_memory": True}}
    json: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": batch,
        "steps_per_print": 10**9,
        "optimizer": {"type": "ZO", "params": {"lr": lr, "zo_eps": _ZO_EPS, **(params or {})}},
        "zero_optimization": zero,
        "ds_zo": {"stream": dict(stream or {}), "checkpoint": dict(checkpoint or {})},
    }
    if dtype != "fp32":
        json[dtype] = {"enabled": True}
    engine = initialize(without, model=model, model_parameters=model.parameters(), config=json)
    engine.train()

    def step(ids: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = engine(input_ids=ids, labels=ids).loss
        engine.backward(loss)
        engine.step()
        return loss

    facts = {"master": (stream or {}).get("master", "split"), "optimizer_params": dict(params or {})}
    return PreparedMethod(step, engine, facts)


def mezo(model: nn.Module, *, lr: float) -> PreparedMethod:
    """In-memory MeZO with plain SDPA and no KV cache."""
    from benchmarks.references import InMemoryMeZO

    model = materialise(model)
    trainer = InMemoryMeZO(model.eval(), lr=lr, zo_eps=_ZO_EPS)
    return PreparedMethod(lambda ids: trainer.step(lambda: model(input_ids=ids, labels=ids, use_cache=False).loss))


def _measure(prepared: PreparedMethod, ids: torch.Tensor, *, warmup: int, steps: int, age: bool) -> Row:
    """`age`: warm up until every block has been written back once, as in the middle of a run."""
    block_store = None if prepared.engine is None else _store_of(prepared)
    step = partial(prepared.step, ids)
    start = time.perf_counter()
    step()
    synchronize(ids.device)
    first_step_s = time.perf_counter() - start
    for _ in range(min(warmup, _SETTLING_STEPS) - 1):
        step()
    if age and block_store is not None and any(unit.streamed for unit in block_store.placement.blocks):
        warmup = max(warmup, min(block_store.interval, _LONGEST_WARMUP))
    for _ in range(warmup - _SETTLING_STEPS):
        step()
    before = moved_bytes(block_store)
    row: Row = {"batch": ids.shape[0], "length": ids.shape[1], "warmup": warmup, "steps": steps}
    synchronize(ids.device)
    row |= {"first_step_s": first_step_s, "warmup_s": time.perf_counter() - start}
    row |= measure_steps(step, warmup=0, steps=steps, device=ids.device)
    row["tokens_per_s"] = ids.numel() / row["step_s"]
    if block_store is None:
        return row
    blocks = block_store.placement.blocks
    return row | {
        **traffic_row(block_store, before, steps=steps),
        "interval": block_store.interval,
        "tempo": block_store.step_time,
        "host_gb": block_store.store.nbytes / 1e9,
        "pinned_gb": block_store.store.pinned_nbytes / 1e9,
        "resident_blocks": sum(not unit.streamed for unit in blocks),
        "num_blocks": len(blocks),
    }


def _store_of(prepared: PreparedMethod) -> ZOBlockStore:
    backend = prepared.engine.backend
    assert isinstance(backend, ZOBackend)
    return backend.block_store


def run_machine(*, numel: int = 200_000_000, device: str = "cuda") -> Row:
    """What the speed rows of the same run rest on: the link both ways, and the fused kernels' rates."""
    from benchmarks import kernels

    where = start_device(device)
    found = list(kernels.measured(numel))
    rates = {row["case"]: row["gparameters_per_s"] for row in found}
    return {
        "method": "machine",
        "link_gbps": link_gbps(where),
        "kernel_gparameters_per_s": rates,
        "kernels": found,
    }
