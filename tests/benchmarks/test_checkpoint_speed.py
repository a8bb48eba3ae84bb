"""The table of what checkpoints cost: real rows at a toy size."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.speed import cases_of
from ds_zo.bench.runner import run_cases
from tests.helpers.clean_process import in_clean_process


def test_cases_save_and_leave_nothing_behind(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    (disk / "checkpoint_speed-999999999").mkdir(parents=True)  # a killed case's
    cases = cases_of("checkpoints", tiny=True, device="cpu", given={"folder": str(disk), "steps": 5, "every": 2})
    chosen = [case for case in cases if case.name in ("disk", "opt-6.7b/zo", "opt-6.7b/zo-async")]
    rows = in_clean_process(run_cases, chosen, out=tmp_path / "rows.jsonl", min_free_host_gib=0.5, device="cpu")
    statuses = {row["case"]: row["status"] for row in rows}
    assert statuses == {"disk": "ok", "opt-6.7b/zo": "ok", "opt-6.7b/zo-async": "ok"}, rows
    assert not list(disk.iterdir())
    quiet, saving = rows[1:]
    assert quiet["save_call_s"] == [] and len(saving["save_call_s"]) == 3
    assert saving["checkpoint_gb"] * 1e9 == pytest.approx(4 * saving["parameters"], rel=0.5)
    assert quiet["steps"] == saving["steps"] == 5
    assert len(saving["write_s"]) == 3 and saving["prepare_s"] > 0 and rows[0]["disk_gbps_threads"] > 0
