"""A result set is made in as few calls as its groups allow, each of which is whole and of one machine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from ds_zo.bench import compare
from ds_zo.bench.compare import main
from ds_zo.bench.contenders import TIERS, Contender
from ds_zo.bench.groups import CapPart, Group, listed
from ds_zo.bench.result_set import PRESETS
from ds_zo.bench.runner import Case
from ds_zo.bench.table_cases import MACHINE
from ds_zo.records.environment import machine_id
from ds_zo.records.rows import Row, append_row


def calls_of(lines: Iterator[str] | list[str]) -> list[list[str]]:
    return [
        [part.rpartition(" (")[0] for part in line.partition(": ")[2].split("; ")]
        for line in lines
        if line.startswith("call ")
    ]


def test_the_result_set_is_planned_in_seven_calls(
    h200: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    h200.setattr(Contender, "missing", lambda self, dtype: None if self.peer in (None, "torch") else "not installed")
    arguments = ["--preset", "results", "--device", "cuda", "--dry-run", "--total-s", "540", "--out", str(tmp_path)]
    assert main(arguments) == 0
    lines = capsys.readouterr().out.splitlines()
    assert calls_of(lines) == [
        ["llama-7b, main", "opt-13b, main"],
        ["opt-6.7b, main"],
        ["llama-1.3b, main", "llama-1.3b, lean"],
        ["llama-7b, lean"],
        ["opt-6.7b, lean"],
        ["opt-13b, lean", "llama-7b, variants", "opt-6.7b, variants"],
        ["llama-1.3b, variants", "opt-13b, variants"],
    ]
    left_s = [float(line.split(": ")[1].split()[0]) for line in lines if line.endswith(" s left")]
    assert sum(left_s[:4]) < 1060, "of a lease of 1,800 s, in which other things are wanted too"
    of_13b = lines[lines.index(next(line for line in lines if line.startswith("opt-13b, main"))) :]
    offload = next(line for line in of_13b if "zero2-offload" in line)
    assert "not run: planned 232.9 of " in offload
    assert main([*arguments, "--only", "llama-1.3b", "--total-s", "330"]) == 0
    assert calls_of(capsys.readouterr().out.splitlines()) == [
        ["llama-1.3b, main"],
        ["llama-1.3b, lean", "llama-1.3b, variants"],
    ]
    assert main([*arguments, "--only", "llama-1b"]) == 1
    assert "llama-1.3b, opt-13b, got llama-1b" in capsys.readouterr().err


def test_a_call_passes_over_what_it_has_no_time_for_and_a_tier_waits_for_the_one_before(tmp_path: Path) -> None:
    def group(model: str, tier: str, name: str, expected_s: float) -> Group:
        cases = [Case(MACHINE, "m:f"), Case(name, "m:f", expected_s=expected_s)]
        return Group([CapPart(tmp_path / model, cases)], tier, "r1", 0.0)

    groups = [
        group("a", "main", "zo", 300),
        group("b", "main", "zo", 280),
        group("c", "main", "zo", 150),
        group("d", "main", "zo", 900),
        group("a", "variants", "adalomo", 40),
    ]
    expected = [["a, main", "c, main"], ["b, main"], ["d, main"], ["a, variants"]]
    assert calls_of(listed(groups, total_s=500)) == expected
    row: Row = {"run_id": "r1", "case": "zo", "config_hash": groups[0].parts[0].cases[1].config_hash, "status": "ok"}
    append_row(groups[0].parts[0].out, row)
    append_row(groups[0].parts[0].out, row | {"case": MACHINE, "config_hash": groups[0].parts[0].cases[0].config_hash})
    assert calls_of(listed(groups, total_s=500))[0] == ["b, main", "c, main"], "what has its rows is done"


def test_what_another_machine_left_whole_stays_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--preset", "tiny", "--device", "cpu", "--resume", "--out", str(tmp_path)]
    begun: dict[str, Group] = {}
    monkeypatch.setattr(compare, "_run_group", lambda group, *_, **__: begun.update({group.name: group}))
    monkeypatch.setattr(compare, "new_run_id", lambda: "new")

    def runs() -> dict[str, str]:
        begun.clear()
        assert main(arguments) == 0
        return {name: group.run_id for name, group in begun.items()}

    def leave_rows(group: Group, *, machine: str) -> None:
        for part in group.parts:
            for case in part.of_tier(group.tier):
                row: Row = {"run_id": "old", "case": case.name, "config_hash": case.config_hash, "machine": machine}
                append_row(part.out, row | {"status": "skipped" if case.name == "zenflow" else "ok"})

    models = [table.folder for table in PRESETS["tiny"]]
    assert runs() == {f"{model}, {tier}": "new" for tier in TIERS for model in models}
    there, here = (begun[f"{model}, main"] for model in models)
    assert [part.folder for part in there.parts] == [tmp_path / models[0]], "a CPU is not capped at 24 GB"
    leave_rows(there, machine="another")
    capsys.readouterr()
    later = [tier for tier in TIERS if tier != "main"]
    assert runs() == {f"{models[1]}, {tier}": "new" for tier in TIERS}
    stays = f"{models[0]}, variants: of another machine, left as it is"
    assert stays in capsys.readouterr().err
    assert main([*arguments, "--dry-run", "--total-s", "60"]) == 0
    planned = capsys.readouterr().out.splitlines()
    assert stays in planned and calls_of(planned) == [[f"{models[1]}, {tier}" for tier in TIERS]]
    leave_rows(here, machine=machine_id())
    of_old = {f"{models[1]}, {tier}": "old" for tier in later}
    assert runs() == of_old
    out = there.parts[-1].out
    out.write_text("".join(out.read_text(encoding="utf-8").splitlines(keepends=True)[:-1]), encoding="utf-8")
    unfinished = {f"{models[0]}, {tier}": "new" for tier in TIERS}
    assert runs() == {**unfinished, **of_old}, "a table is of one machine: it begins anew"


def test_a_run_of_other_settings_is_not_continued(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its rows would stand in one table with those of the new settings."""
    begun: list[Group] = []
    monkeypatch.setattr(compare, "_run_group", lambda group, *_, **__: begun.append(group))
    monkeypatch.setattr(compare, "new_run_id", lambda: "new")
    common = ["--model", "random:opt-tiny", "--device", "cpu", "--contenders", "zo", "--out", str(tmp_path)]
    assert main([*common, "--seq", "16", "--run-id", "old"]) == 0
    for case in begun[0].parts[0].cases:
        row: Row = {"run_id": "old", "case": case.name, "config_hash": case.config_hash, "machine": machine_id()}
        append_row(begun[0].parts[0].out, row | {"status": "failed", "params": case.params})
    assert main([*common, "--seq", "16", "--resume"]) == 0
    assert main([*common, "--seq", "16", "--resume", "--steps", "2"]) == 0
    capsys.readouterr()
    assert main([*common, "--seq", "32", "--resume", "--batch", "2"]) == 0
    assert "run old has another batch, length: a new run begins here" in capsys.readouterr().err
    assert [group.run_id for group in begun] == ["old", "old", "old", "new"]
    assert main([*common, "--seq", "32", "--run-id", "old"]) == 1
    assert "has another length: name a new run, or another folder (--run-id, --out)" in capsys.readouterr().err
