"""What one process measures for LSP and those beside it: tokens a second, memory, and what of a step does not overlap.

[Note: taken apart by switching off] Work that overlaps has no time of its own. What of it a step waits for is the time
that the step saves when the work is left out: first the CPU's Adam, then the copies too. What remains above forward and
backward is the GPU's own update (for LSP: compressing and applying). The kinds of step take turns, so that a machine
that grows slower does so for all of them; a difference below `exposed_spread_s`, by which the same steps differ between
turns, is noise, and may be negative.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

from benchmarks.slower_link import slower_link
from benchmarks.training_case import (
    TrainingCase,
    drop_gradients,
    random_batch,
    slow_host_row,
    with_compiled_blocks,
)
from ds_zo.backends.lsp.backend import LSPBackend
from ds_zo.backends.lsp.host_adam import HostAdam
from ds_zo.backends.lsp.host_group import HostGroup
from ds_zo.backends.lsp.scheduler import ServiceOrder
from ds_zo.backends.lsp.transfers import Copy, CopyLane, Transfers, UploadBuffer
from ds_zo.bench.contenders import ALL, Contender, config_of, shared_config
from ds_zo.bench.measure import measure_steps, start_device, synchronize
from ds_zo.bench.shapes import materialise
from ds_zo.bench.trainer import (
    Batch,
    Trainer,
    loss_of,
    part_seconds,
    set_checkpointing,
    torch_adamw_trainer,
)
from ds_zo.records.environment import host_peak_gb
from ds_zo.records.rows import Row
from ds_zo.streaming.streams import Stream

_POSITIONS = 2048
"""Tokens that every model takes at least."""


def speed(**settings: Any) -> Row:
    """Measures one case in this process, checkpointed: `method` is `forward_backward`, `adamw-torch` or a contender's
    name. The row of `then_batch` is under `then`, those of all links but the first
    under `links`, by GB/s, without the seconds of forward and backward. A compiler that fails ends the case."""
    case = TrainingCase(**settings)
    where = start_device(case.device, cap_gb=case.cap_gb)
    with ExitStack() as stack:
        return _speed(case, where, stack)


def _speed(case: TrainingCase, where: torch.device, stack: ExitStack) -> Row:
    """`stack`: left after the last step."""
    method, clipping = case.method, case.clipping
    if where.type != "cuda":
        case = replace(case, dtype="fp32")
    first_link, *other_links = case.links_gbps
    on_link = slower_link if where.type == "cuda" else (lambda gbps: nullcontext())
    model = case.lazy_model(where, positions=_POSITIONS)
    if case.stream is None:
        model = materialise(model, where)
    numel = sum(p.numel() for p in model.parameters())
    host_before_gb = host_peak_gb()
    with on_link(first_link):
        begin = time.perf_counter()
        set_checkpointing(model, True)
        model.train()
        if method in _WITHOUT_DEEPSPEED:
            trainer = _WITHOUT_DEEPSPEED[method](model, clipping)
        else:
            trainer = _engine(ALL[method], model, case)
        for part in case.without:
            stack.enter_context(_WITHOUT[part](trainer.engine.backend))
        if case.compiled:
            trainer = with_compiled_blocks(trainer, model)
        ids = random_batch(model, case.batch, case.length, where)
        synchronize(where)
        load_s = time.perf_counter() - begin
        trainer.step(ids)
        synchronize(where)
        first_step_s = time.perf_counter() - begin - load_s
    counts = _Counts(case.warmup, case.steps, case.max_s, period=ALL[method].period if method in ALL else 1)

    def on_this_link(*, is_first: bool = False) -> Row:
        row = _measured(trainer, ids, counts, where, parts=is_first)
        row["host_gb_added"] = row["host_peak_gb"] - host_before_gb
        if case.take_apart:
            row |= _taken_apart(trainer, ids, counts, where)
        if case.then_batch is not None:
            ids_then = random_batch(model, case.then_batch, case.length, where)
            row["then"] = _measured(trainer, ids_then, counts, where, parts=is_first)
            row["then"]["host_gb_added"] = row["then"]["host_peak_gb"] - host_before_gb
        return row

    row: Row = {
        "method": method,
        "shape": case.shape,
        "parameters": numel,
        "settings": trainer.settings,
        "gradient_clipping": clipping,
        "compiled": case.compiled,
        "cap_gb": case.cap_gb,
        "link_gbps": first_link,
        "load_s": load_s,
        "first_step_s": first_step_s,
        **trainer.facts,
    }
    with on_link(first_link):
        row |= on_this_link(is_first=True)
        if case.slow_host:
            row |= slow_host_row(lambda: trainer.step(ids), steps=case.steps, device=where)
    for link in other_links:
        with on_link(link):
            row.setdefault("links", {})[link_name(link)] = on_this_link()
    backend = _lsp_of(trainer)
    if backend is not None and backend.biases:
        biases = backend.biases.values()
        row |= {"fit_s": backend.fit_s, "bias_median": statistics.median(biases), "bias_max": max(biases)}
    return row


def _lsp_of(trainer: Trainer) -> LSPBackend | None:
    """The trainer's LSP backend; None: the trainer is of another method."""
    backend = getattr(trainer.engine, "backend", None)
    return backend if isinstance(backend, LSPBackend) else None


