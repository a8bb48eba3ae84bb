"""A task's score, of the whole split or of one rank's part."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

LOWER_IS_BETTER = frozenset({"perplexity"})
PERCENT = frozenset({"accuracy", "exact_match", "pass_at_1", "pass_at_1_low", "pass_at_1_high"})
"""Metrics that are shown in percent."""


def sign_of(metric: str) -> float:
    """The factor, 1 or -1, by which scores are multiplied so that larger is better."""
    return -1.0 if metric in LOWER_IS_BETTER else 1.0


@dataclass(frozen=True)
class Score:
    """Numbers that are summed over ranks, and the function that computes the metrics from their sums."""

    metric: str
    """The metric by which runs are compared. `values` may have further metrics."""
    sums: tuple[float, ...]
    finish: Callable[[Sequence[float]], dict[str, float]]
    """Computes all metrics from the sums."""

    @staticmethod
    def mean(metric: str, total: float, count: float) -> Score:
        """The score `total / count`. For a perplexity, `total` is in nats and `count` in tokens."""
        return Score(metric, (total, count), _exp_mean(metric) if metric in LOWER_IS_BETTER else _mean(metric))

    def with_sums(self, sums: Sequence[float]) -> Score:
        """The score of the whole split, given the sums over all ranks."""
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
        if math.isnan(value):  # every comparison with NaN is false: a first NaN would stay the best score
            return not math.isnan(self.value)
        return self.value < value if self.metric in LOWER_IS_BETTER else self.value > value

    def __str__(self) -> str:
        values = self.values
        names = [self.metric, *(name for name in values if name != self.metric)]
        return ", ".join(f"{name} {_show(name, values[name])}" for name in names)


def _show(name: str, value: float) -> str:
    if name in LOWER_IS_BETTER:
        return f"{value:.2f}"
    return f"{value:.1%}" if name in PERCENT else f"{value:.3f}"


def _mean(metric: str) -> Callable[[Sequence[float]], dict[str, float]]:
    return lambda sums: {metric: sums[0] / sums[1]}


def _exp_mean(metric: str) -> Callable[[Sequence[float]], dict[str, float]]:
    return lambda sums: {metric: math.exp(min(sums[0] / sums[1], 700.0))}
