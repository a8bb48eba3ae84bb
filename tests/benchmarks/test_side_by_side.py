"""The table of `benchmarks.side_by_side`."""

from __future__ import annotations

from typing import Any

from benchmarks import side_by_side


def row(side: str, step_s: float, **more: Any) -> dict[str, Any]:
    return {"case": "zo", "side": side, "status": "ok", "step_s": step_s, "peak_gb": 2.0, **more}


def test_the_table_has_medians_ranges_and_ratios() -> None:
    rows = [row("old", s) for s in (0.1, 0.3, 0.2)] + [row("new", s, peak_gb=3.0) for s in (0.1, 0.1, 0.5)]
    assert "| zo | 200.0 (100.0 to 300.0) | 100.0 (100.0 to 500.0) | 0.500 | 1.500 |" in side_by_side.summary(rows)
    assert "new: oom" in side_by_side.summary([row("old", 0.1), row("new", 0.1, status="oom")])
    assert "not run on both sides" in side_by_side.summary([row("old", 0.1)])
