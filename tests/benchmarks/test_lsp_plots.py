"""Pictures of LSP's rows: the bias of its projectors, and the parts of a step."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import lsp_plots
from ds_zo.records.rows import read_objects

BIASES = Path(__file__).parents[2] / "benchmarks" / "results" / "h200_lsp_bias.jsonl"


def test_the_bias_of_one_study_is_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = read_objects(BIASES)
    lsp_plots.main(["bias", str(BIASES), "--out", str(tmp_path / "bias.svg")])
    assert capsys.readouterr().out.count("\n| ") == 1 + len(lsp_plots.bias_by_setting(rows))
    later = [{**row, "trained_steps": 9, "r": 256, "bias_test": 1.4} for row in rows]
    assert {r for _, _, r in lsp_plots.bias_by_setting(rows + later)} == {256}, "the last row's study, not a mixture"
    panels = lsp_plots.draw_bias(rows + later).axes
    assert len(panels) == 2 and all(axes.get_ylim()[1] > 1.4 for axes in panels)
    assert len(lsp_plots.draw_bias(rows, nonzeros=[4]).axes) == 2, "of four values of r one alone"
    with pytest.raises(SystemExit, match=r"no rows of the study of biases with --nonzeros 8,32"):
        lsp_plots.main(["bias", str(BIASES), "--nonzeros", "8,32", "--out", str(tmp_path / "none.svg")])


def test_breakdown_adds_up_to_the_step(tmp_path: Path) -> None:
    facts = {"run_id": "a", "status": "ok", "forward_s": 0.06}
    rows: list[dict[str, Any]] = [
        {**facts, "case": "breakdown/1.3b/4/ceiling", "step_s": 0.19},
        {**facts, "case": "breakdown/1.3b/4/lsp-512", "step_s": 0.21, "exposed_cpu_s": 0.01, "exposed_copy_s": -0.001},
        {**facts, "case": "breakdown/1.3b/4/zero2-offload", "step_s": 0.9, "exposed_cpu_s": 0.5, "rest_s": 0.4},
    ]
    parts = lsp_plots.breakdown_parts(rows)
    assert list(parts) == ["forward and backward only", "LSP, d = 512", "ZeRO-Offload"]
    for row, found in zip(rows, parts.values(), strict=True):
        assert sum(found.values()) == pytest.approx(row["step_s"])
    assert parts["LSP, d = 512"]["copy"] == 0.0
    assert lsp_plots.negative_waits(rows) == ["copies of LSP, d = 512 (-1.0 ms)"]
    assert parts["ZeRO-Offload"] == pytest.approx({"forward": 0.06, "backward": 0.13, "copy": 0.21, "cpu": 0.5})
    with pytest.raises(lsp_plots.NoRowsError, match="--preset breakdown"):
        lsp_plots.breakdown_parts(rows[1:])
    with pytest.raises(lsp_plots.NoRowsError):
        lsp_plots.breakdown_parts([])
    path, out = tmp_path / "rows.jsonl", tmp_path / "breakdown.svg"
    later = [{**row, "run_id": "b"} for row in rows[:2]]
    path.write_text("\n".join(map(json.dumps, rows + later)))
    lsp_plots.main(["breakdown", str(path), "--out", str(out)])
    assert "LSP, d = 512" in out.read_text() and "ZeRO-Offload" not in out.read_text(), "the last run has none"
    lsp_plots.main(["breakdown", str(path), "--run-id", "a", "--out", str(out)])
    assert "ZeRO-Offload" in out.read_text()
    with pytest.raises(SystemExit, match="--preset breakdown"):
        lsp_plots.main(["breakdown", str(path), "--run-id", "c", "--out", str(out)])
