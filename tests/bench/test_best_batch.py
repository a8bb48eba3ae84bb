"""The search for micro-batches: it begins where the plan says, and ends with the fastest size that runs."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

import pytest

from ds_zo.bench import best_batch, table_cases
from ds_zo.bench.compare import add_arguments, main
from ds_zo.bench.contenders import ALL
from ds_zo.planner import contenders as planned_methods
from ds_zo.records.rows import Row


def searched(speeds: dict[int, float | None], *, planned: dict[int, float]) -> tuple[float | None, list[int]]:
    """Speed of the best row, and the sizes that ran. `speeds` None: out of memory. The card has 10 GB."""
    ran: list[int] = []

    def run(size: int) -> Row:
        ran.append(size)
        speed = speeds[size]
        return {"status": "oom"} if speed is None else {"status": "ok", "tokens_per_s_mean": speed}

    best, rows = best_batch.search(list(speeds), planned_gb=planned.__getitem__, room_gb=10.0, run=run)
    assert len(rows) == len(ran)
    return best.get("tokens_per_s_mean"), ran


def test_the_search_begins_with_the_largest_that_the_plan_expects_to_fit() -> None:
    planned = {8: 20.0, 4: 11.0, 2: 9.0, 1: 8.0}
    assert searched({8: 9.0, 4: 3.0, 2: 2.0, 1: 1.0}, planned=planned) == (3.0, [2, 4])
    assert searched({8: 9.0, 4: None, 2: 2.0, 1: 1.0}, planned=planned) == (2.0, [2, 4])
    assert searched({8: 9.0, 4: 4.0, 2: None, 1: 1.0}, planned=planned) == (1.0, [2, 1])
    assert searched({8: None, 4: None, 2: None, 1: None}, planned=dict.fromkeys(planned, 50.0)) == (None, [1])


def test_sizes_are_halves_and_a_method_that_does_not_accumulate_has_one() -> None:
    assert best_batch.sizes_of(12, accumulates=True) == [12, 6, 3]
    assert best_batch.sizes_of(8, accumulates=False) == [8]
    assert not ALL["lomo"].accumulates and ALL["adamw-lean"].accumulates


def test_every_contender_has_a_plan() -> None:
    assert {contender.planned_as for contender in ALL.values()} <= planned_methods().keys()


def test_planned_memory_grows_with_the_micro_batch_and_a_start_may_not_count() -> None:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    args = parser.parse_args(["--model", "random:llama-tiny", "--seq", "64", "--start-uncapped"])
    name = "zero2-offload-bf16"
    small, large = table_cases.planned(args, [(name, 1), (name, 8)], cap_gb=None)
    assert small is not None and large is not None and small.device_gb < large.device_gb
    args.start_uncapped = False
    (whole,) = table_cases.planned(args, [(name, 1)], cap_gb=None)
    assert whole is not None and whole.device_gb >= small.device_gb


def test_plans_are_made_in_another_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan that initialised CUDA here would leave no process to fork cases from."""
    monkeypatch.setattr(table_cases, "_planned", _process_id)
    (found,) = table_cases.planned(argparse.Namespace(layers=None), [("zo", 4)], cap_gb=None)
    assert found != os.getpid()


def _process_id(*_: Any) -> list[int]:
    return [os.getpid()]


def test_the_best_trial_is_the_contenders_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    speeds = {4: None, 2: 5.0}

    def run_cases(cases: Any, *, out: Path, run_id: str, **_: Any) -> list[Row]:
        (case,) = cases
        row: Row = {"case": case.name, "run_id": run_id, "params": case.params, "status": "ok", "settings": ""}
        if "spec" in case.params:
            spec = case.params["spec"]
            speed = speeds[spec["batch"] // spec["accumulation"]]
            figures = {"tokens_per_s": speed, "tokens_per_s_mean": speed, "seconds": [1.0], "warmup_seconds": [1.0]}
            row |= {"status": "oom"} if speed is None else figures
        best_batch.append_row(out, row)
        return [row]

    monkeypatch.setattr(best_batch, "run_cases", run_cases)
    shape = ["--model", "random:llama-tiny", "--batch", "4", "--seq", "8", "--device", "cpu"]
    told = [*shape, "--contenders", "zero2-offload", "--best-batch", "--run-id", "r", "--out", str(tmp_path)]
    assert main(told) == 0
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [row["case"] for row in rows] == ["machine", "zero2-offload"]
    assert rows[1]["params"]["spec"]["accumulation"] == 2
    assert rows[1]["tried"] == [
        {"micro_batch": 4, "status": "oom"},
        {"micro_batch": 2, "status": "ok", "tokens_per_s_mean": 5.0},
    ]
    written = json.loads((tmp_path / "configs/zero2-offload.json").read_text(encoding="utf-8"))
    assert (written["train_micro_batch_size_per_gpu"], written["gradient_accumulation_steps"]) == (2, 2)
    assert len((tmp_path / "trials.jsonl").read_text(encoding="utf-8").splitlines()) == 2
