"""Whatever happens to a case is a row, and nothing of it is left behind."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ds_zo.bench import runner
from ds_zo.bench.runner import Case, read_rows, run_cases
from ds_zo.records.rows import Row
from tests.helpers.processes import python_path

HERE = "bench_targets"


def run(*cases: Case, out: Path | None = None, **options: Any) -> list[Row]:
    return run_cases(cases, out=out, device="cpu", warm=("torch",), **{"min_free_host_gib": 0.1} | options)


def case(function: str, *, name: str | None = None, **options: Any) -> Case:
    return Case(name=name or function, target=f"{HERE}:{function}", **options)


@pytest.mark.parametrize("spawn", [False, True], ids=["forked", "fresh interpreter"])
def test_a_row_holds_what_the_target_returned_and_where_it_ran(spawn: bool, tmp_path: Path) -> None:
    out = tmp_path / "deep" / "rows.jsonl"
    [row] = run(case("add", params={"a": 1, "b": 2}, env={"BENCH_WORD": "hi"}), out=out, spawn=spawn, run_id="r1")
    assert (row["status"], row["sum"], row["rank"], row["word"]) == ("ok", 3, "0", "hi")
    assert row["pid"] != os.getpid()
    assert "adding" in row["last_words"]
    assert (row["frozen"] > 10_000) != spawn, "what a child inherits is not collected in the middle of a step"
    assert row["run_id"] == "r1" and row["versions"]["torch"] and row["cpus"] and row["wall_s"] > 0
    assert read_rows(out) == [row]


def test_a_forked_child_may_use_threads_and_finds_cuda_untouched(run_python: Callable[..., str]) -> None:
    """In a parent of its own: this one may have started threads of OpenMP."""
    script = """
