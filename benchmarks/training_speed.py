"""Measures a `TrainingCase` in this process: speed and memory of a method, and what else the case asks for."""

from __future__ import annotations

import math
import statistics
import time
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from benchmarks import lsp_parts
from benchmarks.lsp_parts import lsp_of
from benchmarks.methods import Method, method_of
from benchmarks.slower_link import slower_link
from benchmarks.training_case import TrainingCase, kernels_row, random_batch, slow_host_row, with_compiled_blocks
from ds_zo.backends.adapter.backend import AdapterBackend
from ds_zo.backends.lomo.backend import LOMOBackend
from ds_zo.backends.recompute.model_blocks import RecomputedBlocks
from ds_zo.backends.zo.backend import ZOBackend
from ds_zo.backends.zo.store import ZOStore
from ds_zo.bench.measure import measure_steps, start_device, synchronize
from ds_zo.bench.shapes import materialise
from ds_zo.bench.trainer import Batch, Trainer, part_seconds, set_checkpointing
from ds_zo.planner import plan
from ds_zo.planner.models import DTYPES
from ds_zo.planner.shapes import RANDOM, config_of
from ds_zo.records.environment import host_peak_gb
from ds_zo.records.rows import Row
from ds_zo.streaming.allocator import num_retries
from ds_zo.streaming.block_store import BlockStore

ROOM = 0.97
"""Share of a card that tensors can be expected to get."""
_SETTLING_STEPS = 2
"""The first step compares two ways to run, and an automatic placement moves blocks after it."""
_LONGEST_WARMUP = 16
_NUM_TIMED_UPLOADS = 8
_PROFILED_STEPS = 3


def measure(**settings: Any) -> Row:
    """A row with `points` for `inputs`, `filled` for `fill_steps`, `then` for `then_batch`, and under `links`, by GB/s,
    what was measured on all links but the first."""
    case = TrainingCase(**settings)
    method = method_of(case)
    where = start_device(case.device, cap_gb=case.cap_gb)
    model = case.lazy_model(where)
    row = _about(case, model)
    if lacking := _lacking_memory(case, method, row["parameters"], where):
        return row | lacking
    first_link, *other_links = case.links_gbps
    with ExitStack() as stack:
        with _link(first_link, where):
            run = _prepared(case, method, model, where, stack)
            row |= {"fits": True, "link_gbps": first_link, "load_s": run.load_s, "settings": run.trainer.settings}
            forward_s = _plain_forward_s(run) if case.plain_forward else None
            row |= run.trainer.facts | run.on_this_link(parts=case.parts)
            if forward_s is not None:
                row |= {"plain_forward_s": forward_s, "step_per_forward": row["step_s"] / forward_s}
            row |= _later_phases(run)
        for link in other_links:
            with _link(link, where):
                row.setdefault("links", {})[f"{link:g}"] = run.on_this_link(parts=False)
    return row | _of_backend(run, row)


def _link(gbps: float | None, where: torch.device) -> AbstractContextManager[None]:
    return slower_link(gbps if where.type == "cuda" else None)


def _about(case: TrainingCase, model: nn.Module) -> Row:
    return {
        "shape": case.shape,
        "method": case.method,
        "dtype": case.dtype,
        "parameters": sum(p.numel() for p in model.parameters()),
        "layers": config_of(case.shape, num_layers=case.layers).num_hidden_layers,
        "full_layers": config_of(case.shape).num_hidden_layers,
        "input": "random token ids",
        "checkpointing": case.checkpointing,
        "attention": case.attention,
        "compiled": case.compiled,
        "gradient_clipping": case.clipping,
        "cap_gb": case.cap_gb,
        "repeated": case.repeated,
    }


def _lacking_memory(case: TrainingCase, method: Method, numel: int, where: torch.device) -> Row | None:
    """What a method that streams nothing would need where that is more than there is: recorded, not tried."""
    if where.type != "cuda" or method.reads_weights or case.stream is not None:
        return None
    there = torch.cuda.get_device_properties(where).total_memory / 1e9
    there = there if case.cap_gb is None else min(there, case.cap_gb)
    each = DTYPES[case.dtype].itemsize * (2 if method.keeps_gradients else 1) + method.state_bytes
    needs_gb = numel * each / 1e9
    return {"fits": False, "needs_gb": needs_gb, "device_gb": there} if needs_gb > ROOM * there else None


