"""Grids as data, which cases are left, and what becomes of runs that end, fail or are cut."""

from __future__ import annotations

import dataclasses
import json
import time
from pathlib import Path
from typing import Any

import pytest

from benchmarks import references, sweep
from benchmarks.accuracy import best_rates
from benchmarks.grid import GridError, read_rows, remaining
from benchmarks.grids import GRIDS, read_grid
from benchmarks.sweep import thinned
from ds_zo.config import backend_of
from ds_zo.config.resolve import resolve
from ds_zo.records.rows import append_row
from ds_zo.tasks import TASKS
from tests.helpers.clean_process import in_clean_process


@pytest.fixture(autouse=True)
def registered(own_backends: None) -> None:
    """MeZO and GaLore."""
    references.register()


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


def test_a_call_begins_what_fits_its_time_and_the_next_call_goes_on(tmp_path: Path) -> None:
    """`fails` ends with the reason in its row. Rows of like cases say that `zo` would end too late."""
    results = tmp_path / "rows.jsonl"
    args = sweep.parse_args(["--results", str(results), "--methods", "zero-shot,zo", "--limit", "2", "--jobs", "2"])
    first, zo = sweep.Listing(args).to_run()
    assert (first.expected_s, zo.expected_s, first.params["options"][:2]) == (0.0, 0.0, ["--task", "code_or_text"])
    append_row(results, {"key": "like", **{key: zo.labels[key] for key in ("method", "task", "steps", "jobs")}})
    like = read_rows(results)[0] | {"status": "ok", "wall_s": 1000.0, "model": "embedded", "lr": 1.0, "seed": 1}
    results.write_text(json.dumps(like) + "\n")
    first, zo = sweep.Listing(args).to_run()
    assert zo.expected_s == pytest.approx(1150.0)
    fails = dataclasses.replace(first, params={**first.params, "options": ["--task", "no such task"]})
    rows = in_clean_process(sweep.run, args, [fails, zo], ends=time.monotonic() + 100)
    assert [row["status"] for row in rows] == ["crash", "not run"]
    assert "no such task" in rows[0]["last_words"] and rows[0]["key"] == rows[0]["case"] == first.name
    assert sweep.Listing(args).to_run()[0].name == zo.name, "not run is no row"


def test_a_grid_that_states_its_memory_needs_the_devices(tmp_path: Path) -> None:
    told = ["--grid", "qwen", "--results", str(tmp_path / "rows"), "--dry-run", "--jobs", "8"]
    with pytest.raises(SystemExit, match=r"up to 40 GB each, .* got none \(--device-gb\)"):
        sweep.main(told)
    sweep.main([*told, "--device-gb", "139"])


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
