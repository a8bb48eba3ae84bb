"""The comparison of two checkouts names runs that differ."""

from __future__ import annotations

import same_bits


def test_runs_that_differ_fail_or_are_missing_are_named() -> None:
    row = {"losses": [1.0], "weights": "a", "resumed": {"losses": [1.0]}}
    old = {("same", 0): row, ("other", 1): row, ("failed", 0): {"error": "x"}, ("gone", 0): row}
    new = {("same", 0): dict(row), ("other", 1): row | {"losses": [1.5]}, ("failed", 0): {"error": "x"}}
    found = same_bits.differences(old, new)
    assert found == [
        "gone (rank 0): in one checkout only",
        "failed (rank 0): old failed: x; new failed: x",
        "other (rank 1): other losses",
    ]
