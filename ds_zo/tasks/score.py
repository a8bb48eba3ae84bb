"""A task's score, whole or one rank's part of it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

LOWER_IS_BETTER = frozenset({"perplexity"})


def sign_of(metric: str) -> float:
    """By which scores are multiplied to compare them: the larger is then the better."""
    return -1.0 if metric in LOWER_IS_BETTER else 1.0


@dataclass(frozen=True)
class Score:
    """Numbers that add up over ranks, and what is made of their sum."""

    metric: str
    """The one by which runs are compared; others may stand beside it in `values`."""
    sums: tuple[float, ...]
    finish: Callable[[Sequence[float]], dict[str, float]]

    @staticmethod
    def mean(metric: str, total: float, count: float) -> Score:
        """A mean of `total` over `count`; of a perplexity, `total` is in nats and `count` in tokens."""
        return Score(metric, (total, count), _exp_mean(metric) if metric in LOWER_IS_BETTER else _mean(metric))

    def with_sums(self, sums: Sequence[float]) -> Score:
        """The whole, from the sums over all ranks."""
        return replace(self, sums=tuple(sums))

    @property
    def values(self) -> dict[str, float]:
        return self.finish(self.sums)

    @property
    def value(self) -> float:
        return self.values[self.metric]

    def is_better_than(self, value: float | None) -> bool:
        if value is None:
            return True
        if math.isnan(value):  # nothing compares with it, and a run that began with it would keep it for good
            return not math.isnan(self.value)
        return self.value < value if self.metric in LOWER_IS_BETTER else self.value > value

    def __str__(self) -> str:
        values = self.values
        names = [self.metric, *(name for name in values if name != self.metric)]
        return ", ".join(f"{name} {_show(name, values[name])}" for name in names)


def _show(name: str, value: float) -> str:
    if name in LOWER_IS_BETTER:
        return f"{value:.2f}"
    return f"{value:.1%}" if name in ("accuracy", "exact_match") else f"{value:.3f}"


def _mean(metric: str) -> Callable[[Sequence[float]], dict[str, float]]:
    return lambda sums: {metric: sums[0] / sums[1]}


def _exp_mean(metric: str) -> Callable[[Sequence[float]], dict[str, float]]:
    return lambda sums: {metric: math.exp(min(sums[0] / sums[1], 700.0))}
