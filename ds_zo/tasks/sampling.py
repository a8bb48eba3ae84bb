"""Small seeded subsets of the suites' splits, drawn as the MeZO paper draws them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from ds_zo.tasks.errors import TaskError

T = TypeVar("T")

SMALL_TRAIN = 1000
"""A training split of fewer rows gives `SMALL_DEV` to dev at most: COPA, CB, WSC."""
SMALL_DEV = 100


@dataclass(frozen=True)
class Draw:
    """How many rows of each split, and the seed of the permutation that picks them."""

    num_train: int = 1000
    num_dev: int = 500
    num_test: int = 1000
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("num_train", "num_dev", "num_test"):
            if getattr(self, name) < 1:
                raise TaskError(f"a subset has at least one row, got {name} = {getattr(self, name)}")

    def pick(self, rows: Sequence[T], num: int) -> list[T]:
        """The first `num` of the permutation, or all rows in that order where there are fewer."""
        return [rows[i] for i in self._order(len(rows))[:num]]

    def cut_train(self, rows: Sequence[T]) -> tuple[list[T], list[T]]:
        """(train, dev) from an official training split: dev follows train in one permutation, so they are disjoint."""
        if len(rows) < 2:
            raise TaskError(f"a training split that is cut into train and dev has at least two rows, got {len(rows)}")
        most = self.num_dev if len(rows) >= SMALL_TRAIN else min(self.num_dev, SMALL_DEV)
        num_dev = min(most, len(rows) // 2)
        num_train = min(self.num_train, len(rows) - num_dev)
        order = self._order(len(rows))
        return [rows[i] for i in order[:num_train]], [rows[i] for i in order[num_train : num_train + num_dev]]

    def _order(self, num_rows: int) -> list[int]:
        return [int(i) for i in np.random.RandomState(self.seed).permutation(num_rows)]
