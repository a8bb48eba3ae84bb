"""A block takes rows, runs and seeds as its data says, on rows made by hand."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks import blocks, views
from ds_zo.records.rows import Row

FILE = "file.jsonl"
Spec = dict[str, Any]


def text_of(monkeypatch: pytest.MonkeyPatch, rows: list[Row], spec: Spec) -> list[str]:
    """The lines of the block's table, and the line below it that names rows and commands."""
    monkeypatch.setattr(blocks, "rows_in", lambda file: [{**row, "file": file} for row in rows])
    text = blocks.Block({"rows": [{"file": FILE}], "made by": ["speed zo"], **spec}).text()
    return [line for line in text.splitlines() if line.startswith(("| ", "Rows"))]


def step(case: str, run: str, tokens_per_s: float, **more: Any) -> Row:
    steps = {"step_s": 1.0, "step_s_min": 0.5, "step_s_max": 2.0, "seconds": [1.0] * 3}
    return {"case": case, "run_id": run, "status": "ok", "tokens_per_s": tokens_per_s, **steps, **more}


COLUMNS = [["GB", "{gb:.1f}"], ["ratio", "ratio", "{0}", "mezo", {"paper": "zo / mezo", "form": ".2f"}]]
SPEC: Spec = {"case": "{0}", "columns": COLUMNS, "missing": "none", "fields": ["case", "zo", "mezo"]}
SPEC |= {"lines": [["ZO at {layers} layers", "zo", 3, 2], ["LOMO", "lomo", 1, None]]}


def test_a_cell_is_of_the_newest_run_that_has_all_of_its_cases(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [step("zo", "a", 30.0, gb=1.0, layers=2), step("mezo", "a", 20.0), step("zo", "b", 90.0, gb=2.0, layers=3)]
    rows.append(step("mezo", "b", 10.0, status="oom"))
    head, _, zo, lomo, source = text_of(monkeypatch, rows, SPEC)
    assert head == "|  | GB | ratio |"
    assert zo == "| ZO at 3 layers | 2.0 | 1.50 / 1.50 (0.38 to 6.00) |", "the ratio is of run a"
    assert lomo == "| LOMO | none |  |", "neither the paper nor a row has a figure"
    assert "file.jsonl), runs a, b. Made by `python -m benchmarks.speed zo --out rows.jsonl`." in source
    together = text_of(monkeypatch, rows, {**SPEC, "together": True})
    assert together[2].startswith("| ZO at 3 layers | 1.0 |"), "run a has all of the line"
    of_run = text_of(monkeypatch, rows, {**SPEC, "run": "a"})
    assert of_run[2].startswith("| ZO at 2 layers | 1.0 |")
    cut = [{**row, "full_layers": 9} for row in rows]
    lacking = text_of(monkeypatch, cut, {**SPEC, "needs": "gb", "lines": [["ZO", "zo", 3, 2]]})
    assert lacking[2] == "| ZO | none | 1.50 / none |"
    assert text_of(monkeypatch, [], SPEC) == []


def seed(method: str, seed: int, after: float, *, lr: float = 1e-4, dev: float | None = None, **more: Any) -> Row:
    row = {"method": method, "seed": seed, "after": after, "dev": after if dev is None else dev, "lr": lr}
    return {"task": "sst2", "metric": "accuracy", "status": "ok", "commit": "c", "steps": 9, **row, **more}


def test_training_runs_are_compared_by_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [
        seed("lora", 0, 0.5),
        seed("lora", 1, 0.7),
        seed("lora", 2, 0.1),
        seed("lomo", 0, 0.6),
        seed("lomo", 1, 0.9),
    ]
    spec: Spec = {"rows": [{"file": FILE, "case": "{method}"}], "lines": {"LOMO": "lomo"}, "paired": ["lomo", "lora"]}
    columns = [["LOMO", "range", "{0}"], ["LoRA", "range", "lora"], ["gain", "gain", "{0}", "lora"]]
    columns += [["better", "better LOMO LoRA", "{0}", "lora"], ["%", "distance", "{0}", "lora"], ["n", "seeds", "lora"]]
    _, _, line, source = text_of(monkeypatch, rows, {**spec, "columns": columns})
    cells = ["75.0 (60.0 to 90.0)", "60.0 (50.0 to 70.0)", "+15.0 (+10.0 to +20.0)", "neither", "+24.3 ± 4.3 (2)", "2"]
    assert line == f"| LOMO | {' | '.join(cells)} |", "seed 2 has no counterpart"
    assert "commit c." in source, "training runs belong to no run"


def test_the_best_setting_is_chosen_on_dev_among_those_with_all_seeds() -> None:
    rows = [seed("lora", s, 0.0, lr=lr, dev=dev) for lr, dev in ((1e-3, 0.5), (1e-2, 0.6)) for s in (0, 1)]
    rows.append(seed("lora", 0, 0.0, lr=1e-1, dev=0.9))
    assert {row["lr"] for row in views.best_on_dev(rows, "lr", "method")} == {1e-2}
    losses = [{**row, "metric": "perplexity"} for row in rows]
    assert {row["lr"] for row in views.best_on_dev(losses, "lr", "method")} == {1e-3}, "lower is better"


def test_a_row_becomes_a_row_for_each_input_and_each_link() -> None:
    row = step("t78.zo", "a", 1.0, batch=1, length=2, points=[{"batch": 2, "length": 4, "tokens_per_s": 5.0}])
    assert [(r["case"], r["tokens_per_s"]) for r in views.points([row])] == [("t78.zo", 1.0), ("t78.zo+2x4", 5.0)]
    links = step("figure5/llama/lsp", "a", 1.0, links={"10": {"tokens_per_s": 0.5}})
    found = [(row["case"], row["tokens_per_s"]) for row in views.by_link([links])]
    assert found == [("figure5/own/llama/lsp", 1.0), ("figure5/10/llama/lsp", 0.5)]