from ds_zo.bench import runner
from ds_zo.bench.runner import Case, run_cases
case = Case("threads", "bench_targets:multiply_in_threads", timeout_s=30)
[row] = run_cases([case], out=None, device="cpu", min_free_host_gib=0.1, warm=("torch", "deepspeed"))
print(row["status"], row.get("total"), row.get("cuda"), row["versions"]["deepspeed"])
"""
    path = python_path(Path(__file__).parents[2], Path(__file__).parent)
    status, total, cuda, _ = run_python(script, PYTHONPATH=path, OMP_NUM_THREADS=2).splitlines()[-1].split()
    assert (status, float(total), cuda) == ("ok", 400.0**3, "False")


@pytest.mark.parametrize(
    ("function", "status", "words"),
    [
        ("run_out_of_memory", "oom", "Tried to allocate"),
        ("abort", "crash", "about to abort"),
        ("die_as_if_killed", "killed", ""),
        ("take_a_harness_key", "crash", "status"),
        ("no_such_function", "crash", "no_such_function"),
    ],
)
def test_failures_are_rows_with_their_last_words(function: str, status: str, words: str) -> None:
    [row] = run(case(function))
    assert row["status"] == status
    assert str(Path(__file__).parents[2]) not in row["last_words"], "where this machine keeps its files"
    assert words in row["last_words"]
    assert row["error"]
    assert row.get("failed_in") == (function if function == "run_out_of_memory" else None)


def test_a_hanging_case_says_where_and_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    pid_file, others, its = tmp_path / "pid", tmp_path / "fused_adam" / "lock", tmp_path / "cpu_adam" / "lock"
    for lock in (others, its):
        lock.parent.mkdir()
    others.touch()
    os.utime(others, (1, 1))
    hanging = case("hang_with_grandchild", params={"pid_file": str(pid_file), "lock": str(its)}, timeout_s=1.5)
    start = time.monotonic()
    rows = run(hanging, case("add", params={"a": 1, "b": 1}))
    assert time.monotonic() - start < 20
    assert [row["status"] for row in rows] == ["timeout", "ok"]
    assert "wait_for_ever" in rows[0]["last_words"]
    assert others.exists() and not its.exists()
    grandchild = Path("/proc") / pid_file.read_text()
    assert not grandchild.exists() or "Z" in (grandchild / "stat").read_text().rpartition(")")[2].split()[:1]


def test_a_fork_that_cannot_use_cuda_starts_again_in_a_fresh_interpreter(tmp_path: Path) -> None:
    count = tmp_path / "count"
    [row] = run(case("find_cuda_touched", params={"count": str(count)}))
    assert (row["status"], count.read_text()) == ("crash", "xx"), "once more, not for ever"


def test_cases_that_run_at_once_share_the_device(tmp_path: Path) -> None:
    """Each has its labels, however it ends, and waits for the memory that it states."""
    params = {"folder": str(tmp_path), "others": 1}
    pair = [case("meet", name=name, params=params | {"name": name}, labels={"key": name}) for name in "ab"]
    rows = run(*pair, case("abort", labels={"key": "c"}), jobs=2)
    assert [(row["key"], row["status"]) for row in rows] == [("a", "ok"), ("b", "ok"), ("c", "crash")]

    harness = runner._Harness(min_free_bytes=0, spawn=False, jobs=8, device_gb=100.0, ends=0.0)
    large, small, unstated = (case("add", name=name, device_gb=gb) for name, gb in (("l", 40), ("s", 14), ("u", None)))
    assert [harness._share(each) for each in (large, small, unstated)] == pytest.approx([0.6, 0.21, 0.9 * 2 / 8])
    harness._running = [SimpleNamespace(case=large)]  # type: ignore[list-item]
    assert harness._next([large, small]) is large
    harness._running *= 2
    assert harness._next([large, small]) is None
    assert harness._next([large, unstated]) is unstated


def test_a_host_short_of_memory_stops_the_child() -> None:
    [row] = run(case("wait_for_ever", timeout_s=60), min_free_host_gib=1e6)
    assert row["status"] == "killed" and "host memory left" in row["error"]


def test_a_case_that_has_no_room_is_recorded_and_not_run() -> None:
    over = case("wait_for_ever", planned_host_gb=1e6, timeout_s=60)
    start = time.monotonic()
    _, row = run(case("add", params={"a": 1, "b": 1}), over)
    assert row["status"] == "skipped" and "planned 1000000.0 of " in row["error"]
    assert time.monotonic() - start < 8, "what no machine has is not waited for"


def test_resuming_keeps_the_runs_rows_and_makes_what_is_missing(tmp_path: Path) -> None:
    out = tmp_path / "rows.jsonl"
    first, second = (case("add", name=f"add{i}", params={"a": i, "b": 0}) for i in (1, 2))
    [done] = run(first, second, out=out, only="add1")
    with out.open("a") as file:
        file.write('{"run_id": "half a li')
    rows = run(first, second, out=out, resume=True)
    assert rows[0] == done and rows[1]["sum"] == 2
    assert read_rows(out) == rows, "a row after half a line is not lost with it"
    assert {row["run_id"] for row in rows} == {done["run_id"]}
    changed = case("add", name="add1", params={"a": 5, "b": 0})
    assert run(changed, out=out, resume=True)[0]["sum"] == 5


def test_only_names_cases_by_glob_or_part_and_says_what_there_is() -> None:
    with pytest.raises(ValueError, match="add"):
        run(case("add"), only="lomo*")


def test_the_hash_is_of_what_is_measured() -> None:
    one = case("add", params={"a": 1, "b": 2})
    assert one.config_hash == case("add", name="other", params={"b": 2, "a": 1}, timeout_s=9).config_hash
    assert one.config_hash != case("add", params={"a": 1, "b": 3}).config_hash
    json.dumps(one.params)


def test_when_its_time_is_over_a_run_says_what_is_left_and_resuming_makes_it(tmp_path: Path) -> None:
    out = tmp_path / "rows.jsonl"
    hanging = case("wait_for_ever", timeout_s=60)
    later = case("add", params={"a": 1, "b": 0})
    long = case("wait_for_ever", name="long", timeout_s=60, expected_s=30)
    cut = run(long, hanging, later, out=out, total_s=0.5)
    assert [(row["status"], row["error"][:16]) for row in cut] == [("not run", "time (--total-s)")] * 3
    assert cut[0]["wall_s"] == 0 and "may take 30 s, 0 s were left" in cut[0]["error"], "it would only be stopped"
    assert 0.5 <= cut[1]["wall_s"] < 20 and cut[2]["wall_s"] == 0
    assert read_rows(out) == cut
    [made] = run(later, out=out, resume=True)
    assert made["sum"] == 1 and made["run_id"] == cut[0]["run_id"]
    assert read_rows(out) == [*cut[:2], made]


def test_a_run_that_is_terminated_has_a_row_for_every_case(tmp_path: Path) -> None:
    out = tmp_path / "rows.jsonl"
    stops_it = case("terminate_parent_and_wait", timeout_s=60)
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as ended:
        run(case("add", params={"a": 1, "b": 0}), stops_it, case("add", name="later", params={"a": 2, "b": 0}), out=out)
    assert ended.value.code == 128 + signal.SIGTERM and signal.getsignal(signal.SIGTERM) is before
    rows = read_rows(out)
    assert [row["status"] for row in rows] == ["ok", "not run", "not run"]
    assert rows[1]["last_words"].startswith("waiting\n") and "SIGTERM" in rows[1]["error"] and rows[2]["wall_s"] == 0
    assert "in terminate_parent_and_wait" in rows[1]["last_words"], "where it stood"


def test_a_run_is_of_one_machine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "rows.jsonl"
    one = case("add", params={"a": 1, "b": 1})
    [row] = run(one, out=out, run_id="r1")
    out.write_text(json.dumps(row | {"machine": "another"}) + "\n")
    more = case("add", name="more", params={"a": 2, "b": 1})
    with pytest.raises(ValueError, match="r1 was begun on another"):
        run(one, more, out=out, resume=True, run_id="r1")
    assert run(one, out=out, resume=True)[0]["machine"] == "another", "it has all its rows"
    again = run(one, more, out=out, resume=True)
    assert {(made["run_id"] == "r1", made["machine"]) for made in again} == {(False, row["machine"])}
    assert "r1 is of another machine" in capsys.readouterr().err
