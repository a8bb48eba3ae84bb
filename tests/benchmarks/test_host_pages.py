"""Blocks about slow hosts are made from the rows that there are."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import host_pages, sources
from ds_zo.records.rows import Row, append_row


def test_lines_come_from_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_pages, "read_rows", lambda file: sources.read_rows(file, folder=tmp_path))
    assert [block() for block in host_pages.HOST_BLOCKS.values()] == ["", ""]
    step: Row = {"step_s": 0.1, "step_s_min": 0.09, "step_s_max": 0.12, "seconds": [0.09, 0.1, 0.12], "peak_gb": 4.0}
    row = {"status": "ok", "run_id": "r1", "two_cores_s": 0.115, "gpu_busy_s": 0.1, **step}
    append_row(tmp_path / host_pages.HOSTS, {**row, "case": "hosts/1.3b-lomo-compiled"})
    append_row(tmp_path / host_pages.HOSTS, {**row, "case": "hosts/1.3b-lomo", "status": "oom"})
    append_row(tmp_path / host_pages.HOSTS, {**row, "case": "schedule/1.3b/4+1/first-come", "then": step})
    lines = [line for line in host_pages.slow_hosts().splitlines() if line.startswith("| LLaMA")]
    assert lines == ["| LLaMA-1.3B, LOMO, blocks compiled | 100 (90 to 120, 3) | 115 | 100 | 1.15 | 4.0 |"]
    assert "| copies and Adam in the order of arrival | 100 (90 to 120, 3) | 100 (90 to 120, 3) |" in (
        host_pages.lsp_schedule().splitlines()
    )
