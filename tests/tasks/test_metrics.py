"""Each metric on a case worked out by hand."""

from __future__ import annotations

import math

import pytest

from ds_zo.tasks import metrics
from ds_zo.tasks.score import Score


def test_f1_is_the_harmonic_mean_of_precision_and_recall() -> None:
    predictions, labels = [1, 1, 1, 0, 0], [1, 0, 1, 1, 0]
    assert metrics.f1(predictions, labels) == pytest.approx(2 / 3)
    assert metrics.f1([0, 0], [0, 0]) == 0.0
    assert metrics.accuracy(predictions, labels) == pytest.approx(3 / 5)


def test_macro_f1_weighs_labels_equally() -> None:
    predictions, labels = [0, 0, 0, 1, 1], [0, 0, 1, 1, 2]
    assert metrics.macro_f1(predictions, labels) == pytest.approx((4 / 5 + 1 / 2 + 0) / 3)


def test_matthews_from_the_four_counts() -> None:
    tp, tn, fp, fn = 6, 3, 1, 2
    predictions = [1] * tp + [0] * tn + [1] * fp + [0] * fn
    labels = [1] * tp + [0] * tn + [0] * fp + [1] * fn
    expected = (tp * tn - fp * fn) / math.sqrt((tp + fp) * (tp + fn) * (tn + fp) * (tn + fn))
    assert metrics.matthews(predictions, labels) == pytest.approx(expected)
    assert metrics.matthews([1, 1, 1], [0, 1, 1]) == 0.0


def test_correlations() -> None:
    x, y = [1.0, 2.0, 3.0, 10.0], [2.0, 4.0, 6.0, 7.0]
    assert metrics.spearman(x, y) == pytest.approx(1.0)
    assert 0.5 < metrics.pearson(x, y) < 0.99
    assert metrics.pearson(x, [-v for v in x]) == pytest.approx(-1.0)
    assert metrics.pearson([1.0, 1.0], [0.0, 3.0]) == 0.0
    assert metrics.pearson([math.nan, 1.0], [0.0, 3.0]) == 0.0
    # ranks 1, 2.5, 2.5, 4 against 1, 2, 3, 4
    assert metrics.spearman([1, 5, 5, 9], [1, 2, 3, 4]) == pytest.approx(4.5 / math.sqrt(4.5 * 5))


def test_grouped_f1_averages_over_questions() -> None:
    groups = ["a", "a", "b", "b", "c"]
    predictions, labels = [1, 0, 1, 1, 0], [1, 0, 1, 0, 0]
    by_group, exact = metrics.grouped_f1(predictions, labels, groups)
    assert by_group == pytest.approx((1 + 2 / 3 + 1) / 3)
    assert exact == pytest.approx(2 / 3)


def test_better_means_lower_for_perplexity_alone() -> None:
    assert Score.mean("perplexity", 2.0, 1.0).is_better_than(math.exp(3))
    assert not Score.mean("accuracy", 1.0, 4.0).is_better_than(0.5)
    assert Score.mean("accuracy", 1.0, 4.0).is_better_than(None)
    nan = Score.mean("perplexity", math.nan, 1.0)
    assert Score.mean("perplexity", 2.0, 1.0).is_better_than(nan.value)
    assert not nan.is_better_than(nan.value) and not nan.is_better_than(math.exp(3))
