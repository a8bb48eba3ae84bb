"""Folds are spread over steps and over blocks."""

from __future__ import annotations

import pytest

from ds_zo.backends.zo.fold_interval import INTERVALS
from ds_zo.streaming.fold_schedule import turn


@pytest.mark.parametrize("interval", INTERVALS)
def test_a_block_has_one_turn_an_interval_and_steps_have_as_many_blocks(interval: int) -> None:
    assert sorted(turn(i, interval) for i in range(interval)) == list(range(interval))
    assert turn(5 * interval + 1, interval) == turn(1, interval)


def test_blocks_that_are_over_do_not_fold_in_successive_steps() -> None:
    """32 blocks in 24 steps: any eight steps make a third of the folds."""
    folds = [sum((step + turn(i, 24)) % 24 == 0 for i in range(32)) for step in range(48)]
    assert {sum(folds[s : s + 8]) for s in range(24)} <= {10, 11, 12}


@pytest.mark.parametrize("interval", [4, 8, 16, 24, 32])
def test_neighbours_lag_by_half_an_interval_on_average(interval: int) -> None:
    for step in range(interval):
        lags = [(step + turn(i, interval)) % interval for i in range(2 * interval)]
        of_three = [sum(lags[i : i + 3]) / 3 for i in range(len(lags) - 2)]
        assert max(of_three) <= 0.8 * interval and min(of_three) >= 0.1 * interval
