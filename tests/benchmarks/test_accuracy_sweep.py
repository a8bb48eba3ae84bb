"""Grids as data, which cases are left, and what becomes of runs that end, fail or are cut."""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from clean_process import in_clean_process
from forkserver import forkserver_context

from benchmarks.accuracy import best_rates
from benchmarks.grid import GridCase, GridError
from benchmarks.grids import GRIDS, read_grid
from benchmarks.sweep import Sweep, next_case, read_rows, remaining, run, thinned
from ds_zo.config import backend_of
from ds_zo.config.resolve import resolve
from ds_zo.records.rows import append_row
from ds_zo.tasks import TASKS


@pytest.mark.parametrize("name", list(GRIDS))
def test_shipped_grids_hold_valid_configs_and_known_tasks(name: str) -> None:
    cases = list(GRIDS[name].cases())
    assert len({case.key for case in cases}) == len(cases)
    assert {case.task for case in cases} <= set(TASKS)
    for case in {case.method: case for case in cases}.values():
        if backend_of(case.config) is not None:
            resolve(case.config, world_size=1)


def test_the_lomo_papers_grid() -> None:
    cases = [case for case in GRIDS["lomo"].cases() if case.task == "boolq"]
    assert {(c.lr, c.warmup) for c in cases if c.method == "lomo"} == {
        (lr, warmup) for lr in (5e-2, 3e-2) for warmup in (0.05, 0.1, 0.2)
    }
    both = [c for c in cases if c.method == "lora+lomo"]
    assert {c.lora_rank for c in both} == {1, 2, 4, 8} and {c.lr for c in both} == {5e-3, 1e-3, 5e-4}
    assert all(c.config["gradient_clipping"] == 1.0 and c.batch_size == 16 for c in cases)


def test_a_case_writes_what_the_grid_varies_into_its_config() -> None:
    (case,) = [
        c for c in GRIDS["accuracy"].cases(lrs={"zo": 2e-6}) if (c.method, c.task, c.seed) == ("zo-fp8", "rte", 2)
    ]
    assert case.config["optimizer"]["params"] == {"zo_eps": 1e-3, "lr": 2e-6, "seed": 2}
    assert case.config["ds_zo"]["stream"] == {"writeback_interval": 8, "wire_dtype": "fp8"}
    assert case.arguments == GRIDS["accuracy"].arguments
    lomo = next(c for c in GRIDS["accuracy"].cases() if c.method == "lomo")
    assert lomo.config["scheduler"]["params"]["warmup_max_lr"] == lomo.lr
    assert GRIDS["accuracy"].methods["lomo"].config["optimizer"]["params"] == {}, "the grid itself is not changed"


