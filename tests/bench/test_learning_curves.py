"""Learning curves of rows."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ds_zo.bench import curves

CURVE = [
    {"step": 1, "train_s": 0.5, "loss": 4.0, "dev": None},
    {"step": 2, "train_s": 1.0, "loss": 2.0, "dev": None},
    {"step": 2, "train_s": 1.0, "loss": None, "dev": {"accuracy": 0.6, "f1": 0.1}},
]
ROW = {"key": "k", "status": "ok", "method": "zo", "task": "boolq", "metric": "accuracy", "curve": CURVE}


def test_series_are_the_losses_and_the_chosen_metric() -> None:
    assert curves.series(ROW, x="train_s") == ([(0.5, 4.0), (1.0, 2.0)], [(1.0, 0.6)])
    assert curves.series(ROW, x="step")[0] == [(1, 4.0), (2, 2.0)]
    assert curves.smooth([(1, 4.0), (2, 2.0), (3, 0.0)], window=2) == [(1, 4.0), (2, 3.0), (3, 1.0)]


def test_a_plot_is_drawn_and_absent_curves_are_named(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    rows, out = tmp_path / "rows.jsonl", tmp_path / "plots" / "a.png"
    rows.write_text(json.dumps(ROW) + "\n" + json.dumps({**ROW, "method": "lomo"}) + "\n")
    curves.main([str(rows), "--task", "boolq", "--out", str(out)])
    assert out.stat().st_size > 1000
    with pytest.raises(SystemExit, match="no curves of rte by any method; the rows have boolq by lomo, boolq by zo"):
        curves.main([str(rows), "--task", "rte", "--out", str(out)])
