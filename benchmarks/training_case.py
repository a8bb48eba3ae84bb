"""The case of every speed suite: one method trains one published shape with random weights on random token ids.

`suites/` has the fields of each case that differ from their defaults. The harness (`ds_zo.bench.runner`) runs a case in
a process of its own, where the case's target makes a `TrainingCase` of these fields. The row has them under `params`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from benchmarks.bloom_attention import attend_in_chunks
from ds_zo.backends.lomo.backend import LOMOBackend
from ds_zo.backends.lsp.backend import LSPBackend
from ds_zo.backends.recompute.compiled_blocks import BlockCompiler
from ds_zo.bench.measure import measure_steps
from ds_zo.bench.shapes import random_model
from ds_zo.bench.traces import profile_steps, read_trace, trace_events
from ds_zo.bench.trainer import Batch, Trainer
from ds_zo.planner.models import DTYPES
from ds_zo.planner.shapes import config_of
from ds_zo.records.rows import Row
from ds_zo.streaming.blocks import find_blocks

_MOST_KERNELS = 25
_MOST_LETTERS = 80


@dataclass(frozen=True)
class TrainingCase:
    """A model, its input, a method with its settings, and how many steps are made."""

    shape: str
    """A name of `ds_zo.planner.shapes`."""
    method: str
    """A name of `benchmarks.methods`."""
    batch: int = 1
    """Sequences of one step."""
    length: int = 2048
    """Tokens of one sequence."""
    dtype: str = "bf16"
    layers: int | None = None
    """Layers of the model; None: as many as the shape has."""
    attention: str | None = None
    """The model's attention implementation; None: the one that transformers chooses. `chunks`, for BLOOM: a few heads
    at a time."""
    stream: Mapping[str, Any] | None = None
    """The section `ds_zo.stream`; None: weights stay on the device."""
    params: Mapping[str, Any] | None = None
    """Keys of `optimizer.params` that differ from the method's own."""
    lr: float | None = None
    """The learning rate; None: the method's own."""
    compiled: bool = False
    """Whether every block is compiled."""
    cap_gb: float | None = None
    """Device memory in GB (10**9 bytes) that the case may allocate; None: the whole card."""
    warmup: int = 3
    """Steps before those that are timed."""
    steps: int = 8
    """Timed steps."""
    parts: bool = False
    """Whether forward, backward and update are timed by themselves too, in steps of their own."""
    slow_host: bool = False
    """Whether the same steps are measured again on two cores, and the time in which the GPU is busy."""
    plain_forward: bool = False
    """Whether a forward pass without gradients, in eval mode, is timed before the first step, and the step is compared
    with it. For engines."""
    kernels: bool = False
    """Whether a profile of later steps lists the GPU's kernels."""
    max_s: float | None = None
    """Most seconds that timed steps may take, in place of some of `steps`; None: no limit."""
    without: Sequence[str] = ()
    """Parts that are switched off. Of streamed ZO: see `benchmarks.ablations`. Of LSP's schedule: "early uploads" (of
    directions, inside the backward pass), "last first" (the order of copies and of Adam's queue from the transition
    layer on)."""
    device: str = "cuda"

    # Of ZO
    inputs: Sequence[Sequence[int]] | None = None
    """Several (batch, length) pairs that are measured on one loaded model, in place of `batch` and `length`."""
    resident: bool = False
    """Whether all blocks stay on the device; ZO streams its blocks unless it is set."""
    age: bool = True
    """Whether streamed ZO warms up for at least one write-back interval. Before that fewer updates are pending, and
    replay is cheaper than in the middle of a run."""
    fill_steps: int = 0
    """Steps more, once the blocks that fit `device_memory_gb` have moved to the device. One load of a large model then
    gives its smallest footprint and its speed within a budget."""
    folder: str = "."
    """Where checkpoints are written: the speed of its disk is part of the case."""
    every: int = 10
    """Steps between two checkpoints."""

    checkpoint: Mapping[str, Any] | None = None
    """The section `ds_zo.checkpoint`."""

    # Of first-order methods
    checkpointing: bool = True
    """Whether transformers checkpoints each block. Streamed LOMO recomputes blocks itself and needs none."""
    clipping: float = 0.0
    """`gradient_clipping`; 0: none."""

    # Of LSP
    then_batch: int | None = None
    """A second batch size that the same engine is measured with: setting an engine up may take longer than its steps.
    None: one batch size only."""
    links_gbps: Sequence[float | None] = (None,)
    """GB/s of links between host and device, one after the other under the same engine, which is set up on the first:
    emulated ones, slower than the machine's; None: the machine's own."""
    adam_on_device: bool = False
    """Whether LSP's Adam runs on the GPU."""
    take_apart: bool = False
    """Whether the step is measured again without its parts, on each link: [Note: taken apart by switching off]."""

    # Of adapters
    rank: int = 16
    """Rank of the adapters."""
    experts_rank: int = 0
    """Rank of adapters on stacks of experts; 0: they have none."""
    repeated: bool = False
    """Whether all blocks have the weights of the first one, which are drawn and quantised once."""
    host_blocks: int | None = None
    """Streamed blocks with host memory of their own, which `repeated` blocks share; None: all of them."""

    @property
    def pairs(self) -> list[tuple[int, int]]:
        """The (batch, length) pairs that are measured."""
        return [(int(b), int(t)) for b, t in self.inputs] if self.inputs else [(self.batch, self.length)]

    def lazy_model(self, device: torch.device) -> nn.Module:
        """The model on the meta device. Its weights are drawn when it is materialised or an engine reads them. It takes
        the case's sequences, and at least 2,048 tokens."""
        longest = max(2048, *(t for _, t in self.pairs))
        config = config_of(self.shape, num_layers=self.layers, max_length=longest)
        in_chunks = self.attention == "chunks"
        if self.attention is not None and not in_chunks:
            config._attn_implementation = self.attention
        model = random_model(config, dtype=DTYPES[self.dtype], device=device)
        return attend_in_chunks(model) if in_chunks else model