@dataclass
class _Run:
    """A method made ready."""

    case: TrainingCase
    model: nn.Module
    trainer: Trainer
    where: torch.device
    period: int
    load_s: float
    host_before_gb: float
    """Peak of host memory before the trainer was made."""

    @property
    def store(self) -> BlockStore | None:
        """Streamed blocks of an engine of ds_zo; None: it has none, or is another engine."""
        backend = getattr(self.trainer.engine, "backend", None)
        if isinstance(backend, ZOBackend):
            return backend.store.blocks
        return backend.blocks.store if isinstance(backend, LOMOBackend | AdapterBackend) else None

    @property
    def zo(self) -> ZOStore | None:
        """What replays updates, for an engine with ZO."""
        backend = getattr(self.trainer.engine, "backend", None)
        return backend.store if isinstance(backend, ZOBackend) else None

    def batch(self, batch: int, length: int) -> Batch:
        return random_batch(self.model, batch, length, self.where)

    def point(self, ids: Batch, *, warmup: int, steps: int, ages: bool = False, parts: bool = False) -> Row:
        """Speed and memory with one batch. The step is the median one, but a mean where steps differ in turns. `ages`:
        warm up until every streamed block was written back once, as in the middle of a run."""
        store, where = self.store, self.where
        moved, retries = [_moved_bytes(store)], num_retries(where)

        def step() -> torch.Tensor:
            loss = self.trainer.step(ids)
            moved.append(_moved_bytes(store))
            return loss

        synchronize(where)
        begin = time.perf_counter()
        first_loss = float(step())
        first_step_s = time.perf_counter() - begin
        ages_after = None
        zo = self.zo
        if ages and zo is not None and any(unit.streamed for unit in zo.blocks.placement.blocks):
            ages_after = lambda: min(zo.interval, _LONGEST_WARMUP) - 1  # noqa: E731
        limits: Row = {"max_s": self.case.max_s, "period": self.period, "ages_after": ages_after}
        measured = measure_steps(step, warmup=warmup - 1, steps=steps, device=where, **limits)
        if self.period > 1:
            measured["step_s"] = measured["step_wall_s"]
        losses, num_timed = [first_loss, *measured["losses"]], len(measured["seconds"])
        batch, length = ids["input_ids"].shape
        row: Row = {
            "batch": batch,
            "length": length,
            "warmup": 1 + len(measured["warmup_seconds"]),
            "steps": num_timed,
            "first_step_s": first_step_s,
            "alloc_retries": num_retries(where) - retries,
            "tokens_per_s": batch * length / measured["step_s"],
            **measured,
            "losses": losses,
            "finite": all(map(math.isfinite, losses)),
            "host_gb_added": measured["host_peak_gb"] - self.host_before_gb,
        }
        if store is not None:
            before, after = moved[-1 - num_timed], moved[-1]
            up, down = ((b - a) / num_timed / 1e9 for a, b in zip(before, after, strict=True))
            row |= {"up_gb_a_step": up, "down_gb_a_step": down, **_of_store(store, self.zo)}
        if parts:
            max_s = self.case.max_s
            repeats = 4 if max_s is None or 4 * measured["step_s"] < max_s else 2
            repeats = -(-repeats // self.period) * self.period
            row |= part_seconds(self.trainer, lambda: ids, where, steps=repeats)
        return row

    def on_this_link(self, *, parts: bool) -> Row:
        """Speed and memory with all batches of the case, and the step's parts. `losses` are those of the first step and
        of the timed ones."""
        case = self.case
        ids = [self.batch(b, t) for b, t in case.pairs]
        options: Row = {"warmup": case.warmup, "steps": case.steps, "parts": parts}
        points = [self.point(each, ages=case.age and i == 0, **options) for i, each in enumerate(ids)]
        row = points[0] | ({"points": points} if case.inputs else {})
        if case.take_apart:
            turns, max_s = lsp_parts.TURNS, case.max_s
            few: Row = {"steps": -(-case.steps // turns), "max_s": max_s and max_s / turns}
            few |= {"warmup": 2, "period": self.period, "device": self.where}
            one_turn = partial(measure_steps, partial(self.trainer.step, ids[0]), **few)
            row |= lsp_parts.taken_apart(self.trainer.engine, lambda: one_turn()["seconds"])
        if case.then_batch is not None:
            row["then"] = self.point(self.batch(case.then_batch, case.length), **options)
        return row


def _prepared(case: TrainingCase, method: Method, model: nn.Module, where: torch.device, stack: ExitStack) -> _Run:
    """`stack`: left after the last step."""
    begin = time.perf_counter()
    if not method.reads_weights and case.stream is None:
        model = materialise(model, where)
    host_before_gb = host_peak_gb()
    set_checkpointing(model, case.checkpointing and method.checkpoints)
    model.train()
    trainer = method.make(case, model, where)
    if (lsp := lsp_of(trainer.engine)) is not None:
        for part in case.without:
            stack.enter_context(lsp_parts.WITHOUT[part](lsp))
    if case.compiled:
        trainer = with_compiled_blocks(trainer, model)
    synchronize(where)
    load_s = time.perf_counter() - begin
    return _Run(case, model, trainer, where, method.period, load_s, host_before_gb)


def _plain_forward_s(run: _Run) -> float:
    """Seconds of a forward pass of the engine with loss, in eval mode and without gradients. No update is pending."""
    engine, ids = run.trainer.engine, run.batch(*run.case.pairs[0])
    engine.eval()
    with torch.no_grad():
        measured = measure_steps(partial(run.trainer.forward, ids), warmup=2, steps=run.case.steps, device=run.where)
    engine.train()
    if run.where.type == "cuda":
        torch.cuda.empty_cache()
    return float(measured["step_s"])


def _later_phases(run: _Run) -> Row:
    """A second phase of steps whose blocks have moved to the device, the kernels of a step, and the same steps on a
    slow host."""
    case, row = run.case, Row()
    ids = run.batch(*case.pairs[0])
    if case.fill_steps and run.where.type == "cuda":
        assert run.store is not None
        run.store.may_fill_device = True
        row["filled"] = run.point(ids, warmup=_SETTLING_STEPS, steps=case.fill_steps - _SETTLING_STEPS)
    if case.kernels and run.where.type == "cuda":
        row |= kernels_row(partial(run.trainer.step, ids), steps=_PROFILED_STEPS)
    if case.slow_host:
        row |= slow_host_row(partial(run.trainer.step, ids), steps=case.steps, device=run.where)
    return row


def _moved_bytes(store: BlockStore | None) -> tuple[int, int]:
    """Bytes uploaded and downloaded."""
    return (0, 0) if store is None else (store.runtime.transport.bytes_up, store.runtime.transport.bytes_down)


def _of_store(store: BlockStore, zo: ZOStore | None) -> Row:
    blocks = store.placement.blocks
    row: Row = {
        "host_gb": store.store.nbytes / 1e9,
        "pinned_gb": store.store.pinned_nbytes / 1e9,
        "resident_blocks": sum(not unit.streamed for unit in blocks),
        "num_blocks": len(blocks),
    }
    if zo is not None:
        row |= {"interval": zo.interval, "tempo": zo.step_time}
    return row


def _of_backend(run: _Run, measured: Row) -> Row:
    """What the backend and the planner say of the case, and how busy uploads keep the link."""
    case, store, lsp = run.case, run.store, lsp_of(run.trainer.engine)
    config = run.trainer.facts.get("config", {})
    row: Row = {
        "resident": "offload_param" not in config.get("zero_optimization", {}),
        "stream": config.get("ds_zo", {}).get("stream"),
    }
    if store is not None:
        row |= {"placement": run.trainer.engine.backend.describe(), "up_gbps": _up_gbps(store, run.where)}
        if row["up_gbps"] is not None:
            row["link_busy"] = measured["up_gb_a_step"] / row["up_gbps"] / measured["step_s"]
    blocks = getattr(getattr(run.trainer.engine, "backend", None), "blocks", None)
    if isinstance(blocks, RecomputedBlocks):
        inputs = blocks.recomputation.host_inputs
        row["inputs_gb"] = 0.0 if inputs is None else inputs.nbytes / 1e9
    if lsp is not None:
        row |= lsp.footprint()
        if lsp.biases:
            biases = lsp.biases.values()
            row |= {"fit_s": lsp.fit_s, "bias_median": statistics.median(biases), "bias_max": max(biases)}
    planned_as = method_of(case).planned_as
    return row if planned_as is None else row | _planned(case, planned_as)


def _up_gbps(store: BlockStore, device: torch.device) -> float | None:
    """GB/s of uploads of stored blocks into a slot, with nothing beside them. None without streamed blocks or a GPU."""
    units = [unit for unit in store.placement.blocks if unit.streamed][:_NUM_TIMED_UPLOADS]
    if device.type != "cuda" or not units:
        return None
    store.runtime.invalidate_slots()
    slot = store.runtime.slots[0].buffer
    synchronize(device)
    start = time.perf_counter()
    for unit in units:
        slot[: unit.nbytes].copy_(unit.store_buffer, non_blocking=True)
    synchronize(device)
    return float(sum(unit.nbytes for unit in units)) / 1e9 / (time.perf_counter() - start)


def _planned(case: TrainingCase, backend: str) -> Row:
    """The peaks and seconds that `ds-zo plan` states for the case, whose adapters have rank 16."""
    settings: Row = {"batch": case.batch, "seq": case.length, "dtype": case.dtype, "experts_rank": case.experts_rank}
    settings |= {"device_memory_gb": case.cap_gb, "stream": dict(case.stream or {})}
    settings |= {"offload": case.stream is not None, "checkpointing": case.checkpointing}
    found = plan(f"{RANDOM}{case.shape}", backends=[backend], **settings)[backend]
    return {
        "planned_device_gb": found.device_peak_nbytes / 1e9,
        "planned_host_gb": found.host_peak_nbytes / 1e9,
        "planned_step_s": found.step_s,
    }
