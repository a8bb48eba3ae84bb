"""Who folds when: every block has its turn once in `interval` steps, and steps have about as many turns each.

Neighbours' turns lie far apart: where blocks are not a multiple of the interval, those that are over would otherwise
all fold in successive steps, and blocks that lag far behind would follow one another, so that the link waits.
"""

from __future__ import annotations

from functools import cache

FOLD_ORDER = 2
"""Names the rule, for what was recorded: by another one weights are rounded at other steps. 1 was the block's index."""
_GOLDEN = (5**0.5 - 1) / 2
"""Multiples of it, modulo one, fall into the widest gap that earlier ones left."""


def turn(index: int, interval: int) -> int:
    """The block folds in steps `s` with `(s + turn) % interval == 0`."""
    return _turns(interval)[index % interval]


@cache
def _turns(interval: int) -> tuple[int, ...]:
    """A permutation: the ranks of the first multiples."""
    order = sorted(range(interval), key=lambda i: i * _GOLDEN % 1)
    return tuple(sorted(range(interval), key=order.__getitem__))
