"""`ds-zo plan` and `ds-zo report`, as typed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import transformers as hf

from ds_zo.bench import machine
from ds_zo.bench.machine_rates import noise_rate
from ds_zo.cli import main
from ds_zo.config.resolve import resolve
from ds_zo.planner import plan, render
from tests.helpers.processes import REPO, python_path
from tests.helpers.warm_interpreter import WarmInterpreter


def write_config(folder: Path, text: str) -> None:
    folder.mkdir()
    (folder / "config.json").write_text(text)


def test_plan_of_a_folder_with_nothing_but_a_config(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hf.LlamaConfig(
        vocab_size=128, hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=4
    ).save_pretrained(tmp_path)
    command = ["plan", "--model", str(tmp_path), "--device-memory-gb", "24", "--host-memory-gb", "128"]
    stream = ["--stream", '{"master": "split", "writeback_interval": 4}']  # ZO's own keys are none of LOMO's
    assert main([*command, "--batch", "2", "--seq", "16", "--json", "--gpus", "100", "--dtype", "fp16", *stream]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["batch"] == 2 and found["num_blocks"] == 3
    planned = {e["contender"]: e for e in found["estimates"]}
    assert planned["zo"]["fits"] is True and "lsp" in planned
    assert planned["zo"]["config"]["zero_optimization"]["ds_zo"] == {"stream": json.loads(stream[1])}
    assert "ds_zo" not in planned["lomo"]["config"]["zero_optimization"]
    assert found["scaled"][0]["gpus"] == 100 and found["scaled"][0]["fits"] == "no: host"  # 100 processes on it


def test_plan_of_one_backend_shows_parts_and_json(capsys: pytest.CaptureFixture[str]) -> None:
    """The keys that were planned with are in it, and those that need streaming have it."""
    stream, own = {"master": "wire", "resident_blocks": 1}, {"num_directions": 2, "seed": 5}
    command = ["plan", "--model", "random:opt-tiny", "--backend", "zo", "--nodes", "2", "--seq", "32"]
    assert main([*command, "--stream", json.dumps(stream), "--params", json.dumps(own)]) == 0
    shown = capsys.readouterr().out
    assert "1 of 2 blocks streamed, master wire" in shown and "logits" in shown and "2 machines" in shown
    config = json.loads(next(line for line in shown.splitlines() if "JSON" in line).partition("JSON")[2])
    assert config["optimizer"]["params"] == {"lr": 1e-5, "zo_eps": 1e-3, **own}, "of a small model"
    assert config["zero_optimization"]["ds_zo"] == {"stream": stream} and resolve(config, world_size=1).stream
    command = ["plan", "--model", "random:opt-tiny", "--backend", "lomo", "--seq", "32", "--json"]
    least_gb = 0.26844  # the margin: nothing can stay
    told = ["--stream", json.dumps({"device_memory_gb": least_gb}), "--params", '{"clip_grad_value": 0.5}']
    assert main([*command, "--device-memory-gb", "24", *told]) == 0
    (lomo,) = json.loads(capsys.readouterr().out)["estimates"]
    assert lomo["setting"].startswith("2 of 2 blocks streamed") and not lomo["fits"]
    assert lomo["config"]["zero_optimization"]["ds_zo"]["stream"]["device_memory_gb"] == least_gb
    assert lomo["config"]["optimizer"]["params"] == {"lr": 1e-2, "clip_grad_value": 0.5}


def test_plan_refuses_noise_that_it_cannot_price(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["plan", "--model", "random:opt-tiny", "--backend", "zo", "--params", '{"noise": "rank1"}']
    assert main(command) != 0
    assert 'ZO is planned with noise "mezo", got "rank1"' in capsys.readouterr().err


def test_plan_names_the_method_to_use(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A run with little memory to spare is not the first choice; nothing is named where nothing fits."""
    out = tmp_path / "ds_config.json"
    command = ["plan", "--model", "random:llama-1.3b", "--seq", "128", "--gpu", "rtx 4090"]
    assert main([*command, "--host-memory-gb", "64", "--out", str(out)]) == 0
    shown = capsys.readouterr().out
    assert "use: adalomo at a learning rate of 0.0005" in shown and f"JSON: {out}" in shown
    assert "for LoRA instead: lora at a learning rate of 0.0001" in shown
    assert "GPU 24 GB" in shown and "rates: RTX4090, from its data sheet" in shown and "GB are 10**9" in shown
    assert resolve(json.loads(out.read_text())).backend == "adalomo"
    found = plan("random:opt-tiny", seq=32, host_memory_gb=1.5, backends=["adalomo", "zo"])
    assert found["adalomo"].is_tight and found["adalomo"].host_peak_nbytes > 0.95 * 1.5e9
    assert "without memory to spare" in render(found) and " tight " in render(found)
    assert not plan("random:opt-tiny", seq=32, host_memory_gb=1.6, backends=["adalomo"])["adalomo"].is_tight
    assert main(["plan", "--model", "random:opt-tiny", "--seq", "32", "--host-memory-gb", "1"]) == 0
    assert "use: nothing fits; " in capsys.readouterr().out


