"""A script that changes gradients between `backward` and `step`: of adapters it changes the update as in a plain loop,
LSP refuses it.

A failure names the seed of its case.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn

from tests.helpers.adapter_runs import adapted, adapter_json, batches
from tests.helpers.adapter_runs import start as start_adapter
from tests.helpers.lomo_runs import start
from tests.helpers.lsp_runs import lsp_json, small, streamed_lsp
from tests.helpers.weights import weights
from tests.random.sizes import seeds

pytestmark = pytest.mark.usefixtures("single_process")

SEEDS = pytest.mark.parametrize("seed", seeds(12))
NUM_STEPS = 3
Change = Callable[[Sequence[nn.Parameter]], None]


def _with_gradients(parameters: Sequence[nn.Parameter]) -> list[nn.Parameter]:
    return [p for p in parameters if p.grad is not None]


def clip(parameters: Sequence[nn.Parameter]) -> None:
    nn.utils.clip_grad_norm_(parameters, 1e-3)


def zero(parameters: Sequence[nn.Parameter]) -> None:
    for p in _with_gradients(parameters):
        p.grad.zero_()  # type: ignore[union-attr]


def replace(parameters: Sequence[nn.Parameter]) -> None:
    for p in _with_gradients(parameters):
        p.grad = p.grad * -3.0


def drop_some(parameters: Sequence[nn.Parameter]) -> None:
    for p in _with_gradients(parameters)[::2]:
        p.grad = None


def sgd(parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    """Adam would hide a change of scale."""
    return torch.optim.SGD(parameters, lr=1.0, momentum=0.9)


CHANGES: list[Change] = [clip, zero, replace, drop_some]


def plain(model: nn.Module, data: Any, change: Change, *, accumulation: int, changes_each: bool) -> Any:
    """A loop whose optimizer trains float32 copies, as the backend's does for a 16-bit model."""
    own = [p for p in model.parameters() if p.requires_grad]
    masters = [nn.Parameter(p.detach().float()) for p in own]
    optimizer = sgd(masters)
    for i, batch in enumerate(data, 1):
        (model(**batch).loss / accumulation).backward()
        for p, master in zip(own, masters, strict=True):
            if p.grad is not None:
                master.grad = p.grad.float() if master.grad is None else master.grad + p.grad
            p.grad = None
        if changes_each or i % accumulation == 0:
            change(masters)
        if i % accumulation == 0:
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                for p, master in zip(own, masters, strict=True):
                    p.copy_(master)
    return weights(model)


@SEEDS
def test_a_change_of_an_adapters_gradient_counts_in_full(seed: int) -> None:
    rng = random.Random(seed)
    dtype, change = torch.float32 if seed % 4 == 3 else torch.bfloat16, rng.choice(CHANGES)
    of_optimizer, accumulation, changes_each = seed % 4 == 1, rng.choice([1, 2]), rng.random() < 0.5
    print(f"seed {seed}: {dtype}, {change.__name__}, {of_optimizer=}, {accumulation=}, {changes_each=}")
    model = adapted(dtype=dtype)
    reference = copy.deepcopy(model)
    reference.config.use_cache = False
    json = adapter_json(
        offload=rng.random() < 0.7,
        gradient_accumulation_steps=accumulation,
        gradient_clipping=0.0,
        bf16={"enabled": dtype is torch.bfloat16},
    )
    optimizer = sgd([p for p in model.parameters() if p.requires_grad])
    engine = start_adapter(model, json, optimizer=optimizer)
    data = batches(NUM_STEPS * accumulation)
    torch.manual_seed(7)
    for i, batch in enumerate(data, 1):
        engine.backward(engine(**batch).loss)
        if changes_each or i % accumulation == 0:
            change(optimizer.param_groups[0]["params"] if of_optimizer else list(model.parameters()))
        engine.step()
    found = weights(engine.module)
    engine.destroy()
    assert not any(p.grad is not None or p.grad_dtype is not p.dtype for p in model.parameters())
    torch.manual_seed(7)
    expected = plain(reference, data, change, accumulation=accumulation, changes_each=changes_each)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-6, atol=1e-7, msg=lambda m, name=name: f"{name}: {m}")


@SEEDS
def test_lsp_refuses_a_change_that_reaches_some_gradients_only(seed: int) -> None:
    rng = random.Random(seed)
    change = rng.choice([clip, zero, replace])
    make = streamed_lsp if rng.random() < 0.5 else lsp_json
    engine = start(make(params={"schedule": rng.choice(["sync", "layerwise"])}), small())
    print(f"seed {seed}: {change.__name__}, {make.__name__}")
    for i, batch in enumerate(batches(3, seed=seed)):
        engine.backward(engine(**batch).loss)
        if i == 2:
            change(list(engine.module.parameters()))
            with pytest.raises(ValueError, match=r"change of p\.grad would reach some parameters only"):
                engine.step()
        else:
            engine.step()
    engine.destroy()
