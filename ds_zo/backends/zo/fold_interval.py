"""How often ZO's blocks fold where the user has set no `writeback_interval`. Runs and plans choose by the same rule."""

from __future__ import annotations

from collections.abc import Callable

from ds_zo.streaming.budget import fits

FOLD_DRAWS = 0.4
"""Cost of a fold in addition to its replay, in noise draws a weight: random bits for rounding, and the store."""

INTERVALS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
"""The candidates for the number of steps between two folds of a block."""
_EQUALLY_FAST = 1.002
"""Intervals whose step time is within this factor of the shortest count as equally fast. Of these the longest is taken,
because it rounds least often."""


def best_interval(
    step_s: Callable[[int], float],
    *,
    device_nbytes: Callable[[int], int] = lambda interval: 0,
    budget_nbytes: int | None = None,
) -> int:
    """The value of ZO's `writeback_interval` where the user has set none. `step_s` returns the seconds of a step for an
    interval, `device_nbytes` the peak of its device memory. An interval that does not fit the budget is not taken,
    unless no interval needs less."""
    nbytes = {interval: device_nbytes(interval) for interval in INTERVALS}
    least = min(nbytes.values())
    seconds = {k: step_s(k) for k in INTERVALS if nbytes[k] == least or fits(nbytes[k], budget_nbytes=budget_nbytes)}
    limit = _EQUALLY_FAST * min(seconds.values())
    return max(interval for interval in seconds if seconds[interval] <= limit)


def lags(interval: int) -> range:
    """Numbers of pending updates that a block replays, in the steps from one of its folds to the next. Folds of blocks
    are staggered, so that in each step about as many blocks have each of these numbers."""
    return range(1, interval + 1)