def test_a_grid_from_a_file_and_its_mistakes(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    method = {"config": {"optimizer": {"type": "ZO"}}, "lrs": [1e-3, 1e-4], "steps": 7}
    path.write_text(json.dumps({"tasks": ["sst2"], "seeds": [3], "methods": {"mine": method}}))
    assert [(c.lr, c.steps, c.seed) for c in read_grid(str(path)).cases()] == [(1e-3, 7, 3), (1e-4, 7, 3)]
    path.write_text(json.dumps({"tasks": ["sst2"], "methods": {"mine": {**method, "lr": 1}}}))
    with pytest.raises(GridError, match=r"a method has config, lrs.*; got lr"):
        read_grid(str(path))
    with pytest.raises(GridError, match=r"looked for a grid named 'nope'.*the grids are accuracy"):
        read_grid("nope")


@pytest.mark.parametrize(
    ("grid", "message"),
    [
        ({"tasks": "sst2"}, "tasks of a grid must be a list, got 'sst2'"),
        ({"seeds": ["0"]}, "seeds of a grid must be a list of numbers, got"),
        ({"method": {"lrs": "1e-6"}}, "lrs of a method must be a list of numbers, got '1e-6'"),
        ({"method": {"steps": [10]}}, r"steps of a method must be one value, got \[10\]"),
        ({"method": {"config": {}}}, "must have an optimizer with a type, got {} of mine"),
        ({"method": {"config": {"optimizer": "ZO"}}}, "must have an optimizer with a type, got .* of mine"),
    ],
)
def test_a_grid_of_wrong_values_is_refused(tmp_path: Path, grid: dict[str, Any], message: str) -> None:
    method = {"config": {"optimizer": {"type": "ZO"}}, "seeds": None, **grid.pop("method", {})}
    (tmp_path / "g.json").write_text(json.dumps({"tasks": ["sst2"], "methods": {"mine": method}, **grid}))
    with pytest.raises(GridError, match=message):
        read_grid(str(tmp_path / "g.json"))


def test_settled_cases_are_not_run_again(tmp_path: Path) -> None:
    cases = list(GRIDS["smoke"].cases())
    rows = tmp_path / "rows.jsonl"
    done, failed = cases[0].key, cases[1].key
    rows.write_text(
        json.dumps({"key": done, "status": "ok"})
        + "\n"
        + json.dumps({"key": failed, "status": "failed"})
        + '\n{"key": "h'
    )
    append_row(rows, {"key": cases[2].key, "status": "ok"})
    found = read_rows(rows)
    assert [row["key"] for row in found] == [done, failed, cases[2].key], "a torn line takes none along"
    cases.pop(2)
    assert [c.key for c in remaining([*cases, *cases], found)] == [c.key for c in cases[2:]]


SCRIPT = """
import json, pathlib, signal, sys, time

def main():
    args = dict(zip(sys.argv[1::2], sys.argv[2::2]))
    folder = pathlib.Path(args["--output-dir"])
    if args["--task"] == "badly forked":
        count = folder.parent.parent / "count"
        count.write_text(count.read_text() + "x" if count.exists() else "x")
        raise SystemExit(97)
    if args["--task"] == "fails":
        raise SystemExit("error: the reason")
    if args["--task"] == "hangs":
        time.sleep(600)
    if args["--task"] == "endless":
        stopped = []
        signal.signal(signal.SIGTERM, lambda *_: stopped.append(1))
        (folder / "checkpoints").mkdir()
        while not stopped:
            time.sleep(0.05)
        (folder / "checkpoints" / "latest").write_text("step7")
        return
    (folder / "summary.json").write_text(json.dumps({"after": 0.5, "metric": "accuracy", "config": "x"}))
"""


def a_case(task: str) -> GridCase:
    return GridCase(method="m", task=task, lr=1.0, seed=0, steps=5, eval_every=5, batch_size=2, config={"a": 1})


def test_runs_that_end_fail_or_are_cut(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    cases = [a_case(task) for task in ("endless", "ends", "fails")]
    results, folder = tmp_path / "rows.jsonl", tmp_path / "runs"
    sweep = Sweep(script, results, folder, "embedded", jobs=2, max_seconds=44, grace_s=40, start="fork", preload=())
    assert in_clean_process(run, sweep, partial(remaining, cases)) == 2
    rows = {row["task"]: row for row in read_rows(results)}
    assert rows["ends"]["status"] == "ok" and rows["ends"]["after"] == 0.5 and rows["ends"]["config"] == {"a": 1}
    assert rows["fails"]["status"] == "failed" and "error: the reason" in rows["fails"]["last_words"]
    assert [case.task for case in remaining(cases, read_rows(results))] == ["endless"]
    assert sweep.command(cases[0])[-2:] == ["--resume", "latest"]
    assert not (folder / cases[1].key).exists()
    impatient = dataclasses.replace(sweep, max_seconds=None, most_seconds=0.5)
    assert in_clean_process(run, impatient, partial(remaining, [a_case("hangs")])) == 1
    assert [row["status"] for row in read_rows(results) if row["task"] == "hangs"] == ["failed"]


def test_a_piece_is_filled_with_what_fits() -> None:
    sweep = Sweep(Path("s"), Path("r"), Path("nowhere"), "embedded", max_seconds=480)
    cases = [a_case("900"), a_case("300"), a_case("100")]
    expected = [float(case.task) for case in cases]
    assert sweep.span_s == 435
    assert next_case(sweep, cases, expected, 435).task == "300"
    assert next_case(sweep, cases, expected, 200).task == "100"
    assert next_case(sweep, cases, expected, 50) is None, "the machine is given back"
    assert next_case(sweep, cases[:1], expected[:1], 400).task == "900", "checkpoints bring it on"


def test_a_case_waits_for_the_memory_that_it_states(tmp_path: Path) -> None:
    cases = [c for c in GRIDS["qwen"].cases() if (c.task, c.seed) == ("rte", 0) and c.method in ("adamw", "lora")]
    sweep = Sweep(script=tmp_path, results=tmp_path, folder=tmp_path, model="m", jobs=8, device_gb=100)
    assert [c.device_gb for c in cases] == [40, 40, 14, 14] and sweep.shared_gb == 90
    nothing = [None] * len(cases)
    assert next_case(sweep, cases, nothing, 1.0, free_gb=90).method == "adamw"
    assert next_case(sweep, cases, nothing, 1.0, free_gb=90 - 2 * 40 + 4).method == "lora"
    assert next_case(sweep, cases, nothing, 1.0, free_gb=90 - 2 * 40) is None
    assert [sweep.memory_share(c) for c in cases[1:3]] == [0.6, 0.21], "half as much again as it states"
    assert dataclasses.replace(sweep, device_gb=None).memory_share(cases[0]) == 0.9 * 2 / 8


def test_qwens_rates_follow_those_that_rows_chose_for_smollm2() -> None:
    chosen = best_rates(read_rows(Path("benchmarks/results/h200_accuracy.jsonl")))
    chosen["lsp"] = chosen["adamw"]
    for name in ("adamw", "lora", "lsp", "zo"):
        assert GRIDS["qwen"].methods[name].lrs == pytest.approx((chosen[name] / 10, 0.3 * chosen[name])), name
    for name in ("lomo", "adalomo"):
        assert GRIDS["qwen"].methods[name].lrs == pytest.approx((0.3 * chosen[name], chosen[name])), name


def test_rows_keep_a_short_curve() -> None:
    curve = [{"step": i, "train_s": float(i), "loss": float(i), "dev": None} for i in range(1, 8)]
    curve.insert(4, {"step": 4, "train_s": 4.0, "loss": None, "dev": {"accuracy": 0.5}})
    found = thinned(curve, 3)
    assert [(point["step"], point.get("loss")) for point in found] == [(3, 2.0), (4, None), (6, 5.0), (7, 7.0)]
    assert found[1] == {"step": 4, "train_s": 4.0, "dev": {"accuracy": 0.5}}


@pytest.mark.skipif(sys.platform != "linux", reason="asks the kernel to tell children of their parent's end")
def test_a_killed_sweep_loses_what_was_running_and_leaves_none_behind(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    cases = [a_case(task) for task in ("ends", "badly forked", "endless", "fails")]
    sweep = Sweep(script, tmp_path / "rows.jsonl", tmp_path / "runs", "embedded", start="fork", preload=())
    parent = forkserver_context().Process(target=run, args=(sweep, partial(remaining, cases)))
    parent.start()
    checkpoints = tmp_path / "runs" / cases[2].key / "checkpoints"
    wait_for(checkpoints.is_dir)
    parent.kill()
    parent.join()
    wait_for((checkpoints / "latest").is_file)
    assert [(row["task"], row["status"]) for row in read_rows(sweep.results)] == [
        ("ends", "ok"),
        ("badly forked", "failed"),
    ]
    assert (tmp_path / "count").read_text() == "xx", "tried again in another way, once"


def wait_for(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 90
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)
