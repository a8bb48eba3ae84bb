"""The equalities on CUDA, with shapes whose copies take far longer than their compute, so that a missing wait shows.

Equality bit for bit needs deterministic algorithms and a fixed cuBLAS workspace, which must be set before CUDA starts.
"""

from __future__ import annotations

import copy
import gc
import os
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import pytest
import torch
from torch import nn

from tests.helpers.equivalence_runs import Measured, masters_of, on_device, one_step, zo_config, zo_engine
from tests.helpers.mezo_reference import PlainMeZO, loss_on
from tests.helpers.weights import Weights, assert_equal, parameters_of
from tests.helpers.zoo import CASES, Wandering, plain_batch, seeded

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("single_process", "deterministic")]

WIDTH = 2048
"""A block is 67 MB in float32: more than 1 ms on the link, a fraction of that to compute for sixteen tokens."""
NUM_BLOCKS = 6
NUM_STEPS = 200
LR = 1e-7


@pytest.fixture(scope="module")
def deterministic(deterministic: None) -> Iterator[None]:
    yield
    large_model.cache_clear()
    resident_run.cache_clear()


@cache
def large_model() -> nn.Module:
    return seeded(lambda: Wandering(num_blocks=NUM_BLOCKS, width=WIDTH))


def batches(num_steps: int, seed: int = 0) -> Iterable[dict[str, Any]]:
    return (plain_batch(1000 * seed + i % 50) for i in range(num_steps))


def run(
    stream: Mapping[str, Any] | None = None,
    *,
    steps: Iterable[Mapping[str, Any]],
    after_step: Callable[[Any, int], None] = lambda engine, step: None,
    without: Sequence[str] = (),
    **options: Any,
) -> Weights:
    """The masters after the steps. Frees all memory that the run used."""
    model = copy.deepcopy(large_model())
    with zo_engine(model, zo_config(stream=stream, **{"lr": LR, **options}), without=without) as engine:
        for number, batch in enumerate(steps):
            one_step(engine, batch)
            after_step(engine, number)
        found = masters_of(engine)
    del engine, model
    gc.collect()
    torch.cuda.empty_cache()
    start = next(iter(large_model().parameters()))
    assert all(bool(value.isfinite().all()) for value in found.values())
    assert not torch.equal(found["embed.weight"], start.detach()), "the weights did not move"
    return found


@cache
def resident_run(dtype: str | None, interval: int, seed: int, num_steps: int = NUM_STEPS, **options: Any) -> Weights:
    """A run in which nothing streams. In float32 the interval makes no difference, so one run serves all
    comparisons."""
    stream = {"writeback_interval": interval}
    return run(stream, steps=batches(num_steps, seed), dtype=dtype, offload=False, seed=seed, **options)


