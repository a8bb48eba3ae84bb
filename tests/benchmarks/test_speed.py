"""The suites of speed: every case is a case of its target, and rows become a report."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from benchmarks import speed
from benchmarks.speed import cases_of, suites
from benchmarks.training_case import TrainingCase
from ds_zo.bench.runner import Case, read_rows


@pytest.mark.parametrize("suite", suites())
def test_every_case_has_a_name_of_its_own_and_a_rehearsal(suite: str) -> None:
    cases, rehearsed = cases_of(suite), cases_of(suite, device="cpu", tiny=True)
    names = [case.name for case in cases]
    assert len(set(names)) == len(names)
    assert set(names) - {case.name for case in rehearsed} <= {"machine", "timeline"}
    for case in (*cases, *rehearsed):
        if "method" in case.params:
            made = TrainingCase(**case.params)
            assert made.shape.endswith("-tiny") == (case in rehearsed) and made.steps < 40
    assert {case.params.get("device", "cpu") for case in rehearsed} <= {"cpu"}


def test_every_ratio_has_its_mezo() -> None:
    names = {case.name for case in cases_of("zo-paper")}
    ours = {name for name in names if name.startswith(("t1.", "t78.")) and ".zo" in name} - {"t1.66b.fp8.zo"}
    theirs = {re.sub(r"\.zo(\.\d+x\d+)?", ".mezo", name) for name in ours}
    assert ours and theirs <= names


def test_a_suite_is_listed(capsys: pytest.CaptureFixture[str]) -> None:
    speed.main(["zo-targets", "--list", "--only", "1.3b"])
    assert [line.split()[1] for line in capsys.readouterr().out.splitlines()] == ["1.3b.mezo", "1.3b.resident", "in"]
    with pytest.raises(SystemExit, match="no case is left of machine"):
        speed.main(["zo-targets", "--list", "--only", "no such"])
    speed.main(["training_speed:measure", "--list", "--set", "shape=opt-tiny", "--set", "method=zo"])
    assert " case\n" in capsys.readouterr().out


@pytest.mark.usefixtures("single_process")
def test_cases_become_rows_and_rows_a_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "rows.jsonl"
    one, other = (case for case in cases_of("zo-hosts", device="cpu", tiny=True, given={"slow_host": False}))
    long = Case("long", one.target, {"shape": "no such shape"}, expected_s=1e4)
    found: list[list[dict[str, Any]]] = []
    for cases in ([one], [long, one, other]):
        monkeypatch.setattr(speed, "cases_of", lambda *args, cases=cases, **options: cases)
        speed.main(["zo-hosts", "--out", str(out), "--device", "cpu", "--resume", "--total-s", "600"])
        found.append(read_rows(out))
    assert {row["run_id"] for row in found[1]} == {found[0][0]["run_id"]}
    rows = {row["case"]: row for row in found[1]}
    assert len(found[1]) == 3, "the first row is kept, not run again"
    assert rows["long"]["status"] == "not run" and "may take 10000 s" in rows["long"]["error"]
    assert rows[one.name]["status"] == rows[other.name]["status"] == "ok", rows[other.name].get("last_words")
    said = capsys.readouterr().out
    assert f"\n| {other.name} | " in said and json.loads(said.splitlines()[0])["case"] == one.name
    speed.main(["--report", str(out)])
    assert f"\n| {other.name} | " in capsys.readouterr().out
