"""Short ZO trainings through `deepspeed.initialize`, their weights and what their passes measured."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import deepspeed
import pytest
import torch
from torch import nn

import ds_zo.backends.zo.backend
from benchmarks.ablations import initialize
from tests.helpers.weights import Weights, parameters_of
from tests.helpers.zo_runs import on_device, zo_json


def zo_config(
    *,
    stream: Mapping[str, Any] | None = None,
    offload: bool = True,
    dtype: str | None = None,
    accumulation: int = 1,
    section: Mapping[str, Any] | None = None,
    batch_size: int = 2,
    **params: Any,
) -> dict[str, Any]:
    """A JSON for ZO. Streamed with no block resident unless told otherwise; `params` are the optimizer's."""
    json = zo_json(offload=offload, params=params, gradient_accumulation_steps=accumulation, gradient_clipping=1.0)
    json["train_micro_batch_size_per_gpu"] = batch_size
    json["ds_zo"] = {"stream": {**({"resident_blocks": 0} if offload else {}), **(stream or {})}, **(section or {})}
    if offload:
        json["zero_optimization"]["offload_param"]["pin_memory"] = True
    if dtype is not None:
        json[dtype] = {"enabled": True}
    return json


@contextmanager
def zo_engine(
    model: nn.Module, config: Mapping[str, Any], *, without: Sequence[str] = (), **arguments: Any
) -> Iterator[Any]:
    """`without`: features that `benchmarks.ablations` switches off."""
    engine = initialize(without, model=model, config=dict(config), **arguments)
    try:
        yield engine
    finally:
        engine.destroy()


def one_step(engine: Any, batch: Mapping[str, Any]) -> None:
    output = engine(**on_device(engine, batch))
    engine.backward(output if isinstance(output, torch.Tensor) else output.loss)
    engine.step()


def masters_of(engine: Any) -> Weights:
    """The current weights in float32, low planes and pending updates included."""
    get = deepspeed.utils.safe_get_full_fp32_param
    return {name: get(p).to("cpu", copy=True) for name, p in engine.module.named_parameters()}


def trained(
    model: nn.Module, config: Mapping[str, Any], batches: Iterable[Mapping[str, Any]], **arguments: Any
) -> Weights:
    """The weights after a step a batch."""
    with zo_engine(model, config, **arguments) as engine:
        for batch in batches:
            one_step(engine, batch)
        return parameters_of(engine)


class Measured:
    """The losses of every forward since they were last taken: a list a forward, in the order +, -, +, - ..."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._forwards: list[list[torch.Tensor]] = []
        tie = ds_zo.backends.zo.backend.tie

        def noting_tie(passes: Any, **arguments: Any) -> Any:
            self._forwards.append([tensors[0].clone() for tensors in passes])
            return tie(passes, **arguments)

        monkeypatch.setattr(ds_zo.backends.zo.backend, "tie", noting_tie)

    def take(self) -> list[list[torch.Tensor]]:
        taken, self._forwards = self._forwards, []
        return taken
