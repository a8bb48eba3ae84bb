"""What the tests of ZO's traps and everyday use share: engines from a JSON, and the same step as plain passes one after
the other."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import deepspeed
import numpy as np
import pytest
import torch
from deepspeed.utils import logger
from torch import nn

from ds_zo import ops
from ds_zo.backends.zo import backend as zo
from ds_zo.backends.zo import outputs

LR, EPS = 1e-3, 1e-3


def zo_json(
    *, offload: bool = True, interval: int | None = 1, params: dict[str, Any] | None = None, **more: Any
) -> dict[str, Any]:
    """Keys of `stream` are passed by name; anything else is a top-level key."""
    stream = {
        name: more.pop(name)
        for name in ("resident_blocks", "device_slots", "master", "blocks", "wire_dtype", "frozen_dtype")
        if name in more
    }
    return {
        "train_micro_batch_size_per_gpu": 2,
        "steps_per_print": 1000,
        "optimizer": {"type": "ZO", "params": {"lr": LR, "zo_eps": EPS, **(params or {})}},
        "zero_optimization": {"stage": 0, "offload_param": {"device": "cpu" if offload else "none"}},
        "ds_zo": {"stream": {"writeback_interval": interval, **stream}},
        **more,
    }


def on_device(engine: Any, batch: Mapping[str, Any]) -> dict[str, Any]:
    return {k: v.to(engine.device) if isinstance(v, torch.Tensor) else v for k, v in batch.items()}


def engine_for(model: nn.Module, json: dict[str, Any] | None = None, **arguments: Any) -> Any:
    return deepspeed.initialize(model=model, config=json or zo_json(), **arguments)[0]


def train(
    engine: Any, batches: Iterable[dict[str, Any]], after: Callable[[int], None] = lambda step: None
) -> list[float]:
    losses = []
    for step, batch in enumerate(batches):
        losses.append(one_step(engine, batch))
        after(step)
    return losses


def one_step(engine: Any, batch: dict[str, Any]) -> float:
    output = engine(**on_device(engine, batch))
    loss = outputs.loss_of(output)
    assert loss is not None
    engine.backward(loss)
    engine.step()
    return loss.item()


@contextmanager
def log_lines(level: int = logging.WARNING) -> Iterator[list[str]]:
    """What the library logs meanwhile."""
    lines: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    handler, before = Keep(level), logger.level
    logger.addHandler(handler)
    logger.setLevel(min(before, level))
    try:
        yield lines
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)


class Recorder:
    """The outputs of each training forward's passes, as the backend measured them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.passes: list[list[torch.Tensor]] = []

        def tie(passes: Any, **keywords: Any) -> Any:
            self.passes.append([one[0].detach().clone() for one in passes])
            return outputs.tie(passes, **keywords)

        monkeypatch.setattr(zo, "tie", tie)

    @property
    def last(self) -> list[float]:
        return [loss.item() for loss in self.passes[-1]]


def snapshot() -> tuple[Any, ...]:
    return torch.get_rng_state(), random.getstate(), np.random.get_state()


def set_snapshot(state: tuple[Any, ...]) -> None:
    torch.set_rng_state(state[0])
    random.setstate(state[1])
    np.random.set_state(state[2])


def same_snapshot(a: tuple[Any, ...], b: tuple[Any, ...]) -> bool:
    return torch.equal(a[0], b[0]) and a[1] == b[1] and a[2][2] == b[2][2] and np.array_equal(a[2][1], b[2][1])


def break_off(patch: pytest.MonkeyPatch, error: BaseException, *, num_whole: int = 0) -> None:
    """The launch after `num_whole` others raises when it has written."""
    launch, num_left = ops.replay_perturb, num_whole

    def counted(*args: Any, **kwargs: Any) -> None:
        nonlocal num_left
        num_left -= 1
        launch(*args, **kwargs)
        if num_left < 0:
            raise error

    patch.setattr(ops, "replay_perturb", counted)


def close(ours: list[float], theirs: Iterable[Any]) -> None:
    theirs = [float(x) for x in theirs]
    assert ours == pytest.approx(theirs, rel=1e-6), f"{ours} is not {theirs}"


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.linear = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.linear(self.norm(x)))


class Toy(nn.Module):
    """Three blocks between an embedding and a head. Subclasses override `middle`, where traps are set."""

    def __init__(self, width: int = 16, vocab: int = 32) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(vocab, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(3))
        self.head = nn.Linear(width, vocab)

    def middle(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        logits = self.head(self.middle(self.embed(ids)))
        return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten())


class FunctionalTie(Toy):
    """The head is the embedding, applied by a function."""

    def __init__(self) -> None:
        super().__init__()
        del self.head

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        logits = nn.functional.linear(self.middle(self.embed(ids)), self.embed.weight)
        return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def toy_batches(num: int, *, size: int = 2, length: int = 6, vocab: int = 32) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [{"ids": torch.randint(0, vocab, (size, length), generator=generator)} for _ in range(num)]
