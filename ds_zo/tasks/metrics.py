"""The metrics of GLUE and SuperGLUE, computed from the predictions and labels of a whole split."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from typing import Protocol

import numpy as np

Numbers = Sequence[float]


class Measure(Protocol):
    """A metric function. Its `__name__` names the metric in results."""

    __name__: str

    def __call__(self, predictions: Numbers, labels: Numbers, /) -> float: ...


def accuracy(predictions: Numbers, labels: Numbers) -> float:
    return sum(p == y for p, y in zip(predictions, labels, strict=True)) / len(labels)


def f1(predictions: Numbers, labels: Numbers, *, positive: float = 1) -> float:
    """Harmonic mean of precision and recall of one label; 0 if the label is neither predicted nor present."""
    hits, num_wrong = _hits_and_wrong(predictions, labels, positive)
    return 2 * hits / (2 * hits + num_wrong) if hits else 0.0


def macro_f1(predictions: Numbers, labels: Numbers) -> float:
    """The mean of `f1` over all labels that are predicted or present."""
    seen = sorted({*predictions, *labels})
    return sum(f1(predictions, labels, positive=label) for label in seen) / len(seen)


def matthews(predictions: Numbers, labels: Numbers) -> float:
    """The correlation of two binary variables; 0 if one of them is constant."""
    return pearson([float(p == 1) for p in predictions], [float(y == 1) for y in labels])


def pearson(predictions: Numbers, labels: Numbers) -> float:
    """Linear correlation; 0 if one side is constant or not finite, as predictions of an untrained or diverged head may
    be."""
    x, y = np.asarray(predictions, dtype=np.float64), np.asarray(labels, dtype=np.float64)
    x, y = x - x.mean(), y - y.mean()
    scale = math.sqrt(float(x @ x) * float(y @ y))
    return float(x @ y) / scale if 0 < scale < math.inf else 0.0


def spearman(predictions: Numbers, labels: Numbers) -> float:
    """The linear correlation of ranks. Equal values have the mean of their ranks."""
    return pearson(_ranks(predictions), _ranks(labels))


def grouped_f1(predictions: Numbers, labels: Numbers, groups: Sequence[Hashable]) -> tuple[float, float]:
    """(mean of the groups' F1, fraction of groups whose predictions are all right).

    A group with neither a positive label nor a positive prediction has F1 = 1.
    """
    members: dict[Hashable, list[int]] = {}
    for index, group in enumerate(groups):
        members.setdefault(group, []).append(index)
    total, num_exact = 0.0, 0
    for indices in members.values():
        mine, right = [predictions[i] for i in indices], [labels[i] for i in indices]
        exact = list(mine) == list(right)
        num_exact += exact
        total += 1.0 if exact else f1(mine, right)
    return total / len(members), num_exact / len(members)


def _hits_and_wrong(predictions: Numbers, labels: Numbers, positive: float) -> tuple[int, int]:
    pairs = [(p == positive, y == positive) for p, y in zip(predictions, labels, strict=True)]
    return sum(p and y for p, y in pairs), sum(p != y for p, y in pairs)


def _ranks(values: Numbers) -> list[float]:
    array = np.asarray(values, dtype=np.float64)
    _, inverse, counts = np.unique(array, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    means = last - (counts - 1) / 2
    return [float(means[i]) for i in inverse.reshape(-1)]
