"""The steps in which each block folds: once in every `interval` steps, with about equally many folds in each step.

Neighbouring blocks fold in steps that are far apart. In index order, the blocks beyond a multiple of the interval would
all fold in successive steps. Blocks with many pending updates would also be neighbours, and uploads would wait for
them.
"""

from __future__ import annotations

from functools import cache

from ds_zo.streaming.units import Unit

FOLD_ORDER = 2
"""Version of this rule, stored with checkpoints and trajectories: another rule rounds weights at other steps. Version 1
uses the block's index as its turn."""
_GOLDEN = (5**0.5 - 1) / 2
"""The golden ratio's fractional part. Each further multiple of it, modulo 1, falls into the widest gap between the
earlier ones."""


def turn(index: int, interval: int) -> int:
    """The block folds in steps `s` with `(s + turn) % interval == 0`."""
    return _turns(interval)[index % interval]


def due(unit: Unit, *, step: int, interval: int, capacity: int) -> bool:
    """Whether `step` folds pending updates into the unit. Blocks fold at different steps. `capacity`: rows of the
    replay log; a unit that lags by that many steps folds."""
    every = interval if unit.is_block else 1
    return unit.trainable and ((step + turn(unit.index, every)) % every == 0 or step - unit.version >= capacity)


@cache
def _turns(interval: int) -> tuple[int, ...]:
    """A permutation of range(interval): the rank of each of the first multiples of `_GOLDEN` modulo 1."""
    order = sorted(range(interval), key=lambda i: i * _GOLDEN % 1)
    return tuple(sorted(range(interval), key=order.__getitem__))
