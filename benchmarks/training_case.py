"""The case of every speed suite: one method trains one published shape with random weights on random token ids.

A suite derives its own dataclass where it needs further fields or other defaults. The harness (`ds_zo.bench.runner`)
runs a case in a process of its own: `to_run` gives it the fields that differ from their defaults, and the suite's
target makes the case from them again. The row of a case has these fields under `params`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import nn

from benchmarks.bloom_attention import attend_in_pieces
from ds_zo.bench.measure import measure_steps
from ds_zo.bench.runner import Case
from ds_zo.bench.shapes import random_model
from ds_zo.bench.traces import profile_steps
from ds_zo.planner.models import DTYPES
from ds_zo.planner.shapes import config_of
from ds_zo.records.rows import Row

_ALWAYS_GIVEN = ("shape", "method", "batch", "length")


@dataclass(frozen=True)
class TrainingCase:
    """A model, its input, a method with its settings, and how many steps are made."""

    shape: str
    """A name of `ds_zo.planner.shapes`."""
    method: str
    """A name that the suite knows."""
    batch: int = 1
    """Sequences of one step."""
    length: int = 2048
    """Tokens of one sequence."""
    dtype: str = "bf16"
    layers: int | None = None
    """Layers of the model; None: as many as the shape has."""
    overrides: Mapping[str, Any] | None = None
    """Fields of the model's configuration that differ from the shape's."""
    attention: str | None = None
    """The model's attention implementation; None: the one that transformers chooses. `pieces`, for BLOOM: a few heads
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
    slow_host: bool = False
    """Whether the same steps are measured again on two cores, and the time in which the GPU is busy."""
    device: str = "cuda"

    @property
    def num_positions(self) -> int:
        """The longest sequence that the model must take, in tokens."""
        return self.length

    def lazy_model(self, device: torch.device) -> nn.Module:
        """The model on the meta device. Its weights are drawn when it is materialised or an engine reads them."""
        config = config_of(self.shape, num_layers=self.layers, max_length=self.num_positions)
        for name, value in (self.overrides or {}).items():
            setattr(config, name, value)
        in_pieces = self.attention == "pieces"
        if self.attention is not None and not in_pieces:
            config._attn_implementation = self.attention
        model = random_model(config, dtype=DTYPES[self.dtype], device=device)
        return attend_in_pieces(model) if in_pieces else model

    def settings(self) -> dict[str, Any]:
        """Model, method and input, and the other fields that differ from their defaults, as JSON holds them."""
        given = {f.name: getattr(self, f.name) for f in fields(self)}
        plain = {name: dict(value) if isinstance(value, Mapping) else value for name, value in given.items()}
        defaults = {f.name: f.default for f in fields(self) if f.name not in _ALWAYS_GIVEN}
        return {name: value for name, value in plain.items() if name not in defaults or value != defaults[name]}

    def to_run(self, name: str, target: str, **limits: Any) -> Case:
        """The harness's case. `limits` are `timeout_s`, `planned_host_gb` and `expected_s` of `runner.Case`."""
        return Case(name, target, self.settings(), **limits)


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


def _run_on(cores: Iterable[int]) -> None:
    """Moves all threads of this process to these cores, as `taskset` does for a process that it starts."""
    for thread in os.listdir("/proc/self/task"):
        with suppress(ProcessLookupError):
            os.sched_setaffinity(int(thread), cores)
