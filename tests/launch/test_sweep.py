"""launch/sweep.py on the real launch/train.py: every kind of run that the papers' grids have, and what rows make."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks import pictures, sweep
from benchmarks.accuracy import table
from benchmarks.grid import Grid, GridCase, read_rows
from benchmarks.grids import GRIDS, lsp_glue
from ds_zo.records.rows import Row
from ds_zo.tasks import make_task
from ds_zo.tasks.embedded_model import FOLDER
from tests.helpers.clean_process import in_clean_process

pytestmark = pytest.mark.slow

PAIRS = [
    ("A man walks.", "A man is walking."),
    ("It fell.", "No dog sings."),
    ("return x", "return y"),
    ("One.", "Two."),
]
TABLES = {
    "boolq": [{"question": f"is it {i}", "passage": "It is one.", "label": i % 2 == 1} for i in range(4)],
    "sst2": [{"sentence": a, "label": i % 2} for i, (a, _) in enumerate(PAIRS)],
    "stsb": [{"sentence1": a, "sentence2": b, "label": 4.5 - i} for i, (a, b) in enumerate(PAIRS)],
}
"""Hand-written, in the public loaders' fields."""


def short(grid: Grid, *, tasks: Sequence[str], steps: int, names: Sequence[str] = ()) -> list[GridCase]:
    """Each method of a grid once, at its first rate and rank."""
    methods = {
        name: dataclasses.replace(m, lrs=m.lrs[:1], lora_ranks=m.lora_ranks[:1], batch_size=4, eval_every=steps)
        for name, m in grid.methods.items()
        if name in (names or grid.methods)
    }
    cases = list(Grid(methods, tuple(tasks), (0,), grid.arguments).cases(steps=steps))
    for case in cases:
        if case.method == "lsp":
            case.config["optimizer"]["params"] |= {"fit_steps": 1, "nonzeros_per_row": 2}  # fits take longest
    return cases