def test_a_four_bit_base_is_planned_beside_the_others() -> None:
    """Streamed by ds_zo, and on the GPU by bitsandbytes as in the row of docs/adapters.md: 8,093 tokens/s, 6.9 GB."""
    found = plan("random:llama-7b", batch=4, seq=1024, backends=["adapter", "adapter-nf4", "qlora"])
    assert found["adapter-nf4"].config["zero_optimization"]["ds_zo"]["stream"] == {"frozen_dtype": "nf4"}
    assert found.tokens_per_s(found["qlora"]) == pytest.approx(8093, rel=0.1)
    assert found["qlora"].device_peak_nbytes / 1e9 == pytest.approx(6.9, rel=0.06)


def test_plan_tells_what_is_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hf.ViTConfig(hidden_size=16, num_hidden_layers=1, num_attention_heads=2).save_pretrained(tmp_path / "vit")
    write_config(tmp_path / "unknown", '{"model_type": "nonsuch"}')
    write_config(tmp_path / "broken", '{"model_type": "llama",')
    mpt = hf.MptConfig(d_model=16, n_heads=4, n_layers=1, vocab_size=64, max_seq_len=12)
    mpt.save_pretrained(tmp_path / "mpt")
    hf.GPT2Config(n_embd=16, n_layer=1, n_head=2, n_positions=12).save_pretrained(tmp_path / "gpt2")
    for arguments, said in (
        (["--model", str(tmp_path / "vit")], "error: plans are of models that read tokens and return a loss, got"),
        (
            ["--model", str(tmp_path / "unknown")],
            "error: The checkpoint you are trying to load has model type",
        ),
        (["--model", str(tmp_path / "unknown")], "Correct model_type in its config.json, or update transformers."),
        (["--model", str(tmp_path / "broken")], "not a valid JSON file. Correct it: Expecting property name"),
        (["--model", str(tmp_path / "mpt")], "can't be planned: it has positions for 12 tokens, got 16: lower --seq ("),
        (["--model", str(tmp_path / "gpt2")], "learned positions (transformer.wpe) for 12 tokens, got 16 (--seq)"),
        (["--model", "random:opt-7b"], "unknown shape 'opt-7b'; there are opt-tiny"),
        (["--stream", "{"], "must be a JSON object, got '{'"),
        (["--params", "[1]", "--backend", "zo"], "write {...} (--params)"),
        (["--stream", '{"device_slot": 3}'], 'did you mean "device_slots"? (ds_zo.stream.device_slot)'),
        (["--params", '{"zoeps": 1}', "--backend", "zo"], 'did you mean "zo_eps"? (optimizer.params.zoeps)'),
        (["--host-memory-gb", "0"], "memory must be > 0 GB, or left out for any amount, got 0 (--host-memory-gb)"),
        (["--device-memory-gb", "inf"], "got inf (--device-memory-gb)"),
        (["--params", '{"clip_gradvalue": 1}', "--backend", "lomo"], "optimizer.params.clip_gradvalue"),
        (
            ["--params", '{"lr": 1}', "--backend", "adamw"],
            "planned for zo, lomo, adalomo, lsp, adapter, got some of adamw",
        ),
        (["--stream", '{"wire_dtype": "fp8"}', "--backend", "lomo"], "(ds_zo.stream.wire_dtype)"),
        (["--backend", "adam"], "unknown backend 'adam'; there are zo"),
        (["--params", '{"zo_eps": 1e-3}'], "params belong to one backend"),
        (["--batch", "0"], "batch must be >= 1"),
        (["--gpu", "RTX4080"], 'did you mean "RTX4090"? (--gpu)'),
        (["--gpu", "T4"], "T4 has no bf16, got a plan in bf16: plan in fp16"),
        (["--gpus", "0", "--backend", "zo"], "gpus and nodes must be >= 1, got 0 and 1"),
    ):
        assert main(["plan", "--model", "random:opt-tiny", "--seq", "16", *arguments]) == 1
        assert said in capsys.readouterr().err