def random_batch(model: Any, batch: int, length: int, device: torch.device) -> Batch:
    """Random token ids of the model's vocabulary, equal for all methods."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, model.config.vocab_size, (batch, length), generator=generator).to(device)
    return {"input_ids": ids, "labels": ids}


def with_compiled_blocks(trainer: Trainer, model: nn.Module) -> Trainer:
    """Compiles the model's blocks by the same code for every method. The engines of ds_zo have compiled theirs already.
    A block that could not be compiled fails the next step."""
    backend = getattr(trainer.engine, "backend", None)
    compiler = backend._compiler if isinstance(backend, (LOMOBackend, LSPBackend)) else None
    if compiler is None:
        compiler = BlockCompiler()
        compiler.install(find_blocks(model).values())

    def update() -> None:
        trainer.update()
        if compiler.failure is not None:
            raise RuntimeError(f"blocks could not be compiled: {compiler.failure}")

    return replace(trainer, update=update, settings=f"{trainer.settings}, blocks compiled")


def slow_host_row(step: Callable[[], Any], *, steps: int, device: torch.device) -> Row:
    """Seconds of a step while this process has two cores, and seconds a step in which the GPU is busy. The profiler
    comes last: it slows later launches."""
    cores = sorted(os.sched_getaffinity(0))
    _run_on(cores[:2])
    try:
        measured = measure_steps(step, warmup=2, steps=steps, device=device)
    finally:
        _run_on(cores)
    busy_s = profile_steps(step, steps=3).get("gpu_compute_s") if device.type == "cuda" else None
    return {"two_cores_s": measured["step_s"], "two_cores_wall_s": measured["step_wall_s"], "gpu_busy_s": busy_s}


def kernels_row(step: Callable[[], Any], *, steps: int) -> Row:
    """How long the GPU is busy and idle in a step, and for each kernel its launches and seconds a step, the longest
    first. The profiler slows launches."""
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        for _ in range(steps):
            step()
        torch.cuda.synchronize()
    events = trace_events(profiler)
    kernels: dict[str, list[float]] = {}
    for event in events:
        if event.get("cat") == "kernel":
            sums = kernels.setdefault(event["name"][:_MOST_LETTERS], [0.0, 0.0])
            sums[0] += 1 / steps
            sums[1] += event["dur"] / 1e6 / steps
    longest = sorted(kernels, key=lambda name: -kernels[name][1])[:_MOST_KERNELS]
    return {
        "profile": read_trace(events, steps=steps),
        "launches": sum(count for count, _ in kernels.values()),
        "kernels": {name: kernels[name] for name in longest},
    }


def _run_on(cores: Iterable[int]) -> None:
    """Moves all threads of this process to these cores, as `taskset` does for a process that it starts."""
    for thread in os.listdir("/proc/self/task"):
        with suppress(ProcessLookupError):
            os.sched_setaffinity(int(thread), cores)
