"""Small seeded subsets of the suites' splits, drawn as the MeZO paper draws them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from ds_zo.tasks.errors import TaskError

T = TypeVar("T")

NUM_TRAIN, NUM_DEV, NUM_TEST = 1000, 500, 1000
"""The paper's numbers of rows, for official splits."""
SMALL_TRAIN = 1000
"""A training split with fewer rows gives at most `SMALL_DEV` rows to dev: COPA, CB, WSC."""
SMALL_DEV = 100


@dataclass(frozen=True)
class Draw:
    """The number of rows of each split, and the seed of the permutation that picks them. None: the paper's number for
    official splits, all rows of other splits."""

    num_train: int | None = None
    num_dev: int | None = None
    num_test: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        for split in ("train", "dev", "test"):
            num = self.asked(split)
            if num is not None and num < 1:
                raise TaskError(f"a subset has at least one row, got num_{split} = {num}")
        if not 0 <= self.seed < 2**32:
            raise TaskError(f"the seed of a draw is a number from 0 to 2**32 - 1, got {self.seed} (--data-seed)")

    def asked(self, split: str) -> int | None:
        return {"train": self.num_train, "dev": self.num_dev, "test": self.num_test}[split]

    def pick(self, rows: Sequence[T], num: int) -> list[T]:
        """The first `num` rows of the permutation; all rows, in that order, if there are fewer."""
        return [rows[i] for i in self._order(len(rows))[:num]]

    def cut_train(self, rows: Sequence[T]) -> tuple[list[T], list[T]]:
        """(train, dev) from an official training split. Both are from one permutation, so they are disjoint."""
        if len(rows) < 2:
            raise TaskError(f"a training split that is cut into train and dev has at least two rows, got {len(rows)}")
        most = NUM_DEV if self.num_dev is None else self.num_dev
        most = most if len(rows) >= SMALL_TRAIN else min(most, SMALL_DEV)
        num_dev = min(most, len(rows) // 2)
        num_train = min(NUM_TRAIN if self.num_train is None else self.num_train, len(rows) - num_dev)
        order = self._order(len(rows))
        return [rows[i] for i in order[:num_train]], [rows[i] for i in order[num_train : num_train + num_dev]]

    def _order(self, num_rows: int) -> list[int]:
        return [int(i) for i in np.random.RandomState(self.seed).permutation(num_rows)]
