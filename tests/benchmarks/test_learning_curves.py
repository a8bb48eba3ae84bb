"""Learning curves of rows."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import curves, equal_score

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
    with pytest.raises(SystemExit, match="no run of lomo, zo was scored on dev"):
        curves.main([str(rows), "--task", "boolq", "--best", "--out", str(out)])
    for command in (curves.main, equal_score.main):
        with pytest.raises(SystemExit, match=r"looked for rows at nope\.jsonl: not found"):
            command(["nope.jsonl", "--task", "boolq", *(["--out", str(out)] if command is curves.main else [])])


def test_times_to_an_equal_score_with_and_without_the_first_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(method: str, first_s: float, step_s: float, dev: list[float]) -> dict[str, object]:
        looks = [(10 * (i + 1), first_s + (10 * (i + 1) - 1) * step_s, y) for i, y in enumerate(dev)]
        curve = [{"step": 1, "train_s": first_s, "loss": 3.0}]
        curve += [{"step": step, "train_s": s, "dev": {"perplexity": y}} for step, s, y in looks]
        best = min(dev)
        row = {"key": method, "status": "ok", "method": method, "task": "alpaca", "metric": "perplexity", "lr": 1e-4}
        more = {"dev": best, "best_step": 10 * (1 + dev.index(best)), "after": best, "peak_device_gb": 1.0}
        return {**row, **more, "curve": curve, "steps": looks[-1][0], "train_s": looks[-1][1]}

    rows = tmp_path / "rows.jsonl"
    runs = [run("lsp", 11.0, 1.0, [9.0, 7.0, 8.0]), run("zero", 2.0, 2.0, [7.5, 6.0, 6.5])]
    rows.write_text("".join(json.dumps(row) + "\n" for row in runs))
    equal_score.main([str(rows), "--task", "alpaca", "--beside", "zero"])
    said = capsys.readouterr().out.splitlines()
    assert "s to 7 | less the first step | of zero's | less the first steps |" in said[0], "the worst of the best"
    assert said[2].endswith("| 11.00 | 1.000 | 7 | 30.0 | 19.0 | 0.75 | 0.50 |") and "best in 40 s" in said[0]
    assert said[3].endswith("| 2.00 | 2.000 | 6 | 40.0 | 38.0 | 1.00 | 1.00 |")
    equal_score.main([str(rows), "--task", "alpaca", "--target", "6"])
    assert capsys.readouterr().out.splitlines()[2].endswith("| – | – |"), "never reached"
