"""The ZO backend against plain MeZO, in float32.

[Note: what equality means here] From equal weights both measure the same l+ and l- but for float32's rounding, of
which 1e-6 relative is an upper bound. Two such errors over 2 zo_eps are in g = (l+ - l-) / (2 zo_eps), so g is known to
dg = 1e-6 |l| / zo_eps, and weights after n steps to lr * sum(dg) * |z|. Rates are high enough for the weights to move
many times that, and each run checks that they did.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pytest
import torch

from tests.helpers.equivalence_runs import Measured, one_step, zo_config, zo_engine
from tests.helpers.mezo_reference import PlainMeZO, Weights, loss_on
from tests.helpers.weights import parameters_of
from tests.helpers.zoo import CASES, Batch, Wandering, plain_batch, seeded

pytestmark = pytest.mark.usefixtures("single_process")

LOSS_ERROR = 1e-6
"""Relative."""
NUM_STEPS = 4
"""Of most runs: losses are compared from equal weights in each step, so that more steps show little more."""


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> Measured:
    return Measured(monkeypatch)


def weights_error(reference: PlainMeZO, losses: Sequence[float]) -> float:
    """How far weights may be apart after steps with these losses; see [Note: what equality means here]."""
    of_gradients = sum(LOSS_ERROR * abs(loss) / reference.zo_eps for loss in losses)
    return reference.lr * of_gradients * reference.largest_z + len(losses) * 2.0**-23


def largest_difference(ours: Weights, theirs: Weights) -> float:
    assert ours.keys() == theirs.keys()
    return max(float((ours[name] - theirs[name]).abs().max()) for name in theirs)


def assert_follows(
    engine: Any,
    reference: PlainMeZO,
    batches: Iterable[Batch],
    measured: Measured,
    *,
    compare_every: int = 1,
) -> None:
    """Steps both models, comparing losses from equal weights at each step, or every few, and the weights at the end."""
    start = {name: value.clone() for name, value in reference.weights.items()}
    losses = []
    for number, batch in enumerate(batches):
        is_compared = number % compare_every == 0
        expected = reference.passes(loss_on(batch), parameters_of(engine)) if is_compared else []
        measured.take()
        one_step(engine, batch)
        (found,) = measured.take()
        if is_compared:
            torch.testing.assert_close(found, expected, rtol=LOSS_ERROR, atol=0.0)
        reference.step(loss_on(batch))
        losses.append(float(found[0]))
    bound = weights_error(reference, losses)
    ours = parameters_of(engine)
    assert largest_difference(ours, reference.weights) <= bound
    assert largest_difference(ours, start) > 20 * bound, "the weights hardly moved: the comparison shows nothing"
    for name, p in reference.model.named_parameters():
        assert p.requires_grad or torch.equal(ours[name], start[name])


def run_case(
    name: str,
    measured: Measured,
    *,
    num_steps: int,
    offload: bool = True,
    lr: float = 1e-3,
    compare_every: int = 1,
    **options: Any,
) -> None:
    case = CASES[name]
    model = case.make()
    knobs = {k: options[k] for k in ("num_directions", "distribution", "weight_decay", "seed") if k in options}
    reference = PlainMeZO(model, lr=lr, **knobs)
    with zo_engine(model, zo_config(lr=lr, offload=offload, **options)) as engine:
        assert len(engine.backend.store.blocks.placement.blocks) == case.num_blocks
        assert all(unit.streamed == offload for unit in engine.backend.store.blocks.placement.blocks)
        batches = map(case.batch, range(num_steps))
        assert_follows(engine, reference, batches, measured, compare_every=compare_every)
        assert engine.backend._passes.runner.interleave, "the passes were not run in lockstep"


@pytest.mark.parametrize("name", [name for name in CASES if name != "opt"])
def test_streamed_model_follows_mezo(name: str, measured: Measured) -> None:
    run_case(name, measured, num_steps=NUM_STEPS)


def test_streamed_model_follows_mezo_for_many_steps(measured: Measured) -> None:
    """One architecture: that errors do not add up over steps does not depend on it. Nor do losses from equal weights,
    which are compared at every sixth step: weights that went apart at any step are apart at the end."""
    run_case("opt", measured, num_steps=25, compare_every=6)


@pytest.mark.parametrize("name", ["opt", "llama-tied", "t5", "listless"])
def test_resident_model_follows_mezo(name: str, measured: Measured) -> None:
    run_case(name, measured, num_steps=NUM_STEPS, offload=False)


@pytest.mark.parametrize(
    "options",
    [
        {"num_directions": 2},
        {"num_directions": 3, "distribution": "rademacher"},
        {"distribution": "rademacher"},
        {"weight_decay": 0.5},
        {"seed": 2**40 + 7},
    ],
    ids=str,
)
def test_options_follow_mezo(options: Mapping[str, Any], measured: Measured) -> None:
    run_case("qwen2", measured, num_steps=NUM_STEPS, **options)


@pytest.mark.parametrize("offload", [True, False])
@pytest.mark.parametrize("interval", [1, 3])
def test_frozen_parameters_follow_mezo_and_never_change(offload: bool, interval: int, measured: Measured) -> None:
    """One frozen matrix in every block, a whole frozen block, and the embedding."""
    case = CASES["llama"]
    model = case.make()
    for name, p in model.named_parameters():
        if "q_proj" in name or "layers.1." in name or "embed_tokens" in name:
            p.requires_grad_(False)
    reference = PlainMeZO(model, lr=1e-3)
    with zo_engine(model, zo_config(offload=offload, stream={"writeback_interval": interval})) as engine:
        assert_follows(engine, reference, map(case.batch, range(5)), measured)


def test_lr_schedule_follows_mezo() -> None:
    """An update is made when it is replayed, with the lr of the step that it belongs to."""
    case, lr, num_steps = CASES["llama"], 1e-3, 8
    warmup = {"warmup_min_lr": 1e-4, "warmup_max_lr": lr, "warmup_num_steps": num_steps, "warmup_type": "linear"}
    model = case.make()
    reference = PlainMeZO(model, lr=lr)
    start = {name: value.clone() for name, value in reference.weights.items()}
    scheduler = {"type": "WarmupLR", "params": warmup}
    with zo_engine(model, {**zo_config(lr=lr, stream={"writeback_interval": 4}), "scheduler": scheduler}) as engine:
        used, losses = [], []
        for batch in map(case.batch, range(num_steps)):
            used.append(engine.get_lr()[0])
            one_step(engine, batch)
            reference.lr = used[-1]
            losses.append(reference.step(loss_on(batch))[0])
        assert used == sorted(used) and used[-1] > 5 * used[0], "the schedule did not move"
        reference.lr = lr
        bound = weights_error(reference, losses)
        assert largest_difference(parameters_of(engine), reference.weights) <= bound
        assert largest_difference(reference.weights, start) > 20 * bound


def test_accumulated_micro_batches_follow_mezo_on_the_whole_batch() -> None:
    """4 x 1 against 1 x 4, with one z a step."""
    case = CASES["llama"]
    wholes = [plain_batch(i) for i in range(6)]
    wholes = [{k: torch.cat([v, (v + 1) % 60 + 3]) for k, v in batch.items()} for batch in wholes]
    reference = PlainMeZO(case.make(), lr=1e-3)
    start = {name: value.clone() for name, value in reference.weights.items()}
    losses = []
    with zo_engine(case.make(), zo_config(accumulation=4, batch_size=1, stream={"writeback_interval": 2})) as engine:
        for whole in wholes:
            for i in range(4):
                one_step(engine, {k: v[i : i + 1] for k, v in whole.items()})
            losses.append(reference.step(loss_on(whole))[0])
        assert engine.global_steps == len(wholes)
        # The mean of four losses is rounded once more than the loss of four.
        bound = 2 * weights_error(reference, losses)
        assert largest_difference(parameters_of(engine), reference.weights) <= bound
        assert largest_difference(reference.weights, start) > 20 * bound


ORDERS: list[tuple[int, ...]] = [
    (0, 1, 2, 3),
    (0, 2, 3),
    (3, 2, 1, 0),
    (1,),
    (0, 0, 1, 1, 2, 3),
    (2, 0, 2, 0, 3, 3),
    (0, 1, 2, 3),
    (),
    (3, 0),
    (0, 1, 2, 3, 0, 1, 2, 3),
    (1, 3, 2, 0),
]


@pytest.mark.parametrize("interval", [1, 3])
@pytest.mark.parametrize("slots", [2, 3])
def test_skipped_repeated_and_reordered_blocks_follow_mezo(slots: int, interval: int, measured: Measured) -> None:
    """Each step calls blocks in another order, so that plans are wrong: a block may be in a slot, in flight, or
    replaced."""
    model = seeded(Wandering)
    reference = PlainMeZO(model, lr=1e-3)
    batches = [plain_batch(i, order=order) for i, order in enumerate(ORDERS)]
    config = zo_config(stream={"device_slots": slots, "writeback_interval": interval})
    with zo_engine(model, config) as engine:
        assert_follows(engine, reference, batches, measured)


def test_order_that_differs_within_accumulation_follows_mezo() -> None:
    """The second micro-batch uses blocks that the first one folded, left pending, or did not use."""
    model = seeded(Wandering)
    reference = PlainMeZO(model, lr=1e-3)
    orders = [
        [(0, 1, 2, 3), (3, 1)],
        [(2,), (0, 1, 2, 3)],
        [(1, 1), (2, 0)],
        [(0, 1, 2, 3), (0, 1, 2, 3)],
        [(3,), (0,)],
    ]
    losses = []
    with zo_engine(model, zo_config(accumulation=2, stream={"writeback_interval": 2})) as engine:
        for i, pair in enumerate(orders):
            batches = [plain_batch(10 * i + j, order=order) for j, order in enumerate(pair)]
            for batch in batches:
                one_step(engine, batch)
            losses += [reference.step(*map(loss_on, batches))[0]] * 2
        assert largest_difference(parameters_of(engine), reference.weights) <= weights_error(reference, losses)