def with_dropout(folder: Path) -> Path:
    """The embedded model with dropout."""
    shutil.copytree(FOLDER, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "attention_dropout": 0.2}))
    return folder


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Row]:
    """Of one sweep with the embedded model, by key."""
    folder = tmp_path_factory.mktemp("sweep")
    for task, lines in TABLES.items():
        (folder / "data" / task).mkdir(parents=True)
        for split in ("train", "dev", "test"):
            (folder / "data" / task / f"{split}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    dropout = ("--model", str(with_dropout(folder / "dropout")))
    equal_z = short(GRIDS["smoke"], tasks=["sst2"], steps=6, names=["mezo", "zo"])
    cases = [
        *(dataclasses.replace(case, arguments=(*case.arguments, *dropout)) for case in equal_z),
        *short(GRIDS["lora-lomo"], tasks=["boolq"], steps=2),
        *short(lsp_glue(128), tasks=["sst2"], steps=2, names=["lsp"]),
        *short(lsp_glue(128), tasks=["stsb"], steps=2),
    ]
    results = folder / "rows.jsonl"
    told = ["--results", str(results), "--data-root", str(folder / "data"), "--", "--num-eval", "4"]
    args = sweep.parse_args(told)
    runs = [sweep.to_run(case, args, []) for case in cases]
    for run in runs:
        run.params["threads"] = 1  # more wait for one another where other tests have the cores
    made = in_clean_process(sweep.run, args, runs)
    assert len(made) == len(cases)
    found = {row["key"]: row for row in read_rows(results)}
    assert list(found) == [case.key for case in cases]
    assert {row["status"] for row in found.values()} == {"ok"}, [row.get("last_words") for row in found.values()]
    return found


def test_zo_takes_the_references_steps_at_equal_z(rows: dict[str, Row]) -> None:
    zo, mezo = (next(row for row in rows.values() if row["method"] == name) for name in ("zo", "mezo"))
    losses = [[point["loss"] for point in row["curve"] if "loss" in point] for row in (zo, mezo)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5) and len(losses[0]) > 1
    assert zo["after_values"] == mezo["after_values"] and zo["steps"] == 6
    assert zo["first_step_s"] == zo["curve"][0]["train_s"] > 0
    model, tokenizer = AutoModelForCausalLM.from_pretrained(FOLDER), AutoTokenizer.from_pretrained(FOLDER)
    task = make_task("sst2")
    task.rows = lambda split: TABLES["sst2"]  # type: ignore[method-assign]
    whole = task.collate(task.sequences("train", tokenizer, max_length=64), pad_token_id=0)
    assert abs(model.float()(**whole).loss.item() - losses[0][0]) > 1e-2, "dropout from the first step on, in both"


def test_heads_and_regression_beside_full_tuning_and_galore(rows: dict[str, Row]) -> None:
    heads = {(row["method"], row["task"]): row for row in rows.values() if row["head"] == "classifier"}
    assert set(heads) == {("lsp", "sst2"), ("lsp", "stsb"), ("adamw", "stsb"), ("galore", "stsb")}
    for (_, task), row in heads.items():
        assert row["metric"] == {"sst2": "accuracy", "stsb": "pearson"}[task]
        assert row["before"] is None and row["loss_first"] is not None and row["after"] is not None
    assert heads["lsp", "stsb"]["params"]["config"]["optimizer"]["params"]["subspace_dim"] == 85
    first = {heads[method, "stsb"]["loss_first"] for method in ("lsp", "adamw", "galore")}
    assert max(first) == pytest.approx(min(first), rel=1e-5), "the same head and data before the first update"
    text = table(list(heads.values()), grid=lsp_glue(128))
    assert "| galore | 5e-05? |" in text and "stsb (pearson)" in text


def test_lora_with_and_without_lomo_by_rank_and_by_step(rows: dict[str, Row], tmp_path: Path) -> None:
    boolq = [row for row in rows.values() if row["task"] == "boolq"]
    assert [(row["method"], row["lora_rank"]) for row in boolq] == [("lomo", None), ("lora", 1), ("lora+lomo", 1)]
    boolq += [{**row, "lora_rank": 2, "lr": lr, "dev": lr, "after": lr} for row in boolq[1:] for lr in (0.1, 0.2)]
    (axes,) = pictures.ranks(boolq).axes
    drawn = {line.get_label(): list(line.get_ydata()) for line in axes.lines}
    assert drawn["lora+lomo"][1:] == [0.2], "the best by dev"
    assert len(pictures.curves(boolq, methods=["lomo", "lora"]).axes) == 4


def test_tuning_is_the_part_of_the_grid_that_chooses_rates(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results = tmp_path / "rows.jsonl"
    sweep.main(["--grid", "accuracy", "--tune", "--dry-run", "--results", str(results)])
    said = capsys.readouterr().out.splitlines()[1:]
    tuned = {"adamw", "lora", "zo", "lomo", "adalomo", "lsp", "lsp-512"}
    assert {line.split("_")[0] for line in said} == tuned
    assert {line.split("_")[1] for line in said} == {"sst2", "rte"}
    results.write_text(json.dumps({"key": said[0].split(":")[0], "status": "failed", "task": "sst2"}) + "\n")
    for more, left in (([], 43), (["--retry-failed"], 44), (["--limit", "3"], 3)):
        sweep.main(["--grid", "accuracy", "--tune", "--dry-run", "--results", str(results), *more])
        assert f"44 cases, {left} to run now" in capsys.readouterr().out
    results.write_text(2 * results.read_text())
    sweep.main(["--grid", "accuracy", "--tune", "--dry-run", "--results", str(results), "--retry-failed"])
    assert "43 to run now" in capsys.readouterr().out, "once more, not for ever"
    row = {"key": said[0].split(":")[0], "status": "ok", "task": "sst2", "model": "DIR/embedded"}
    for model, left in (("embedded", 43), ("./other", 44)):
        results.write_text(json.dumps(row) + "\n")
        sweep.main(["--grid", "accuracy", "--tune", "--dry-run", "--results", str(results), "--model", model])
        said = capsys.readouterr().out
        assert f"44 cases, {left} to run now" in said
    sweep.main(["--tasks", "boolq", "--results", "x", "--dry-run", "--case-seconds", "5"])
    assert ", 5 s of training each\n" in capsys.readouterr().out
    results.write_text("")
    for path, message in ((tmp_path / "no", "looked for rows at .*: not found"), (results, "tells the rates of no")):
        with pytest.raises(SystemExit, match=message):
            sweep.main(["--grid", "accuracy", "--results", "x", "--dry-run", "--rates-from", str(path)])
    row = {"key": "k", "status": "ok", "method": "zo", "task": "copa", "lr": 5e-6, "seed": 0, "dev": 0.5}
    results.write_text(json.dumps({**row, "metric": "accuracy"}) + "\n")
    sweep.main(["--grid", "accuracy-seeds", "--results", "x", "--dry-run", "--rates-from", str(results)])
    said = capsys.readouterr().out
    assert "mezo_sst2_lr5e-06_" in said and "lr3e-06" not in said, "also where rates were chosen on other tasks"
    sweep.main(["--grid", "curves", "--results", "x", "--dry-run", "--rates-from", str(results)])
    assert "tells no rate of lomo, lsp, lsp-dense, zero-offload: run at the grid's own" in capsys.readouterr().out
    with pytest.raises(SystemExit, match=r"grid smoke has the methods .*; got nope \(--methods\)"):
        sweep.main(["--grid", "smoke", "--methods", "nope", "--results", "x"])


def test_rows_of_other_arguments_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results = tmp_path / "rows.jsonl"
    command = ["--grid", "accuracy", "--tune", "--dry-run", "--results", str(results)]
    sweep.main(command)
    key = capsys.readouterr().out.splitlines()[1].partition(":")[0]
    own = next(list(case.arguments) for case in GRIDS["accuracy"].cases() if case.key == key)
    more = ["--num-eval", "2"]
    for made, asked, is_named in ((own, [], False), ([*own, *more], [], True), (own, more, True)):
        results.write_text(json.dumps({"key": key, "status": "ok", "task": "sst2", "arguments": made}) + "\n")
        sweep.main([*command, "--", *asked])
        assert (f"rows of other arguments in {results}: 1, such as {key}" in capsys.readouterr().out) is is_named
