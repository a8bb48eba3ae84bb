"""`benchmarks.side_by_side`: its table, its cases and its turns."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import side_by_side
from ds_zo.records.rows import read_objects
from tests.helpers.processes import REPO
from tests.helpers.warm_interpreter import WarmInterpreter


def row(side: str, step_s: float, **more: Any) -> dict[str, Any]:
    return {"case": "zo", "side": side, "status": "ok", "step_s": step_s, "peak_gb": 2.0, **more}


def test_the_table_has_medians_ranges_and_ratios() -> None:
    rows = [row("old", s) for s in (0.1, 0.3, 0.2)] + [row("new", s, peak_gb=3.0) for s in (0.1, 0.1, 0.5)]
    assert "| zo | 200.0 (100.0 to 300.0) | 100.0 (100.0 to 500.0) | 0.500 | 1.500 |" in side_by_side.summary(rows)
    assert "new: oom" in side_by_side.summary([row("old", 0.1), row("new", 0.1, status="oom")])
    assert "not run on both sides" in side_by_side.summary([row("old", 0.1)])


def test_a_case_times_ten_steps_or_more_and_an_error_names_the_checkout(tmp_path: Path) -> None:
    assert {case.steps >= 10 and case.step_s > 0 for case in side_by_side.cases_of(device="cuda", tiny=False)} == {True}
    with pytest.raises(SystemExit, match=str(tmp_path)):
        side_by_side.main(["--old", str(tmp_path)])


@pytest.mark.slow
def test_checkouts_take_turns_that_each_write_a_row(
    tmp_path: Path, warm_interpreter: WarmInterpreter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", warm_interpreter.python())
    words = ["--tiny", "--device", "cpu", "--rounds", "2", "--only", "70b", "--out", str(tmp_path / "rows")]
    side_by_side.main(["--old", str(REPO), *words])
    rows = read_objects(tmp_path / "rows")
    assert [(row["side"], row["round"]) for row in rows] == [("old", 0), ("new", 0), ("new", 1), ("old", 1)]
    assert rows[0]["losses"] == rows[1]["losses"] != rows[2]["losses"] == rows[3]["losses"]
