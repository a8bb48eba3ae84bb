"""The table of what checkpoints cost: real rows at a toy size, and what the report makes of rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks.checkpoint_speed import METHODS, cases, report
from ds_zo.bench.runner import run_cases
from tests.helpers.clean_process import in_clean_process


def test_cases_save_and_leave_nothing_behind(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    (disk / "checkpoint_speed-999999999").mkdir(parents=True)  # a killed case's
    small = {"layers": 2, "length": 8, "steps": 5, "every": 2, "warmup": 1, "device": "cpu"}
    chosen = cases(folder=str(disk), shapes=["opt-tiny"], methods=["zo", "zo-async"], disk_gb=0.01, **small)
    rows = in_clean_process(run_cases, chosen, out=tmp_path / "rows.jsonl", min_free_host_gib=0.5, device="cpu")
    assert [(row["case"], row["status"]) for row in rows] == [
        ("disk", "ok"),
        ("opt-tiny/zo", "ok"),
        ("opt-tiny/zo-async", "ok"),
    ], rows
    assert not list(disk.iterdir())
    quiet, saving = rows[1:]
    assert quiet["save_call_s"] == [] and len(saving["save_call_s"]) == 3
    assert saving["checkpoint_gb"] * 1e9 == pytest.approx(4 * saving["parameters"], rel=0.5)
    assert quiet["steps"] == 4 and saving["steps"] == 5
    assert len(saving["write_s"]) == 3 and saving["prepare_s"] > 0 and rows[0]["disk_gbps_threads"] > 0
    text = report(rows)
    assert "| opt-tiny | n/a | n/a |" in text and "keep" in text
    table = [line.count("|") for line in text.partition("| case |")[2].partition("\n\n")[0].splitlines()]
    assert len(table) == 3 and len({table[0] + 2, *table[1:]}) == 1


def test_what_decides_comes_first() -> None:
    names = [case.name for case in cases(folder=".")]
    assert names[:3] == ["disk", "opt-6.7b/zo", "opt-6.7b/zo-async"]
    assert [name.partition("/")[0] for name in names[3:13]] == ["opt-1.3b"] * 5 + ["opt-2.7b"] * 5
    assert names[13:] == ["opt-6.7b/mezo", "opt-6.7b/mezo-torch-save", "opt-6.7b/zo-torch-save"]


def row(shape: str, method: str, tokens_per_s: float, **more: Any) -> dict[str, Any]:
    own = {"shape": shape, "method": method, "tokens_per_s": tokens_per_s, "step_s": 2048 / tokens_per_s}
    saves = {"save_call_s": [1.0, 2.0], "left_after_last_step_s": 0.5, "checkpoint_gb": 13.3, "host_peak_gb": 30.0}
    common = {"run_id": "r", "case": f"{shape}/{method}", "status": "ok", "gpu": "G", "commit": "c", "every": 10}
    return {**common, **own, **(saves if "-" in method else {}), **more}


@pytest.mark.parametrize(("speed", "verdict"), [(7600.0, "0.95 asked for: met"), (7500.0, "0.95 asked for: not met")])
def test_the_report_judges_the_largest_shape_and_names_the_disk(speed: float, verdict: str) -> None:
    rows = [row("opt-6.7b", method, 8000.0) for method in METHODS if method != "zo-async"]
    rows += [row("opt-6.7b", "zo-async", speed), row("opt-1.3b", "zo", 1.0, run_id="earlier")]
    rows += [{"run_id": "r", "case": "opt-2.7b/zo", "status": "timeout", "error": "no answer within 90 s"}]
    rows += [{"run_id": "r", "case": "disk", "status": "ok", "disk_gbps": 1.5}]
    text = report(rows)
    assert verdict in text and f"({speed / 8000:.3f})" in text
    assert "takes 5.20 GB/s of disk, and there are 1.50: the disk sets the pace" in text
    assert "opt-2.7b/zo: timeout" in text and "opt-1.3b" not in text
