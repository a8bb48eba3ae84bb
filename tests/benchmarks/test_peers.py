"""A peer's own code is called as its authors call it, and its rows have the form of ours. The checkouts are fakes."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import peer_steps, peers
from ds_zo.bench.report import contenders, markdown

ZO2 = """
import transformers

class ZOConfig:
    def __init__(self, **given):
        self.given = given

class Model(transformers.OPTForCausalLM):
    def zo_init(self, config):
        devices = dict(offloading_device="cpu", working_device="cpu")
        assert config.given == dict(method="mezo-sgd", zo2=True, lr=1, **devices)
        self.calls = []
    def zo_train(self):
        self.calls.append("train")
    def forward(self, input_ids, labels):
        assert self.calls.pop() == "train"
        return super().forward(input_ids=input_ids, labels=labels).loss

def get_opt_for_causalLM(config):
    return Model
"""
LAYERS = """
scheduled = []

def replace_linear_layer_with_parallel_linear(model, modules, use_lora, lora_rank, offload, use_grad_ckpt,
                                              global_state, lr, optim_dtype):
    assert offload == "cpu" and not use_lora and use_grad_ckpt and lr == 1e-4
    return [layer for name, layer in model.named_modules() if name.endswith("q_proj")]

class Scheduler:
    def __init__(self, modules, fcfs_point, fcfs_process_delay, fcfs_h2d_delay, fcfs_upd_delay):
        scheduled.append((len(modules), fcfs_point))
"""
COMPRESSOR = """
class LearnedCountSketchCompressor:
    def __init__(self, sketch_size, n_unempty):
        assert (sketch_size, n_unempty) == (512, 4)
    def fit(self, modules):
        assert modules
"""


def written(folder: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")
    return folder


def job(peer: str, checkout: Path, shape: str, options: dict[str, Any]) -> peer_steps.Job:
    config = peers.config_of_model(f"random:{shape}", max_length=16)
    return peer_steps.Job(
        peer=peer,
        checkout=str(checkout),
        architecture=peers._ARCHITECTURES[config.model_type],
        model={name: getattr(config, name) for name in peers._FIELDS[config.model_type]},
        options=options,
        batch=2,
        length=16,
        steps=3,
        warmup=1,
        dtype="fp32",
        device="cpu",
        max_s=None,
        cap_gb=None,
        checkpointing=True,
    )


def test_zo2_is_called_as_its_readme_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "zo2", raising=False)
    row = peer_steps.run(job("zo2", written(tmp_path, {"zo2/__init__.py": ZO2}), "opt-tiny", {"lr": 1}))
    assert len(row["seconds"]) == 3 and len(row["warmup_seconds"]) == 1 and row["parameters"] > 0
    assert row["step_s_min"] <= row["step_s"] <= row["step_s_max"]
    assert row["losses"] == pytest.approx([row["losses"][0]] * 4) and row["host_peak_gb"] > 0
    del sys.modules["zo2"]


def test_lsp_offload_is_called_as_its_own_script_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("state", "para_offload_modules", "gradient_compressor")
    state = "from enum import Enum\nclass State(Enum):\n    RUNNING = 0\n"
    files = dict(zip((f"{name}.py" for name in names), (state, LAYERS, COMPRESSOR), strict=True))
    monkeypatch.setattr(sys, "path", list(sys.path))
    for name in names:
        monkeypatch.delitem(sys.modules, name, raising=False)
    options = peers.PEERS["lsp-offload"].options
    row = peer_steps.run(job("lsp-offload", written(tmp_path, files), "llama-tiny", options))
    assert sys.modules["para_offload_modules"].scheduled == [(2, 10)] and row["losses"][0] > 0  # type: ignore[attr-defined]
    for name in names:
        del sys.modules[name]


def arguments(tmp_path: Path, *more: str) -> list[str]:
    shape = ["--model", "random:opt-tiny", "--batch", "2", "--seq", "16", "--device", "cpu", "--steps", "2"]
    return ["zo2", "--checkout", str(tmp_path / "zo2"), *shape, "--out", str(tmp_path / "out"), *more]


def checkout(tmp_path: Path) -> Path:
    return written(tmp_path / "zo2", dict.fromkeys(peers.PEERS["zo2"].files, ""))


def interpreter(tmp_path: Path, line: str) -> str:
    """An interpreter that reads the job and prints `line`."""
    file = tmp_path / "python"
    file.write_text(f"#!/bin/sh\ncat > {tmp_path}/job.json\necho '{line}'\n", encoding="utf-8")
    file.chmod(0o755)
    return str(file)


def test_a_row_has_the_form_of_a_contender_and_no_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured = {"step_s": 0.5, "step_wall_s": 0.5, "step_s_min": 0.4, "step_s_max": 0.6, "seconds": [0.4, 0.6]}
    more = {"warmup_seconds": [1.0], "losses": [2.0], "peak_gb": 3.0, "peak_reserved_gb": 4.0, "host_peak_gb": 5.0}
    line = "ROW " + json.dumps({**measured, **more, "parameters": 7})
    monkeypatch.setattr(peers, "make_cases", lambda *_, **__: [])
    monkeypatch.setattr(peers, "write_report", lambda rows, out: markdown(rows))
    checkout(tmp_path)
    assert peers.main(arguments(tmp_path, "--python", interpreter(tmp_path, line), "--option", "lr=0.5")) == 0
    text = (tmp_path / "out/rows.jsonl").read_text(encoding="utf-8")
    (row,) = contenders([json.loads(text)])
    assert row["tokens_per_s"] == 64 and row["settings"].endswith("lr 0.5, weight_decay 0.0, eps 0.001")
    assert row["status"] == "ok" and str(tmp_path) not in text
    sent = json.loads((tmp_path / "job.json").read_text(encoding="utf-8"))
    assert sent["model"]["num_hidden_layers"] == 2 and sent["architecture"] == "OPTForCausalLM"


def test_a_peer_that_does_not_import_says_what_it_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    line = 'FAILED {"kind": "import", "error": "ImportError: no OPT_INPUTS_DOCSTRING"}'
    monkeypatch.setenv(peers.CHECKOUT, str(tmp_path))
    monkeypatch.setenv(peers.PYTHON, interpreter(tmp_path, line))
    spec = {"model": "random:opt-tiny", "batch": 1, "length": 16, "steps": 1, "warmup": 1, "dtype": "fp32"}
    with pytest.raises(RuntimeError, match=r"no OPT_INPUTS_DOCSTRING.*transformers==4.51.3.*--python"):
        peers.run_peer(contender="zo2", spec={**spec, "device": "cpu"}, options={})


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ((), "which lacks zo2/__init__.py"),
        (("--python", "nowhere"), "an interpreter must be a file, got nowhere"),
        (("--option", "dim=2"), "one of lr, weight_decay, eps, got 'dim'"),
        (("--model", "random:llama-tiny"), "zo2 trains opt models here, got llama"),
    ],
)
def test_wrong_arguments_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], more: tuple[str, ...], words: str
) -> None:
    if more:
        checkout(tmp_path)
    assert peers.main(arguments(tmp_path, *more)) == 1
    assert words in capsys.readouterr().err
