"""The table that rows make, whole or not; which cases rows bring."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from benchmarks import accuracy
from benchmarks.accuracy import best_rates, staged_cases, table, tuning_cases, whole_sweep
from benchmarks.grid import GridCase, remaining
from benchmarks.grids import GRIDS
from ds_zo.records.rows import Row, append_row

GRID = GRIDS["accuracy"]


def row(method: str, task: str, lr: float, seed: int, dev: float, after: float, metric: str = "accuracy") -> Row:
    key = f"{method}_{task}_{lr}_{seed}"
    return {"key": key, "status": "ok", "method": method, "task": task, "lr": lr, "seed": seed, "steps": 10} | {
        "dev": dev,
        "after": after,
        "metric": metric,
    }


def test_rates_are_chosen_by_dev_alone_and_shown_with_their_spread() -> None:
    rows = [
        row("zo", "sst2", 1e-3, 0, dev=0.9, after=0.5),
        row("zo", "rte", 1e-3, 0, dev=0.5, after=0.5),
        row("zo", "sst2", 1e-4, 0, dev=0.6, after=0.99),
        row("zo", "rte", 1e-4, 0, dev=0.6, after=0.99),
        row("zo", "rte", 1e-2, 0, dev=0.99, after=0.99),  # not run on all tasks
        {**row("zo", "rte", 1e-1, 0, dev=0.99, after=0.99), "loss_last": math.nan},
        {**row("zo", "sst2", 1e-1, 0, dev=0.99, after=0.99), "loss_last": math.nan},
        row("zo", "sst2", 1e-3, 1, dev=0.1, after=0.7),
        row("mezo", "sst2", 1e-3, 0, dev=0.2, after=0.25),
        row("mezo", "alpaca", 1e-3, 0, dev=9.0, after=8.0, metric="perplexity"),
    ]
    assert best_rates(rows)["zo"] == 1e-3
    equal = [row("a", "rte", lr, 0, dev=0.5, after=0.5) for lr in (1e-3, 1e-4, 1e-2)]
    assert best_rates(equal)["a"] == best_rates(equal[::-1])["a"] == 1e-4, "not by which came first"
    assert best_rates([*equal, row("a", "rte", 1e-5, 0, dev=math.nan, after=0.5)])["a"] == 1e-4
    text = table(rows, grid=GRID)
    assert "| method | lr | steps | sst2 (accuracy) | rte (accuracy) | copa | boolq | alpaca (perplexity) |" in text
    assert "| zo | 0.001? | 10 | 60.0 ± 14.1 (2 of 3) | 50.0 (1 of 3) | – | – | – |" in text
    assert "| mezo | 0.001? | 10 | 25.0 | – | – | – | 8.00 |" in text, "one seed is all that it wants"
    assert "| lsp | ? |  | – |" in text and "\nNot run yet, 232: adamw 21, lora 19, zo 21, " in text
    assert table(rows).splitlines()[-1] == "| zo | 0.001 | 10 | – | 50.0 | 60.0 ± 14.1 (2) |"


def settle(case: GridCase, dev: float) -> Row:
    return {**row(case.method, case.task, case.lr or 0.0, case.seed, dev=dev, after=dev), "key": case.key}


def test_rows_bring_the_cases_whose_rates_they_decide() -> None:
    first = staged_cases(GRID, [])
    assert [case.method for case in first[:5]] == ["zero-shot"] * 5 and {c.seed for c in first} == {0}
    assert {case.task for case in first[5:]} == {"sst2", "rte"}
    rates = [case for case in tuning_cases(GRID) if case.method == "zo"]
    rows = [settle(case, dev=0.9 if case.lr == 3e-6 else 0.5) for case in rates]
    assert len(staged_cases(GRID, rows[:-1])) == len(first), "one rate is still to be tried"
    new = [case for case in remaining(staged_cases(GRID, rows), rows) if case.key not in {c.key for c in first}]
    assert {case.method for case in new} == {m for m in GRID.methods if m.startswith(("zo", "mezo"))}
    assert {case.lr for case in new} == {3e-6} and {case.seed for case in new if case.method == "zo"} == {0, 1, 2}
    assert [case.seed for case in new] == sorted(case.seed for case in new), "a whole table of one seed first"
    failed = [{**r, "status": "failed"} for r in rows]
    assert len(staged_cases(GRID, failed)) == len(first), "no rate that works, nothing to run"


def test_the_command_shows_the_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = tmp_path / "rows.jsonl"
    for method, after in (("sgd", 0.9), ("lomo", 0.8)):
        for seed in (0, 1):
            append_row(rows, row(method, "sst2", 3e-2, seed, dev=0.5, after=after + seed / 50))
    accuracy.main([str(rows)])
    assert "| sgd | 0.03? | 10 | 91.0 ± 1.4 (2 of 3) |" in capsys.readouterr().out
    accuracy.main([str(rows), "--dev"])
    assert "| sgd | 0.03? | 10 | 50.0 ± 0.0 (2 of 3) |" in capsys.readouterr().out


def test_a_table_says_what_rates_will_bring() -> None:
    rates = [case for case in tuning_cases(GRID) if case.method == "zo"]
    rows = [settle(case, dev=case.lr or 0.0) for case in rates]
    assert len(whole_sweep(GRID, [])) == len(whole_sweep(GRID, rows)) > len(staged_cases(GRID, []))
    decided = {case.key for case in staged_cases(GRID, rows) if case.method.startswith(("zo", "mezo"))}
    assert decided <= {case.key for case in whole_sweep(GRID, rows)}
