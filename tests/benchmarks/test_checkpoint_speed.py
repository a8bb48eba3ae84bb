"""The table of what checkpoints cost: real rows at a toy size."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.checkpoint_speed import cases
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


def test_what_decides_comes_first() -> None:
    names = [case.name for case in cases(folder=".")]
    assert names[:3] == ["disk", "opt-6.7b/zo", "opt-6.7b/zo-async"]
    assert [name.partition("/")[0] for name in names[3:13]] == ["opt-1.3b"] * 5 + ["opt-2.7b"] * 5
    assert names[13:] == ["opt-6.7b/mezo", "opt-6.7b/mezo-torch-save", "opt-6.7b/zo-torch-save"]
