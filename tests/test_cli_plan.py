"""`ds-zo plan` and `ds-zo report`, as typed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers as hf

from ds_zo.bench.machine_rates import noise_rate
from ds_zo.cli import main

REPO = Path(__file__).parents[1]


def test_plan_of_a_folder_with_nothing_but_a_config(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hf.LlamaConfig(
        vocab_size=128, hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=4
    ).save_pretrained(tmp_path)
    command = ["plan", "--model", str(tmp_path), "--device-memory-gb", "24", "--host-memory-gb", "128"]
    assert main([*command, "--batch", "2", "--seq", "16", "--json", "--gpus", "2"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["batch"] == 2 and found["num_blocks"] == 3
    assert {e["contender"]: e["fits"] for e in found["estimates"]}["zo"] is True
    assert found["scaled"][0]["gpus"] == 2


def test_plan_of_one_backend_shows_parts_and_json(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["plan", "--model", "random:opt-tiny", "--backend", "zo", "--offload", "--seq", "32"]
    assert main([*command, "--stream", '{"master": "wire"}', "--params", '{"num_directions": 2}', "--nodes", "2"]) == 0
    shown = capsys.readouterr().out
    assert "2 of 2 blocks streamed, master wire" in shown and "logits" in shown and '"offload_param"' in shown
    assert "2 machines" in shown


def test_plan_tells_what_is_wrong(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, said in (
        (["--model", "random:opt-7b"], "unknown shape 'opt-7b'; there are opt-tiny"),
        (["--stream", "{"], "must be a JSON object, got '{'"),
        (["--params", "[1]", "--backend", "zo"], "write {...} (--params)"),
        (["--stream", '{"device_slot": 3}'], 'did you mean "device_slots"? (ds_zo.stream.device_slot)'),
        (["--params", '{"zoeps": 1}', "--backend", "zo"], 'did you mean "zo_eps"? (optimizer.params.zoeps)'),
        (["--host-memory-gb", "0"], "memory must be > 0 GB, or left out for any amount, got 0 (--host-memory-gb)"),
        (["--gpus", "0", "--backend", "zo"], "gpus and nodes must be >= 1, got 0 and 1"),
    ):
        assert main(["plan", "--model", "random:opt-tiny", "--seq", "16", *arguments]) == 1
        assert said in capsys.readouterr().err


def test_report_names_remedies_and_feeds_the_plan(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))  # nothing is built there, and nothing will be
    command = [sys.executable, "-m", "ds_zo.cli", "report", "--json", "--layers", "random:llama-tiny", "--seq", "16"]
    written = subprocess.run(command, capture_output=True, text=True, check=True, cwd=REPO).stdout
    found = json.loads(written)  # in a process of its own: what DeepSpeed logs as it is imported goes elsewhere
    checks = {check["name"]: check for check in found["checks"]}
    assert {"GPU", "Triton", "locked memory", "host memory", "huge pages", "cores", "CPU Adam"} <= checks.keys()
    assert all(check["remedy"] for check in checks.values() if check["name"] == "GPU" and check["status"] == "warn")
    assert found["rates"]["cpu_adam_gparams"] > 0 and not list(tmp_path.iterdir())
    assert found["layers"]["num_layers"] == 2 and found["layers"]["seconds"]["cpu"]["forward"] > 0
    path = tmp_path / "rates.json"
    path.write_text(written)
    command = ["plan", "--model", "random:opt-tiny", "--seq", "32", "--backend", "zero-offload", "--json"]
    assert main([*command, "--rates", str(path)]) == 0
    planned = json.loads(capsys.readouterr().out)
    assert planned["rates"]["cpu_adam_gparams"] == found["rates"]["cpu_adam_gparams"]


def test_the_noise_kernel_can_be_timed_anywhere() -> None:
    assert noise_rate(torch.device("cpu"), numel=2**14)["noise_gdraws"] > 0
