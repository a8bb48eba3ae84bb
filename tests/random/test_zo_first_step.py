"""Models that hide something from ZO: activations that outlive the forward, generators and counters, weights that are
tied during a run. A seed draws where it lies. ZO trains as plain passes do, or refuses by name.

A failure tells the seed of its case.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from itertools import count
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from ds_zo.backends.zo.repeats import check_repeats
from tests.helpers.mezo_reference import PlainMeZO, loss_on
from tests.helpers.weights import assert_equal, weights
from tests.helpers.zo_runs import Recorder, Toy, close, engine_for, log_lines, one_step, toy_batches, train, zo_json
from tests.random.sizes import seeds

pytestmark = pytest.mark.usefixtures("single_process")

SEEDS, FEW_SEEDS = seeds(20), seeds(5)
BATCHES = toy_batches(6)


def draw_json(draw: random.Random) -> dict[str, Any]:
    params = {"num_directions": draw.choice([1, 1, 2])}
    return zo_json(offload=draw.random() < 0.6, interval=draw.choice([1, 2]), params=params)


# Activations that outlive the forward


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * x


MADE: list[Callable[[torch.Tensor], Any]] = [
    lambda x: x,
    lambda x: x.mean(-1),
    lambda x: (x[..., 0], x[..., 1:].clone()),
    lambda x: torch.cat([x, torch.ones_like(x)]),
    lambda x: torch.zeros(()).add_(x.sum()),
    lambda x: Square.apply(x),
]
CONSTANTS: list[Callable[[torch.Tensor], Any]] = [
    lambda x: x.detach(),
    lambda x: x.data.mean(),
    lambda x: (x > 0).float() * 2,
    lambda x: torch.cat([x.detach(), torch.ones(x.shape)]),
]
PLACES = ("attribute", "list", "dict", "object", "closure", "hook", "hook before")


class Keeps(Toy):
    """Keeps what `make` makes of an activation, in the place `where`."""

    def __init__(self, draw: random.Random, where: str, make: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.where, self.make, self.at = where, make, draw.randrange(3)
        self.attribute: Any = None
        self.items: list[Any] = [None]
        self.by_name: dict[str, Any] = {"x": None}
        self.of_object = SimpleNamespace(x=None)
        found: dict[str, Any] = {"x": None}
        self.closure = found.update, lambda: found["x"]
        block = f"blocks.{self.at}"
        if where == "hook":
            name = draw.choice(["embed", "head", block, f"{block}.norm", f"{block}.linear"])
            self.get_submodule(name).register_forward_hook(lambda m, args, output: self.keep(output))
        if where == "hook before":
            self.get_submodule(draw.choice([block, f"{block}.norm"])).register_forward_pre_hook(
                lambda m, args: self.keep(args[0])
            )

    def middle(self, x: torch.Tensor) -> torch.Tensor:
        for index, block in enumerate(self.blocks):
            x = block(x)
            if index == self.at and "hook" not in self.where:
                self.keep(x)
        return x

    def keep(self, x: torch.Tensor) -> None:
        made = self.make(x)
        if self.where == "attribute":
            self.attribute = made
        elif self.where == "list":
            self.items[0] = made
        elif self.where == "dict":
            self.by_name["x"] = made
        elif self.where == "object":
            self.of_object.x = made
        else:
            self.closure[0](x=made)

    def term(self) -> torch.Tensor:
        kept = [self.attribute, self.items[0], self.by_name["x"], self.of_object.x, self.closure[1]()]
        found = next(x for x in kept if x is not None)
        return (found[-1] if isinstance(found, tuple) else found).square().mean()


def step_with(engine: Any, batch: dict[str, torch.Tensor], term: Callable[[], Any]) -> bool:
    """One step by the loss and a term. Returns whether the term was refused; then the step is by the loss alone."""
    loss = engine(**batch)
    total, refused = loss + term(), False
    try:
        engine.backward(total)
    except ValueError as error:
        assert "activation that the forward left behind" in str(error)
        refused = True
        with pytest.raises(ValueError, match="left behind"):
            total.backward()
        engine.zero_grad()
        engine.backward(loss)
    engine.step()
    return refused


@pytest.mark.parametrize("where", PLACES)
@pytest.mark.parametrize("seed", FEW_SEEDS)
def test_a_term_of_an_activation_that_was_kept_is_refused(seed: int, where: str) -> None:
    """A term that begins later is refused from the step after, also one that replaces a number."""
    draw = random.Random(f"{seed} {where}")
    make, json, begin = draw.choice(MADE), draw_json(draw), draw.choice([0, 0, 1, 2])
    case = f"seed {seed}: {where}, MADE[{MADE.index(make)}], from step {begin}, {json}"
    engine, plain = engine_for(Keeps(draw, where, make), json), engine_for(Toy(), json)
    before: Callable[[], Any] = draw.choice([lambda: 0.0, lambda: engine.module.head.bias.detach().sum()])
    refused = [step_with(engine, batch, before) for batch in BATCHES[:begin]]
    assert not any(refused), case
    while len(refused) < begin + 1 + bool(begin) and not any(refused):
        refused.append(step_with(engine, BATCHES[len(refused)], engine.module.term))
    assert refused[-1], case
    train(plain, BATCHES[: len(refused)])
    assert_equal(weights(engine.module), weights(plain.module))


@pytest.mark.parametrize("seed", SEEDS)
def test_a_constant_that_was_kept_is_allowed(seed: int) -> None:
    draw = random.Random(seed)
    where, make, json = draw.choice(PLACES), draw.choice(CONSTANTS), draw_json(draw)
    engine, plain = engine_for(Keeps(draw, where, make), json), engine_for(Toy(), json)
    case = f"seed {seed}: {where}, CONSTANTS[{CONSTANTS.index(make)}], {json}"
    refused = [step_with(engine, batch, engine.module.term) for batch in BATCHES[:3]]
    assert not any(refused), case
    assert not engine.module.term().requires_grad, case
    train(plain, BATCHES[:3])
    assert_equal(weights(engine.module), weights(plain.module))


# Generators and counters

KINDS: list[Callable[[], tuple[Any, Callable[[Any], float]]]] = [
    lambda: (torch.Generator().manual_seed(1), lambda g: torch.rand((), generator=g).item()),
    lambda: (np.random.default_rng(1), lambda g: g.random()),
    lambda: (random.Random(1), lambda g: g.random()),
]
HELD: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "attribute": (lambda g: g, lambda held: held),
    "list": (lambda g: [0, g], lambda held: held[1]),
    "tuple in a dict": (lambda g: {"x": (g,)}, lambda held: held["x"][0]),
    "dict in a list": (lambda g: [{"x": g}], lambda held: held[0]["x"]),
    "deque": (lambda g: deque([g]), lambda held: held[0]),
}


class Draws(Toy):
    """Scales blocks by draws. `number` returns the next one."""

    def __init__(self, number: Callable[[Draws], float], *, in_blocks: bool) -> None:
        super().__init__()
        self.held: Any = None
        self.number, self.in_blocks = number, in_blocks

    def middle(self, x: torch.Tensor) -> torch.Tensor:
        x = x * (1 + 0.1 * self.number(self))
        for block in self.blocks:
            x = block(x * (1 + 0.1 * self.number(self)) if self.in_blocks else x)
        return x


@pytest.mark.parametrize("seed", SEEDS)
def test_generators_in_attributes_and_containers_draw_the_same_in_all_passes(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw = random.Random(seed)
    passes, json = Recorder(monkeypatch), draw_json(draw)
    name, kind = draw.choice(list(HELD)), draw.choice(KINDS)
    (hold, find), (generator, number) = HELD[name], kind()
    model = Draws(lambda m: number(find(m.held)), in_blocks=draw.random() < 0.5)
    model.held = hold(generator)
    engine = engine_for(model, json)
    with log_lines() as lines:
        for step, batch in enumerate(BATCHES[:3]):
            if step == 2:
                engine.module.held = hold(kind()[0])  # another generator
            reference = PlainMeZO(engine.module, copies_model=True)
            reference.steps = step
            expected = reference.passes(loss_on(batch))
            one_step(engine, batch)
            close(passes.last[:2], expected)
    assert not any("one pass after the other" in line for line in lines), f"seed {seed}: {name}, {json}"


def hidden_numbers(draw: random.Random) -> Callable[[Draws], float]:
    """Numbers from a place that no engine can find."""
    generator, number = draw.choice(KINDS)()
    counted, away = count(), SimpleNamespace(calls=0)

    def calls(model: Draws) -> float:
        away.calls += 1
        return float(away.calls)

    return draw.choice(
        [lambda m: number(generator), lambda m: next(counted), lambda m: next(counted) % (2 + m.in_blocks), calls]
    )


@pytest.mark.parametrize("seed", SEEDS)
def test_hidden_generators_and_counters_are_refused(seed: int) -> None:
    draw = random.Random(seed)
    model, json = Draws(hidden_numbers(draw), in_blocks=draw.random() < 0.5), draw_json(draw)
    engine, before = engine_for(model, json), weights(model)
    with pytest.raises(ValueError, match=r"run twice from one state .* keep it in an attribute of a module"):
        engine(**BATCHES[0])
        pytest.fail(f"seed {seed}: {json}")
    assert_equal(weights(engine.module), before)


def noisy(scale: float, dtype: torch.dtype) -> tuple[Any, Any]:
    """Two runs of two passes whose losses differ by `scale` of their value."""
    return tuple([[torch.tensor(2.0 * (1 + run * scale), dtype=dtype)]] * 2 for run in (0, 1))


@pytest.mark.parametrize(
    ("scale", "dtype", "loss_dtype"),
    [
        (5e-6, torch.float32, torch.float32),
        (1e-3, torch.bfloat16, torch.float32),
        (1e-2, torch.float32, torch.bfloat16),
        (1e-4, torch.float16, torch.float32),
    ],
)
def test_rounding_is_not_refused(scale: float, dtype: torch.dtype, loss_dtype: torch.dtype) -> None:
    """Atomic adds on CUDA have no fixed order."""
    with log_lines() as lines:
        check_repeats(*noisy(scale, loss_dtype), {dtype, torch.int64})
    assert any("run twice from one state" in line for line in lines)
    with pytest.raises(ValueError, match="run twice from one state"):
        check_repeats(*noisy(10 * scale, loss_dtype), {dtype})


# Weights tied after deepspeed.initialize


@pytest.mark.parametrize("seed", SEEDS)
def test_weights_tied_during_a_run_are_refused(seed: int) -> None:
    draw = random.Random(seed)
    json, num_before = draw_json(draw), draw.randrange(3)
    engine, undisturbed = engine_for(Toy(), json), engine_for(Toy(), json)
    train(engine, BATCHES[:num_before])
    module = engine.module
    owners = {name: module.get_submodule(name.rpartition(".")[0]) for name, _ in module.named_parameters()}
    shapes = dict(module.named_parameters())
    ours, theirs = draw.choice(
        [(a, b) for a in shapes for b in shapes if owners[a] is not owners[b] and shapes[a].shape == shapes[b].shape]
    )
    kept = shapes[ours]
    setattr(owners[ours], ours.rpartition(".")[2], shapes[theirs])
    with pytest.raises(
        ValueError, match=f"{ours} was removed .*, or another one was put in its place, .* tie parameters"
    ):
        engine(**BATCHES[num_before])
        pytest.fail(f"seed {seed}: {ours}, {theirs}, {json}")
    setattr(owners[ours], ours.rpartition(".")[2], kept)
    train(engine, BATCHES[num_before : num_before + 2])
    train(undisturbed, BATCHES[: num_before + 2])
    assert_equal(weights(engine.module), weights(undisturbed.module))


@pytest.mark.parametrize("seed", FEW_SEEDS)
def test_a_module_that_takes_the_place_of_another_during_a_run_is_refused(seed: int) -> None:
    draw = random.Random(seed)
    json = draw_json(draw)
    engine, undisturbed = engine_for(Toy(), json), engine_for(Toy(), json)
    train(engine, BATCHES[:1])
    blocks = engine.module.blocks
    a, b = draw.sample(range(len(blocks)), 2)
    kept = blocks[b].linear
    blocks[b].linear = blocks[a].linear
    with pytest.raises(ValueError, match=rf"blocks\.{b}\.linear\.weight was removed"):
        engine(**BATCHES[1])
        pytest.fail(f"seed {seed}: {a}, {b}, {json}")
    blocks[b].linear = kept
    train(engine, BATCHES[1:3])
    train(undisturbed, BATCHES[:3])
    assert_equal(weights(engine.module), weights(undisturbed.module))
