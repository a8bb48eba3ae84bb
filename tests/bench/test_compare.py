"""One command, from contenders to rows, table and page, at a shape that a CPU can train."""

from __future__ import annotations

import argparse
import csv
import json
import os
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
import transformers as hf

from ds_zo.bench import compare
from ds_zo.bench.compare import add_arguments, main
from ds_zo.bench.contenders import ALL, DIFFERING, EXACT_PINNING, ORDER
from ds_zo.bench.runner import read_rows
from ds_zo.bench.table_cases import MACHINE, make_cases
from ds_zo.bench.workload import text_batches
from ds_zo.cli import main as cli
from ds_zo.records import environment
from ds_zo.records.rows import Row, append_row
from tests.helpers.warm_interpreter import WarmInterpreter

REPO = Path(__file__).parents[2]
NAMES = ["adamw", "zero3-offload-param", "zo", "lsp"]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory, warm_interpreter: WarmInterpreter) -> Path:
    out = tmp_path_factory.mktemp("compare")
    page = (REPO / "docs" / "choose.md").read_text(encoding="utf-8").splitlines()
    shown = next(line for line in page if line.startswith("python launch/compare.py "))
    command = [warm_interpreter.python(), *shlex.split(shown)[1:], "--layers", "1", "--warmup", "2", "--dtype", "fp32"]
    command += ["--device", "cpu", "--lr", "zo=0.5e-5", "--min-free-host-gib", "0.1", "--out", str(out)]
    # The script finds the package by itself: of PYTHONPATH only what else is on it stays.
    others = [folder for folder in os.environ.get("PYTHONPATH", "").split(os.pathsep) if folder and folder != str(REPO)]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(others)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, cwd=REPO, env=env)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "| zero3-offload-param | " in done.stdout
    return out


def contenders(out: Path) -> dict[str, dict[str, Any]]:
    return {row["case"]: row for row in read_rows(out / "rows.jsonl") if row["case"] != "machine"}


def test_every_contender_starts_from_the_same_weights_and_sees_the_same_batch(results: Path) -> None:
    rows = contenders(results)
    assert {name: row["status"] for name, row in rows.items()} == dict.fromkeys(NAMES, "ok")
    first = [rows[name]["losses"][0] for name in NAMES]
    assert first == pytest.approx([first[0]] * len(NAMES), abs=2e-3)
    assert all(len(row["losses"]) == 5 and row["tokens_per_s"] > 0 for row in rows.values())
    assert all(row["forward_s"] > 0 and row["host_peak_gb"] > 0.1 for row in rows.values())
    # LSP's matrices are smaller than its subspace here, which makes it AdamW as well.
    for name in ("zero3-offload-param", "lsp"):
        assert rows[name]["losses"] == pytest.approx(rows["adamw"]["losses"], abs=1e-3)
    assert rows["zo"]["losses"] != pytest.approx(rows["adamw"]["losses"], abs=1e-3)


def test_the_files_differ_in_three_sections_alone_and_lr_is_as_asked(results: Path) -> None:
    configs = {path.stem: json.loads(path.read_text()) for path in (results / "configs").glob("*.json")}
    assert configs.keys() == set(NAMES)
    shared = [{key: value for key, value in config.items() if key not in DIFFERING} for config in configs.values()]
    assert all(other == shared[0] for other in shared)
    assert configs["zo"]["optimizer"]["params"]["lr"] == 0.5e-5
    assert all(contenders(results)[name]["params"]["config"] == config for name, config in configs.items())


