"""The runs that two checkouts are compared by: resumed ones have the bits of uninterrupted ones."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest

from tests.helpers.recorded_runs import RUNS, STEPS, record

pytestmark = pytest.mark.usefixtures("single_process")


@pytest.mark.parametrize("seed", range(3))
def test_a_resumed_run_of_several_directions_has_the_bits_of_an_uninterrupted_one(seed: int, tmp_path: Path) -> None:
    """The first step of an engine may run its passes one after the other, and later steps run them in lockstep."""
    drawn = random.Random(seed)
    params = {"lr": 1e-4, "seed": drawn.randrange(100), "num_directions": drawn.choice([2, 3])}
    wire, master = drawn.choice([("bf16", "split"), ("bf16", "wire"), ("bf12", "split"), ("fp8", "wire")])
    interval, resident = drawn.choice([2, 3, 4]), drawn.choice([0, 1])
    stream = {"wire_dtype": wire, "master": master, "writeback_interval": interval, "resident_blocks": resident}
    run = replace(RUNS["zo-directions"], optimizer={"type": "ZO", "params": params}, stream=stream)
    found = record(run, tmp_path)
    assert found["resumed"]["losses"] == found["losses"][STEPS:]
    assert found["resumed"]["weights"] == found["weights"]