def test_report_names_remedies_and_feeds_the_plan(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    warm_interpreter: WarmInterpreter,
) -> None:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))  # nothing is built there, and nothing will be
    monkeypatch.setenv("OMP_NUM_THREADS", "1,1")  # one number a level of nesting
    monkeypatch.setenv("PYTHONPATH", python_path(REPO))
    command = [warm_interpreter.python(), "-m", "ds_zo.cli", "report", "--json", "--model", "random:llama-tiny"]
    command += ["--layers", "random:llama-tiny", "--seq", "16"]
    written = subprocess.run(command, capture_output=True, text=True, check=True, cwd=REPO).stdout
    found = json.loads(written)  # in a process of its own: what DeepSpeed logs as it is imported goes elsewhere
    checks = {check["name"]: check for check in found["checks"]}
    assert {"GPU", "Triton", "locked memory", "host memory", "huge pages", "cores", "CPU Adam"} <= checks.keys()
    assert {"system", "container", "swap", "/dev/shm", "checkpoint disk", "TMPDIR", "CPU", "deepspeed"} <= checks.keys()
    assert checks["model"]["found"].startswith("random:llama-tiny: ")
    assert all(check["remedy"] for check in checks.values() if check["name"] == "GPU" and check["status"] == "warn")
    assert found["rates"]["cpu_adam_gparams"] > 0 and not list(tmp_path.iterdir())
    assert found["layers"]["num_layers"] == 2 and found["layers"]["seconds"]["cpu"]["forward"] > 0
    path = tmp_path / "rates.json"
    path.write_text(written)
    command = ["plan", "--model", "random:opt-tiny", "--seq", "32", "--backend", "zero-offload", "--json"]
    assert main([*command, "--rates", str(path)]) == 0
    planned = json.loads(capsys.readouterr().out)
    assert planned["rates"]["cpu_adam_gparams"] == found["rates"]["cpu_adam_gparams"]


def test_report_goes_on_after_what_is_broken(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "triton", SimpleNamespace())  # half of an installation
    monkeypatch.setattr(machine, "host_rates", lambda: 1 / 0)
    monkeypatch.setattr(machine, "profile_layers", lambda *args, **options: [][0])
    checks = {check.name: check for check in machine.inspect_machine(layers="random:opt-tiny").checks}
    assert checks["Triton"].found.startswith("installed and broken") and "ds-zo[gpu]" in checks["Triton"].remedy
    assert checks["CPU Adam"].found == "failed: division by zero"
    assert checks["layers"].found == "failed: list index out of range"
    assert main(["report", "--layers", "random:nope"]) == 1 and "unknown shape" in capsys.readouterr().err


def test_export_and_replay_say_what_is_asked_wrongly(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", "none", "out", "--shard-gb", "0"]) == 1
    assert "must be > 0 GB, got 0: name a larger one (--shard-gb)" in capsys.readouterr().err
    command = ["replay", "--base", "none", "--trajectory", "none", "--step", "1", "--out", "none"]
    assert main([*command, "--device", "gpu"]) == 1
    assert "got gpu: name one of them (--device)" in capsys.readouterr().err


def test_the_noise_kernel_can_be_timed_anywhere() -> None:
    assert noise_rate(torch.device("cpu"), numel=2**17)["noise_gdraws"] > 0
