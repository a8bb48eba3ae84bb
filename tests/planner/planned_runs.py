"""Runs by the JSON of a plan: what they take of the device when it is a GPU."""

from __future__ import annotations

import gc
from dataclasses import replace
from functools import lru_cache
from typing import Any

import deepspeed
import torch

import ds_zo  # noqa: F401
from ds_zo.bench.shapes import lazy_model, materialise
from ds_zo.planner import Estimate, Model, load_model, plan

CASES = {
    # name: (backend, offload)
    "zo": ("zo", False),
    "zo-streamed": ("zo", True),
    "lomo": ("lomo", False),
    "lomo-streamed": ("lomo", True),
    "adalomo": ("adalomo", False),
    "lsp": ("lsp", None),
}


@lru_cache(maxsize=1)
def _planned(shape: str, batch: int, seq: int) -> Model:
    return load_model(f"random:{shape}", batch=batch, seq=seq)


def _estimate(backend: str, shape: str, *, batch: int, seq: int, **more: Any) -> Estimate:
    return plan(_planned(shape, batch, seq), batch=batch, seq=seq, backends=[backend], **more)[backend]


def _start_afresh() -> int:
    """What is allocated on the GPU before a run. Workspaces of matrix products outlive it, and are planned for."""
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    return torch.cuda.memory_allocated()


def planned_and_run(
    case: str, shape: str, *, batch: int, seq: int, device: torch.device, num_steps: int = 4
) -> tuple[Estimate, int, float]:
    """The estimate, the allocator's peak after warming up (0 on the CPU), and the last loss."""
    backend, offload = CASES[case]
    cuda = device.type == "cuda"
    before = _start_afresh() if cuda else 0
    stream = {"resident_blocks": 0} if offload else {}
    estimate = _estimate(backend, shape, batch=batch, seq=seq, offload=offload, stream=stream)
    model = lazy_model(f"random:{shape}", dtype=torch.bfloat16, device=device, max_length=max(2048, seq))
    if not offload and backend != "zo":
        model = materialise(model, device)
        model.gradient_checkpointing_enable({"use_reentrant": False})  # type: ignore[operator]
    model.config.use_cache = False  # type: ignore[union-attr]
    config = dict(estimate.config)
    if backend == "lsp":
        config["optimizer"]["params"] |= {"projector": "random"}  # a fit is not a step
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    engine.train()
    ids = torch.randint(0, 500, (batch, seq), device=device)
    loss = 0.0
    for step in range(num_steps):
        if step == num_steps - 2 and cuda:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        output: Any = engine(input_ids=ids, labels=ids).loss
        engine.backward(output)
        engine.step()
        loss = float(output.detach())
        del output
    peak = torch.cuda.max_memory_allocated() - before if cuda else 0
    if case == "zo-streamed":
        intervals = int(estimate.setting.split()[-2]), engine.backend.store.interval
        planned, chosen = (
            _estimate(backend, shape, batch=batch, seq=seq, offload=offload, stream={**stream, "writeback_interval": k})
            for k in intervals
        )
        # The interval is chosen by times, which neighbours on the machine change, and low planes' buffers go by it.
        slots = estimate.device["slots"] + chosen.device["slots"] - planned.device["slots"]
        estimate = replace(estimate, device={**estimate.device, "slots": slots})
    engine.destroy()
    return estimate, peak, loss
