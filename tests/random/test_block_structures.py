"""Engines on models of random structure, held against plain loops: equal to them, or refused by name.

A failure names the seed of its model.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn

from tests.helpers.lomo_runs import start, streamed
from tests.helpers.lsp_runs import identity_projectors, lsp_json, streamed_lsp
from tests.helpers.mezo_reference import PlainMeZO, loss_on
from tests.helpers.weights import Weights, parameters_of
from tests.helpers.zo_runs import zo_json
from tests.random.generated_models import NUM_TURNS, Generated, Plain, batches
from tests.random.sizes import seeds

pytestmark = pytest.mark.usefixtures("single_process")

NUM_STEPS = 4

ADAM = {"lr": 1e-2, "weight_decay": 0.1, "eps": 1e-5}


def trained(config: dict[str, Any], seed: int) -> tuple[Weights, float]:
    """The weights after a few steps, and the loss of an evaluation."""
    model = Generated(seed).train()
    engine = start(config, model)
    try:
        for step, batch in enumerate(batches(seed, NUM_STEPS)):
            model.clock.turn = step % NUM_TURNS
            engine.backward(engine(**batch))
            engine.step()
        engine.eval()
        with torch.no_grad():
            evaluated = engine(**next(batches(seed + 1, 1))).item()
        return parameters_of(engine), evaluated
    finally:
        engine.destroy()


RULES: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda params: torch.optim.SGD(params, lr=0.1),
    "AdamW": lambda params: torch.optim.AdamW(params, **ADAM),
}


@cache
def plain(seed: int, rule: str) -> tuple[Weights, float]:
    model = Generated(seed).train()
    made = RULES[rule](model.parameters())
    for step, batch in enumerate(batches(seed, NUM_STEPS)):
        model.clock.turn = step % NUM_TURNS
        model(**batch).backward()
        made.step()
        made.zero_grad()
    return {name: p.detach() for name, p in model.named_parameters()}, evaluated_by(model, seed)


def by_mezo(seed: int) -> tuple[Weights, float]:
    reference: Any = PlainMeZO(Generated(seed).train(), lr=1e-2)
    for step, batch in enumerate(batches(seed, NUM_STEPS)):
        reference.model.clock.turn = step % NUM_TURNS
        reference.step(loss_on(batch))
    return reference.weights, evaluated_by(reference.model, seed)


@torch.no_grad()
def evaluated_by(model: nn.Module, seed: int) -> float:
    loss: float = model.eval()(**next(batches(seed + 1, 1))).item()
    return loss


def compare(seed: int, config: dict[str, Any], expected: tuple[Weights, float], *, atol: float, what: str) -> bool:
    """True: equal; False: refused, as engines may that stream."""
    print(f"seed {seed}: {what}")
    try:
        ours, evaluated = trained(config, seed)
    except ValueError as error:
        remedies = ("ds_zo.stream.blocks", "offload_param", "use it there from the first step on")
        is_named = "stack" in str(error) and any(remedy in str(error) for remedy in remedies)
        if "offload_param" in config["zero_optimization"] and is_named:
            return False
        raise AssertionError(f"seed {seed}, {what}: {error}") from error
    except Exception as error:
        raise AssertionError(f"seed {seed}, {what}: {type(error).__name__}: {error}") from error
    weights, loss = expected
    for name, value in weights.items():
        torch.testing.assert_close(ours[name], value, rtol=1e-5, atol=atol, msg=lambda m: f"seed {seed}, {what}: {m}")
    assert evaluated == pytest.approx(loss, abs=10 * atol, rel=1e-4), f"seed {seed}, {what}: evaluation"
    return True


SEEDS = pytest.mark.parametrize("seed", seeds(20))


@SEEDS
def test_lomo_is_sgd(seed: int) -> None:
    expected = plain(seed, "SGD")
    resident = streamed()
    resident["zero_optimization"] = {"stage": 0}
    assert compare(seed, resident, expected, atol=1e-6, what="LOMO")
    compare(seed, streamed(), expected, atol=1e-6, what="LOMO streamed")


@SEEDS
def test_lsp_is_adamw(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = plain(seed, "AdamW")
    own: dict[str, Any] = {**ADAM, "projector": "none"}
    if seed % 2:
        identity_projectors(monkeypatch)
        own.pop("projector")
    config = lsp_json(params=own)
    assert compare(seed, config, expected, atol=2e-5, what="LSP")
    assert compare(seed, lsp_json(params={**own, "schedule": "sync"}), expected, atol=2e-5, what="LSP sync")
    compare(seed, streamed_lsp(params=own), expected, atol=2e-5, what="LSP streamed")


@SEEDS
def test_zo_is_mezo(seed: int) -> None:
    """Or refused: a module that the first forward leaves out, and whose weights a later one uses without a call."""
    expected = by_mezo(seed)
    own = {"lr": 1e-2}
    is_equal = compare(seed, zo_json(offload=False, params=own), expected, atol=2e-5, what="ZO")
    assert is_equal or Generated(seed).leaves_out_at_first
    compare(seed, zo_json(params=own), expected, atol=2e-5, what="ZO streamed")
    compare(seed, zo_json(params=own, interval=3, resident_blocks=1), expected, atol=2e-5, what="ZO streamed in part")


def test_tiles_are_whole_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of four samples; also where a block numbers its samples, and is not tiled. Each backend has runs with tiles."""
    sizes: list[int] = []
    compute = Plain.compute

    def noted(module: Plain, x: torch.Tensor) -> torch.Tensor:
        if torch.is_grad_enabled():  # so in recomputations
            sizes.append(len(x))
        return compute(module, x)

    monkeypatch.setattr(Plain, "compute", noted)
    num_tiled = {"LOMO": 0, "LSP": 0}
    for seed in seeds(20):
        runs = [("LOMO", streamed(stream={"tiles": tiles}), plain(seed, "SGD"), 1e-6) for tiles in (2, 3)]
        lsp = streamed_lsp(params={**ADAM, "projector": "none"}, stream={"tiles": 2 + seed % 3})
        for kind, config, expected, atol in [*runs, ("LSP", lsp, plain(seed, "AdamW"), 2e-5)]:
            sizes.clear()
            compare(seed, config, expected, atol=atol, what=f"{kind}, {config['ds_zo']['stream']}")
            num_tiled[kind] += 1 in sizes  # of a tile: the trial takes two samples
    assert all(num_tiled.values()), num_tiled