@pytest.mark.parametrize(
    "stream",
    [
        {"device_slots": 2, "writeback_interval": 1},
        {"device_slots": 3, "writeback_interval": 1},
        {"device_slots": 2, "writeback_interval": 3},
        {"device_slots": 4, "writeback_interval": 3},
        {"device_slots": 2, "writeback_interval": 3, "resident_blocks": 2},
        {"device_slots": 3, "writeback_interval": 1, "resident_blocks": 3},
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", [None, "bf16"])
def test_streamed_equals_resident_after_200_steps(dtype: str | None, stream: dict[str, Any]) -> None:
    """In bf16, low planes are uploaded and downloaded at folds."""
    expected = resident_run(dtype, stream["writeback_interval"] if dtype else 1, 0)
    assert_equal(run(stream, steps=batches(NUM_STEPS), dtype=dtype), expected)


@pytest.mark.parametrize("stream", [{"resident_blocks": 0}, {"resident_blocks": 2}], ids=str)
def test_measuring_for_an_interval_changes_no_weight(stream: dict[str, Any]) -> None:
    chosen: list[str | None] = []

    def note(engine: Any, step: int) -> None:
        chosen.append(engine.backend.store.step_time)

    found = run({"writeback_interval": None, **stream}, steps=batches(NUM_STEPS), after_step=note)
    assert chosen[0] is not None
    assert "ms a step expected" in chosen[0]
    assert_equal(found, resident_run(None, 1, 0))


@pytest.mark.parametrize(
    "stream",
    [
        {"resident_blocks": None, "writeback_interval": 1},
        {"resident_blocks": None, "writeback_interval": 2, "device_memory_gb": 0.7},
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", [None, "bf16"])
def test_automatic_residency_changes_nothing(dtype: str | None, stream: dict[str, Any]) -> None:
    interval = stream.get("writeback_interval", 1)
    expected = resident_run(dtype, interval if dtype else 1, 0, 40)
    assert_equal(run(stream, steps=batches(40), dtype=dtype), expected)


@pytest.mark.parametrize("without", ["overlap", "reuse_buffers", "fuse_update"])
@pytest.mark.parametrize("dtype", [None, "bf16"])
def test_features_that_benchmarks_switch_off_change_nothing(dtype: str | None, without: str) -> None:
    found = run({"writeback_interval": 1}, steps=batches(40), dtype=dtype, without=[without])
    assert_equal(found, resident_run(dtype, 1, 0, 40))


@pytest.mark.parametrize("master", ["split", "wire"])
@pytest.mark.parametrize("wire_dtype", ["fp8", "bf12", "bf16"])
def test_narrow_wires_do_not_depend_on_slots_or_residency(wire_dtype: str, master: str) -> None:
    stream = {"wire_dtype": wire_dtype, "master": master, "writeback_interval": 2}
    all_stay = run({**stream, "resident_blocks": NUM_BLOCKS}, steps=batches(30), dtype="bf16")
    for options in ({"device_slots": 2}, {"device_slots": 3, "resident_blocks": 2}):
        assert_equal(run({**stream, **options}, steps=batches(30), dtype="bf16"), all_stay)


@pytest.mark.parametrize("dtype", [None, "bf16"])
def test_blocks_called_in_any_order(dtype: str | None) -> None:
    rng = random.Random(1)
    orders = [tuple(rng.choices(range(NUM_BLOCKS), k=rng.randint(1, 9))) for _ in range(60)]
    steps = [plain_batch(i, order=order) for i, order in enumerate(orders)]
    stream = {"writeback_interval": 2}
    expected = run(stream, steps=steps, dtype=dtype, offload=False)
    for options in ({"device_slots": 2}, {"device_slots": 3}, {"resident_blocks": 3}):
        assert_equal(run({**stream, **options}, steps=steps, dtype=dtype), expected)


@pytest.mark.parametrize("num_resident", [0, 3])
@pytest.mark.parametrize("dtype", [None, "bf16"])
def test_looking_at_the_weights_leaves_training_undisturbed(dtype: str | None, num_resident: int) -> None:
    """Evaluations, state dicts and masters are read between steps, while copies are in flight."""
    seen: list[float] = []

    def look(engine: Any, step: int) -> None:
        if step % 3 == 0:
            engine.eval()
            with torch.no_grad():
                seen.append(float(engine(**on_device(engine, plain_batch(99)))))
            engine.train()
        if step % 7 == 1:
            parameters_of(engine)
        if step % 11 == 2:
            masters_of(engine)

    stream = {"writeback_interval": 4, "resident_blocks": num_resident}
    expected = run(stream, steps=batches(40), dtype=dtype)
    assert_equal(run(stream, steps=batches(40), dtype=dtype, after_step=look), expected)
    alone: list[float] = []

    def evaluate(engine: Any, step: int) -> None:
        if step % 3 == 0:
            engine.eval()
            with torch.no_grad():
                alone.append(float(engine.module(**on_device(engine, plain_batch(99)))))
            engine.train()

    run({"writeback_interval": 4}, steps=batches(40), dtype=dtype, offload=False, after_step=evaluate)
    assert seen == alone, "an evaluation saw other weights than those of its step"


@pytest.mark.parametrize("name", ["opt", "llama", "gpt2", "mixtral", "t5"])
def test_streamed_model_follows_mezo(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on the CPU, where the bound is explained."""
    measured, case = Measured(monkeypatch), CASES[name]
    model = case.make()
    reference = PlainMeZO(copy.deepcopy(model).cuda(), lr=1e-3)
    losses = []
    with zo_engine(model, zo_config(lr=1e-3, stream={"writeback_interval": 3})) as engine:
        for seed in range(20):
            batch = on_device(engine, case.batch(seed))
            here = {key: value.cuda() for key, value in parameters_of(engine).items()}
            expected = reference.passes(loss_on(batch), here)
            measured.take()
            one_step(engine, batch)
            found = measured.take()[-1]
            torch.testing.assert_close(found, expected, rtol=1e-6, atol=0.0)
            reference.step(loss_on(batch))
            losses.append(float(found[0]))
        ours = parameters_of(engine)
    bound = 1e-3 * sum(1e-6 * loss / reference.zo_eps for loss in losses) * reference.largest_z + 20 * 2.0**-23
    for key, value in reference.weights.items():
        assert float((ours[key] - value.cpu()).abs().max()) <= bound


def test_peak_memory_is_a_few_blocks() -> None:
    """The peak is two slots, one working copy and the outer modules of a model with 24 blocks; activations are
    negligible here."""
    model = seeded(lambda: Wandering(num_blocks=24, width=2048))
    whole = sum(p.numel() * p.element_size() for p in model.parameters())
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    with zo_engine(model, zo_config(lr=LR, stream={"writeback_interval": 2})) as engine:
        for batch in batches(10):
            one_step(engine, batch)
        parameters_of(engine)
        taken = torch.cuda.max_memory_allocated() - before
        planned = engine.backend.store.blocks.placement
        largest = max(unit.nbytes for unit in planned.blocks)
    outer_nbytes = sum(unit.nbytes for unit in (*planned.leaf_units, *planned.pass_long))
    assert taken < 3 * largest + 2 * outer_nbytes + 32 * 2**20
    assert taken < whole / 5
