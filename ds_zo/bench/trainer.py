"""One way of training a causal language model, divided into the parts that are timed separately."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from ds_zo.bench.measure import synchronize
from ds_zo.records.rows import Row

Batch = Mapping[str, torch.Tensor]


@dataclass
class Trainer:
    """A step in three parts. A method that updates inside its backward has an empty third part."""

    forward: Callable[[Batch], torch.Tensor]
    backward: Callable[[torch.Tensor], Any]
    update: Callable[[], Any]
    settings: str
    """The method's set-up in words, for the table."""
    engine: Any = None
    """DeepSpeed's engine; None: the method has none."""
    facts: Row = field(default_factory=dict)

    def step(self, batch: Batch) -> torch.Tensor:
        loss = self.forward(batch)
        self.backward(loss)
        self.update()
        return loss.detach()


def loss_of(model: Any) -> Callable[[Batch], torch.Tensor]:
    def forward(batch: Batch) -> torch.Tensor:
        loss: torch.Tensor = model(**batch, use_cache=False).loss
        return loss

    return forward


def engine_trainer(
    model: nn.Module, config: Row, settings: str, *, initialize: Callable[..., Any] | None = None
) -> Trainer:
    """DeepSpeed's engine, of ds_zo or stock. `initialize`: in place of DeepSpeed's; returns the engine alone."""
    import deepspeed

    import ds_zo  # noqa: F401

    make = initialize or (lambda **arguments: deepspeed.initialize(**arguments)[0])
    engine = make(model=model, model_parameters=[p for p in model.parameters() if p.requires_grad], config=config)
    engine.train()
    return Trainer(loss_of(engine), engine.backward, engine.step, settings, engine, facts={"config": config})


def torch_adamw_trainer(model: nn.Module, *, lr: float = 1e-4, clipping: float = 0.0, accumulation: int = 1) -> Trainer:
    """The leanest AdamW on the GPU: torch's fused kernel on the model's own 16-bit weights, gradients and moments. It
    trains worse, since small updates are rounded away. `accumulation`: micro-batches of an update."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    fused = parameters[0].device.type == "cuda"
    optimizer = torch.optim.AdamW(parameters, lr=lr, weight_decay=0.0, fused=fused)
    num_backwards = 0

    def backward(loss: torch.Tensor) -> None:
        nonlocal num_backwards
        num_backwards += 1
        (loss / accumulation if accumulation > 1 else loss).backward()

    def update() -> None:
        if num_backwards % accumulation:
            return
        if clipping > 0:
            nn.utils.clip_grad_norm_(parameters, clipping, foreach=True)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    settings = "torch alone, fused kernel, weights and moments in bf16, no master weights"
    return Trainer(loss_of(model), backward, update, settings)


def set_checkpointing(model: Any, enabled: bool) -> None:
    if enabled:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})


def part_seconds(
    trainer: Trainer, batch: Callable[[], Batch], device: torch.device, *, steps: int, accumulation: int = 1
) -> Row:
    """Median seconds of forward, backward and update, each waited for, in a step of `accumulation` micro-batches.
    Overlap between the parts is not visible here."""
    seconds: dict[str, list[float]] = {"forward_s": [], "backward_s": [], "update_s": []}
    for _ in range(steps):
        for values in seconds.values():
            values.append(0.0)
        for _ in range(accumulation):
            inputs = batch()
            stamps = [_now(device)]
            loss = trainer.forward(inputs)
            stamps.append(_now(device))
            trainer.backward(loss)
            stamps.append(_now(device))
            trainer.update()
            stamps.append(_now(device))
            for values, (before, after) in zip(seconds.values(), pairwise(stamps), strict=True):
                values[-1] += after - before
    return {name: statistics.median(values) for name, values in seconds.items()}


def _now(device: torch.device) -> float:
    synchronize(device)
    return time.perf_counter()
