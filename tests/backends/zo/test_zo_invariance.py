"""Settings that must not change a run: the number of slots, which blocks stay resident, when weights are written back,
and the ablations.

The weights after several steps are compared bit for bit. In bf16 the rounding of stored weights depends on when they
fold, so bf16 runs are compared at one interval.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import pairwise
from typing import Any

import pytest
import torch

from tests.helpers.equivalence_runs import masters_of, one_step, trained, zo_config, zo_engine
from tests.helpers.weights import assert_equal, parameters_of
from tests.helpers.zo_runs import Toy, toy_batches
from tests.helpers.zoo import CASES

pytestmark = pytest.mark.usefixtures("single_process")

NUM_STEPS = 8
"""One more than the longest interval that writes back within a run."""
MODEL = "opt"
"""Tied embedding, positions, biases, norms: every kind of edge."""
PATH = "model.decoder.layers"


def run(*, num_steps: int = NUM_STEPS, without: Sequence[str] = (), **options: Any) -> dict[str, torch.Tensor]:
    case = CASES[MODEL]
    return trained(case.make(), zo_config(**options), map(case.batch, range(num_steps)), without=without)


@cache
def resident_run(**options: Any) -> dict[str, torch.Tensor]:
    """A run without offload: nothing is streamed, replayed or written back."""
    return run(offload=False, **options)


@pytest.mark.parametrize(
    "stream",
    [
        {"writeback_interval": 1},
        {"writeback_interval": 1, "device_slots": 4},
        {"writeback_interval": 2, "device_slots": 3},
        {"writeback_interval": 7, "device_slots": 4},
        {"writeback_interval": 64},
        {},
        {"writeback_interval": 1, "resident_blocks": 1},
        {"writeback_interval": 2, "resident_blocks": 2},
        {"writeback_interval": 7, "resident_blocks": 1, "device_slots": 3},
        {"writeback_interval": 7, "resident_blocks": 3},
        {"blocks": PATH, "writeback_interval": 2},
        {"blocks": [PATH], "writeback_interval": 1},
    ],
    ids=str,
)
def test_streamed_run_equals_resident_run(stream: dict[str, Any]) -> None:
    assert_equal(run(stream=stream), resident_run())


FEATURES = ["overlap", "reuse_buffers", "fuse_update"]


@pytest.mark.parametrize(
    ("without", "num_resident", "dtype"),
    [
        *((["overlap"], 0, None), (["overlap"], 1, "bf16")),
        *((["reuse_buffers"], 1, None), (["reuse_buffers"], 0, "bf16")),
        *((["fuse_update"], 0, None), (["fuse_update"], 1, "bf16")),
        *((FEATURES, 1, None), (FEATURES, 0, "bf16")),
    ],
    ids=str,
)
def test_features_that_benchmarks_switch_off_change_nothing(
    without: list[str], num_resident: int, dtype: str | None
) -> None:
    found = run(stream={"writeback_interval": 1, "resident_blocks": num_resident}, dtype=dtype, without=without)
    assert_equal(found, resident_run(dtype=dtype))


@pytest.mark.parametrize("interval", [1, 5])
def test_every_block_folds_once_in_an_interval(interval: int) -> None:
    with zo_engine(Toy(), zo_config(stream={"writeback_interval": interval})) as engine:
        blocks = engine.backend.store.blocks.placement.blocks
        folds: dict[str, list[int]] = {unit.name: [] for unit in blocks}
        for batch in toy_batches(1) * (3 * interval + 1):
            one_step(engine, batch)
            for unit in blocks:
                folds[unit.name] += [unit.version] if unit.version not in (0, *folds[unit.name][-1:]) else []
    for found in folds.values():
        assert len(found) >= 3 and {after - before for before, after in pairwise(found)} == {interval}


def test_weight_decay_two_directions_and_interval_commute() -> None:
    """Replaying several entries at once equals replaying them one by one, also where each entry multiplies and
    subtracts twice."""
    options = {"weight_decay": 0.1, "num_directions": 2, "num_steps": 9}
    expected = resident_run(**options)
    for interval in (1, 4):
        assert_equal(run(stream={"writeback_interval": interval}, **options), expected)


LOW = [
    {"device_slots": 2},
    {"device_slots": 3},
    {"device_slots": 4, "resident_blocks": 1},
    {"resident_blocks": 2},
]


@pytest.mark.parametrize(
    "stored",
    [
        {"master": "split", "writeback_interval": 3},
        {"master": "wire", "writeback_interval": 1},
        {"master": "wire", "writeback_interval": 2, "wire_dtype": "bf12"},
    ],
    ids=str,
)
def test_16_bit_weights_do_not_depend_on_slots_or_residency(stored: dict[str, Any]) -> None:
    case = CASES[MODEL]

    def low_run(stream: dict[str, Any]) -> tuple[dict[str, torch.Tensor], ...]:
        config = zo_config(dtype="bf16", stream={**stream, **stored}, zo_eps=1e-2)
        with zo_engine(case.make(), config) as engine:
            for batch in map(case.batch, range(5)):
                one_step(engine, batch)
            return parameters_of(engine), masters_of(engine)

    expected = low_run({"resident_blocks": 3})
    for stream in LOW if stored["writeback_interval"] == 3 else LOW[::2]:
        found = low_run(stream)
        for ours, theirs in zip(found, expected, strict=True):
            assert_equal(ours, theirs)