def test_the_table_and_the_page_are_made_from_the_rows_alone(results: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with (results / "rows.csv").open() as file:
        assert [row["case"] for row in csv.DictReader(file)] == ["machine", *NAMES]
    page = (results / "report.html").read_text()
    for name in ("report.md", "report.html", "rows.csv", "configs/zo.json"):
        (results / name).unlink()
    assert main(["--report-only", "--out", str(results)]) == 0
    assert (results / "report.html").read_text() == page and (results / "configs" / "zo.json").exists()
    assert "G parameters/s" in capsys.readouterr().out


def test_the_command_lists_contenders_with_their_settings(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli(["bench", "--list"]) == 0
    listed = capsys.readouterr().out
    assert all(contender.settings in listed for contender in ALL.values())
    assert cli(["bench", "--report-only", "--out", "no/such/folder"]) == 1


def asked(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return parser.parse_args(["--model", "random:llama-tiny", *arguments])


def test_a_larger_card_comes_first_and_the_contenders_that_a_table_needs_most() -> None:
    args = asked("--device-memory-gb", "8,none,24")
    assert args.device_memory_gb == [None, 24, 8]
    names = [case.name for case in make_cases(args, device="cpu")]
    assert names[:3] == [MACHINE, "zo", "lomo"]
    assert names.index("zero2-offload") < names.index("zenflow") < names.index("zo-wire")
    assert sorted(ORDER) == sorted(ALL)


def test_stock_is_pinned_so_that_it_fits_the_host(h200: pytest.MonkeyPatch) -> None:
    few = ("--model", "random:opt-6.7b", "--contenders", "adamw,lomo,zo,zero2-offload,zero2-offload-bf16")
    args = asked(*few)
    whole, small = (
        {case.name: case for case in make_cases(args, device="cuda", device_memory_gb=gb)} for gb in (None, 24.0)
    )
    # 6.66 B parameters at 18 bytes, where PyTorch's powers of two would make it 137 GB.
    assert dict(whole["zero2-offload"].env) == EXACT_PINNING and whole["zero2-offload"].planned_host_gb < 123
    assert not whole["zo"].env and whole["zo"].planned_host_gb > 4 * 6.6
    lean = whole["zero2-offload-bf16"]
    assert not lean.env and lean.planned_host_gb < 81, "and without exact pinning"
    assert whole["zero2-offload"].expected_s > whole["zo"].expected_s > whole["lomo"].expected_s > 5
    assert small["adamw"].expected_s < 10, "it runs, and soon out of memory"
    held = {case.name: case for case in make_cases(asked(*few, "--start-uncapped"), device="cuda", device_memory_gb=24)}
    started = {name: held[name].params["spec"]["starts_uncapped"] for name in ("zero2-offload", "zo")}
    assert started == {"zero2-offload": True, "zo": False}, "ours are told the card's size before they start"
    assert held["zero2-offload"].expected_s > small["zero2-offload"].expected_s, "it does not run out of memory"
    h200.setattr(environment, "may_lock_memory", lambda: False)
    rounded = {case.name: case for case in make_cases(args, device="cuda")}["zero2-offload"]
    assert not rounded.env and rounded.planned_host_gb > 136


def test_a_run_of_other_settings_is_not_continued(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its rows would stand in one table with those of the new settings."""
    runs: list[str] = []

    def run_cases(cases: Any, *, out: Path, run_id: str, **_: Any) -> None:
        runs.append(run_id)
        for case in cases:
            row: Row = {"run_id": run_id, "case": case.name, "config_hash": case.config_hash, "status": "failed"}
            append_row(out, row | {"machine": environment.machine_id(), "params": case.params})

    monkeypatch.setattr(compare, "run_cases", run_cases)
    monkeypatch.setattr(compare, "new_run_id", lambda: "new")
    monkeypatch.setattr(compare, "runs_of", lambda *_, **__: [])
    common = ["--model", "random:opt-tiny", "--device", "cpu", "--contenders", "zo", "--out", str(tmp_path)]
    assert main([*common, "--seq", "16", "--run-id", "old"]) == 0
    assert main([*common, "--seq", "16", "--resume"]) == 0
    assert main([*common, "--seq", "16", "--resume", "--steps", "2"]) == 0
    capsys.readouterr()
    assert main([*common, "--seq", "32", "--resume", "--batch", "2"]) == 0
    assert "run old has another batch, length: a new run begins here" in capsys.readouterr().err
    assert runs == ["old", "old", "old", "new"]
    assert main([*common, "--seq", "32", "--run-id", "old"]) == 1
    assert "has another length: name a new run, or another folder (--run-id, --out)" in capsys.readouterr().err


def test_what_is_asked_wrongly_is_said_in_a_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, words in (
        (["--model", "random:opt-7b"], "unknown shape 'opt-7b'"),
        (["--contenders", "zo,adam"], "unknown contender adam"),
        (["--lr", "zo"], "NAME=NUMBER"),
        (["--report-only"], "there are none"),
        (["--model", "/no/such/folder"], "a model must be a folder with a config.json, a name that the Hub"),
        (["--batch", "0"], "batch must be >= 1, got 0 (--batch)"),
        (["--device-memory-gb", "none,0"], "a cap must be > 0 GB"),
        (["--device-memory-gb", "inf"], "a cap must be > 0 GB"),
        (["--lr", "zoo=1e-6"], "a learning rate is one of adamw,"),
        (["--lr", "zo=nan"], "and >= 0, got 'zo=nan' (--lr)"),
        (["--timeout-s", "0"], "timeout-s must be > 0 seconds, got 0 (--timeout-s)"),
        (["--gradient-clipping", "-1"], "must be >= 0, got -1 (--gradient-clipping)"),
        (["--min-free-host-gib", "nan"], "must be >= 0, got nan (--min-free-host-gib)"),
        (["--data", "/no/such/file"], "data must be a text file, got /no/such/file"),
        (
            ["--accumulate", "zo=3", "--batch", "4"],
            "micro-batches must divide the batch, got 3 for zo and a batch of 4",
        ),
        (["--accumulate", "lomo=2", "--batch", "4"], "lomo does not accumulate gradients here, got 2"),
        (["--best-batch", "--layers", "2"], "takes one whole model and one cap: leave out --accumulate"),
    ):
        assert main([*arguments, "--device", "cpu", "--out", str(tmp_path / "none")]) == 1
        assert words in capsys.readouterr().err
    hf.GPT2Config(n_embd=16, n_layer=1, n_head=2, n_positions=12).save_pretrained(tmp_path / "gpt2")
    assert main(["--model", str(tmp_path / "gpt2"), "--seq", "16", "--device", "cpu", "--out", str(tmp_path)]) == 1
    assert "learned positions (transformer.wpe) for 12 tokens, got 16 (--seq)" in capsys.readouterr().err
    with pytest.raises(ValueError, match="text needs the model's tokenizer"):
        text_batches(str(tmp_path / "none"), None, batch=1, length=8, seed=0)
    (tmp_path / "file").touch()
    told = ["--model", "random:opt-tiny", "--contenders", "zo", "--device", "cpu", "--out", str(tmp_path / "file")]
    assert main(told) == 1 and "Not a directory" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["--device-memory-gb", "none,eight"])
    assert "numbers of GB, or none for the whole card, got 'none,eight'" in capsys.readouterr().err
    assert [case.name for case in make_cases(asked("--contenders", "lomo, zo,"), device="cpu")][1:] == ["zo", "lomo"]