def link_name(gbps: float | None) -> str:
    """In names of cases."""
    return "own" if gbps is None else f"{gbps:g}"


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


def _measured(trainer: Trainer, ids: Batch, counts: _Counts, where: torch.device, *, parts: bool) -> Row:
    """Of batches like this one. A step is the median's, but a mean where steps differ in turns. `parts`: also the
    seconds of forward, backward and update, by steps of their own."""
    measured = counts.measure(trainer, ids, where, warmup=counts.warmup - 1)
    if counts.period > 1:
        measured["step_s"] = measured["step_wall_s"]
    batch, length = ids["input_ids"].shape
    row: Row = {"batch": batch, "length": length, "tokens_per_s": batch * length / measured["step_s"], **measured}
    if parts:
        repeats = 4 if counts.max_s is None or 4 * measured["step_s"] < counts.max_s else 2
        row |= part_seconds(trainer, lambda: ids, where, steps=-(-repeats // counts.period) * counts.period)
    return row


# [Note: taken apart by switching off]


_TURNS = 3


def _taken_apart(trainer: Trainer, ids: Batch, counts: _Counts, where: torch.device) -> Row:
    backend = _lsp_of(trainer)
    left_out: dict[str, list[Callable[[], AbstractContextManager[None]]]] = {"as it is": []}
    if backend is None:
        left_out["no CPU"] = [partial(_no_zero_adam, trainer.engine)]
    else:
        no_adam, no_copies = partial(_no_lsp_adam, backend), partial(_no_lsp_copies, backend)
        left_out |= {"no CPU": [no_adam], "no copies": [no_adam, no_copies]}
    fewer = replace(counts, steps=-(-counts.steps // _TURNS), max_s=counts.max_s and counts.max_s / _TURNS)
    turns: dict[str, list[list[float]]] = {name: [] for name in left_out}
    for _ in range(_TURNS):
        for name, parts in left_out.items():
            with ExitStack() as stack:
                for part in parts:
                    stack.enter_context(part())
                turns[name].append(fewer.measure(trainer, ids, where, warmup=2)["seconds"])
    as_is, no_cpu, *rest = (statistics.median(chain.from_iterable(found)) for found in turns.values())
    medians = [statistics.median(found) for found in turns["as it is"]]
    row: Row = {"exposed_cpu_s": as_is - no_cpu, "rest_s": no_cpu, "apart_step_s": as_is}
    if rest:
        row |= {"exposed_copy_s": no_cpu - rest[0], "rest_s": rest[0]}
    return {**row, "exposed_spread_s": max(medians) - min(medians), "apart_seconds": turns}


@contextmanager
def _no_lsp_adam(backend: LSPBackend) -> Iterator[None]:
    """Directions stay those of the last step that had them, and are uploaded as before."""
    with patch.object(HostAdam, "update", lambda adam, active, *, factor: torch.ones(len(active))):
        yield
        backend.apply_pending_updates()


@contextmanager
def _no_lsp_copies(backend: LSPBackend) -> Iterator[None]:
    issue = Copy.issue

    def issue_nothing(copy: Copy, stream: Stream) -> None:
        copy.pairs = ()
        issue(copy, stream)

    def upload(transfers: Transfers, group: object, source: torch.Tensor) -> UploadBuffer:
        free = (buffer for buffer in transfers.upload_buffers if buffer.owner is None)
        buffer = next(free, transfers.upload_buffers[0])
        buffer.owner = group
        return buffer

    with (
        patch.object(Transfers, "upload", upload),
        patch.object(Copy, "issue", issue_nothing),
        patch.object(HostGroup, "_gradient_pairs", lambda group, job, whole: []),
    ):
        yield
        backend.apply_pending_updates()


@contextmanager
def _no_early_uploads(backend: LSPBackend) -> Iterator[None]:
    """The Adam thread leaves uploads to the main thread, which issues them from `step` on."""
    uploads, advance = backend._groups.transfers.up, CopyLane.advance

    def from_step_on(lane: CopyLane) -> None:
        if lane is not uploads or threading.current_thread() is threading.main_thread():
            advance(lane)

    with patch.object(CopyLane, "advance", from_step_on):
        yield
        backend.apply_pending_updates()


@contextmanager
def _no_last_first(backend: LSPBackend) -> Iterator[None]:
    with patch.object(ServiceOrder, "pop", lambda order, waiting: waiting.popleft()):
        yield


_WITHOUT: dict[str, Callable[[LSPBackend], AbstractContextManager[None]]] = {
    "early uploads": _no_early_uploads,
    "last first": _no_last_first,
}


@contextmanager
def _no_zero_adam(engine: Any) -> Iterator[None]:
    """ZeRO-Offload without its CPU step: gradients go down, parameters come up."""
    with patch.object(engine.optimizer.optimizer, "step", lambda *args, **kwargs: None):
        yield


# Who trains


def _engine(contender: Contender, model: Any, case: TrainingCase) -> Trainer:
    import deepspeed

    import ds_zo  # noqa: F401

    dtype = {torch.bfloat16: "bf16", torch.float32: "fp32"}[next(model.parameters()).dtype]
    config = config_of(contender, shared_config(batch=case.batch, dtype=dtype, gradient_clipping=case.clipping))
    config["optimizer"]["params"] |= case.params or {}
    if case.adam_on_device:
        config["zero_optimization"] = {"stage": 0}
    if case.stream is not None:
        config["zero_optimization"]["offload_param"] = {"device": "cpu", "pin_memory": True}
        config["ds_zo"] = {"stream": dict(case.stream)}
    is_lsp = contender.backend == "lsp"
    if case.compiled and is_lsp:
        config["ds_zo"] = {**config.get("ds_zo", {}), "compile_blocks": True}
    engine, *_ = deepspeed.initialize(model=model, model_parameters=list(model.parameters()), config=config)
    engine.train()
    facts: Row = {"config": config, **(engine.backend.footprint() if is_lsp else {})}
    settings = engine.backend.describe() if is_lsp else contender.settings
    return Trainer(loss_of(engine), engine.backward, engine.step, settings, engine, facts=facts)


def _forward_backward(model: nn.Module, clipping: float) -> Trainer:
    """The ceiling: nothing is updated."""
    drop_gradients(model)
    return Trainer(loss_of(model), torch.Tensor.backward, lambda: None, "gradients dropped, no update")


_WITHOUT_DEEPSPEED: dict[str, Callable[[nn.Module, float], Trainer]] = {
    "forward_backward": _forward_backward,
    "adamw-torch": lambda model, clipping: torch_adamw_trainer(model, clipping=clipping),
}
