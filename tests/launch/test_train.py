"""launch/train.py as a user runs it: from nothing, on files, resumed, and wrong."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch
from conftest import launcher_command
from huggingface_hub import constants
from tiny_models import tiny_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.recipes import RECIPES, Recipe
from ds_zo.config import backend_of
from ds_zo.planner.models import load_config
from ds_zo.tasks import TASKS, hub
from ds_zo.tasks.embedded_model import FOLDER

REPO = Path(__file__).resolve().parent.parent.parent
SCRIPT = REPO / "launch" / "train.py"
SGD = {"type": "SGD", "params": {"lr": 0.05}}
ZO = {"type": "ZO", "params": {"lr": 1e-3, "zo_eps": 1e-3}}
ADALOMO = {"type": "AdaLOMO", "params": {"lr": 1e-3, "accumulation": "sequential"}}


def write_config(folder: Path, optimizer: dict, **more: object) -> Path:
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_clipping": 0.0,
        "optimizer": optimizer,
        "scheduler": {
            "type": "WarmupCosineLR",
            "params": {"total_num_steps": 8, "warmup_num_steps": 2, "cos_min_ratio": 0.5},
        },
        **more,
    }
    path = folder / f"{optimizer['type']}.json"
    path.write_text(json.dumps(config))
    return path


Run = Callable[..., subprocess.CompletedProcess[str]]
Succeed = Callable[..., str]


def environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "MASTER_PORT")}


@pytest.fixture
def succeed(run_script: Run) -> Succeed:
    """What the script printed, run with these arguments."""

    def run(*arguments: object) -> str:
        done = run_script(SCRIPT, *arguments, cwd=REPO, env=environment())
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        return done.stdout

    return run


def weights(output: Path, name: str = "model") -> dict[str, torch.Tensor]:
    return AutoModelForCausalLM.from_pretrained(output / name, dtype=torch.float32).state_dict()


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", [SGD, ZO, ADALOMO], ids=["SGD", "ZO", "AdaLOMO"])
def test_resume_equals_uninterrupted(tmp_path: Path, succeed: Succeed, optimizer: dict) -> None:
    output = tmp_path / "out"
    config = write_config(tmp_path, optimizer, gradient_accumulation_steps=2)
    text = ["--task", "text", "--data", REPO / "README.md", "--max-length", 32]  # any step shows in perplexity
    arguments = ["--deepspeed", config, "--num-eval", 4, "--steps", 4, "--save-every", 2, "--output-dir", output, *text]
    succeed(*arguments)
    whole = weights(output)
    before = json.loads((output / "summary.json").read_text())["before"]
    (output / "checkpoints" / "latest").write_text("step2")
    succeed(*arguments, "--resume", "latest")
    resumed = weights(output)
    summary = json.loads((output / "summary.json").read_text())
    assert summary["steps"] == 4
    assert summary["before"] == before, "the model's score before any step, not that of the checkpoint"
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)
    start = weights(FOLDER.parent, "embedded")
    assert any(not torch.equal(whole[name], start[name]) for name in whole)


def test_launcher_and_summary(tmp_path: Path, free_port: int, succeed: Succeed) -> None:
    """In fresh interpreters, as the launcher starts them. Then as if it had been killed after step 3: the trajectory
    brings the checkpoint of step 2 there, and what was scored on the way is not forgotten."""
    launcher = [*launcher_command(), "--num_accelerators", "1", "--master_port", free_port]
    output = tmp_path / "out"
    config = write_config(tmp_path, ZO, ds_zo={"checkpoint": {"trajectory": True}})
    arguments = ["--deepspeed", config, "--steps", 3, "--eval-every", 2, "--num-eval", 8, "--output-dir", output]
    arguments += ["--save-every", 2]
    command = list(map(str, [*launcher, SCRIPT, *arguments]))
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    text = done.stdout
    summary = json.loads((output / "summary.json").read_text())
    assert summary["steps"] == 3 and summary["tokens_per_s"] > 0 and summary["metric"] == "accuracy"
    assert summary["peak_host_gb"] > 0.1
    assert re.search(r"loss \d\.\d{3}, [\d,]+ tokens/s, (GPU \d+\.\d GB, )?host \d+\.\d GB", done.stderr)
    assert "step 2: dev accuracy" in text and "model saved in" in text
    assert AutoTokenizer.from_pretrained(output / "model").eos_token == "<eos>"
    succeed(*arguments, "--resume", "latest")
    resumed = json.loads((output / "summary.json").read_text())
    assert [point["step"] for point in summary["curve"] if point["dev"]] == [2, 3]
    for name in ("steps", "curve", "best_step", "dev", "after", "train_s", "before", "model_folder"):
        assert resumed[name] == summary[name], name
    progress = json.loads((output / "checkpoints" / "progress.json").read_text())
    assert progress["step"] == 3 and not progress["group_by_length"]


def test_text_file_with_own_model(tmp_path: Path, succeed: Succeed) -> None:
    """A user's file and folder; ten steps of SGD on one repeated sentence lower its perplexity."""
    notes = tmp_path / "notes.txt"
    notes.write_text("\n\n".join(["The lazy dog sleeps under the warm yellow sun."] * 60))
    config = write_config(tmp_path, SGD)
    output = tmp_path / "out"
    common = ["--deepspeed", config, "--data", notes, "--model", FOLDER, "--max-length", 32, "--output-dir", output]
    succeed(*common, "--lr", 0.5, "--epochs", 1)
    summary = json.loads((output / "summary.json").read_text())
    assert summary["metric"] == "perplexity" and summary["task"] == "text"
    assert summary["after"] < summary["before"] / 2


@pytest.fixture(scope="module")
def script() -> ModuleType:
    """The script as a module: a mistake found before DeepSpeed starts needs no process of its own."""
    spec = importlib.util.spec_from_file_location("launch_train", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--task", "nope"], "looked for a task named 'nope': the tasks are"),
        (["--model", "./nope"], "looked for a model folder at ./nope: not found"),
        (["--model", "no/such-model"], "a folder named no/such-model, then a Hub model of that name"),
        (["--task", "sst2"], "task sst2 needs data"),
        (["--data", "nope.txt"], "looked for the text file nope.txt: not found"),
        (["--deepspeed", "nope.json"], "looked for a DeepSpeed JSON at nope.json: not found"),
        (["--resume", "nope"], "looked for a checkpoint in nope"),
    ],
)
def test_mistakes_say_what_was_looked_for(
    tmp_path: Path, script: ModuleType, monkeypatch: pytest.MonkeyPatch, arguments: list[str], message: str
) -> None:
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, os.environ.get(name, "0"))
    config = [] if "--deepspeed" in arguments else ["--deepspeed", str(write_config(tmp_path, SGD))]
    with pytest.raises(ValueError, match=re.escape(message)):
        script.run(script.parse_args([*config, *arguments, "--output-dir", str(tmp_path / "out")]))


def test_a_hub_name_out_of_reach_is_told_at_once(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, free_port: int
) -> None:
    """By the trainer and by `ds-zo plan`: transformers would try again for half a minute."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{free_port}")  # where nothing listens
    monkeypatch.setattr(hub, "getproxies", dict)
    for load in (
        lambda: script.load_model("no/such-model", dtype=torch.float32, lazily=False),
        lambda: load_config("no/such-model", seq=8),
    ):
        with pytest.raises(ValueError, match=r"no/such-model is not in the Hub's cache, and 127\.0\.0\.1 cannot be"):
            load()
    hub.check_reachable(str(FOLDER))


def test_a_folder_without_a_tokenizer_is_told(tmp_path: Path, script: ModuleType) -> None:
    tiny_model("llama").save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="it has no tokenizer, which `ds-zo export --tokenizer NAME` adds"):
        script.load_model(str(tmp_path), dtype=torch.float32, lazily=False)


def test_a_trained_base_is_told_from_its_adapters(script: ModuleType) -> None:
    """PEFT saves adapters alone; what `--train-base` trained is saved beside them, under the model's own names."""
    model = tiny_model("llama")
    plain = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    wrapped = script.add_lora(model, script.parse_args(["--lora-rank", "2", "--train-base"]))
    with torch.no_grad():
        for p in wrapped.parameters():
            assert p.requires_grad
            p.add_(1.0)
    found = script.base_weights(wrapped, wrapped.state_dict())
    assert found.keys() == plain.keys()
    assert all(torch.equal(found[name], plain[name] + 1.0) for name in plain)


def test_a_mistake_is_one_line_without_traceback(tmp_path: Path, run_script: Run) -> None:
    """Also one that is found when the engine is made."""
    arguments = ("--deepspeed", write_config(tmp_path, {"type": "LOMOO"}), "--skip-zero-shot")
    done = run_script(SCRIPT, *arguments, cwd=REPO, env=environment())
    assert done.returncode != 0
    assert 'got "LOMOO"; did you mean "LOMO"?' in done.stderr
    assert "Traceback" not in done.stderr


def test_lr_and_dtype_override_the_json(tmp_path: Path, script: ModuleType) -> None:
    schedule = {"type": "WarmupLR", "params": {"warmup_max_lr": 1.0}}
    path = write_config(tmp_path, SGD, bf16={"enabled": True}, scheduler=schedule)
    config = script.read_config(script.parse_args(["--deepspeed", str(path), "--lr", "0.25", "--dtype", "fp16"]))
    assert config["optimizer"]["params"]["lr"] == config["scheduler"]["params"]["warmup_max_lr"] == 0.25
    assert config["bf16"] == {"enabled": False} and config["fp16"] == {"enabled": True}


@pytest.mark.parametrize("name", ["zo", "lomo", "lsp", "zero_offload", "zero3"])
def test_a_shipped_json_is_adapted_to_the_embedded_model(
    name: str, script: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    """In one line, and in nothing but the parameters that it names and the dtype."""
    path = REPO / "ds_configs" / f"{name}.json"
    written = json.loads(path.read_text())
    [suited] = [params for shipped, params in script.EMBEDDED_PARAMS if shipped == written["optimizer"]]
    config = script.read_config(script.parse_args(["--deepspeed", str(path)]))
    [line] = capsys.readouterr().out.splitlines()
    assert line.startswith(
        f"the embedded model: lr {suited['lr']:g} instead of {written['optimizer']['params']['lr']:g}"
    )
    assert "float32 instead of bf16" in line and line.endswith(
        f"(to keep the JSON's: --lr {written['optimizer']['params']['lr']:g} --dtype bf16)"
    )
    assert config["optimizer"]["params"] == written["optimizer"]["params"] | suited
    assert config["bf16"] == {"enabled": False}
    assert {**config, "optimizer": 0, "bf16": 0} == {**written, "optimizer": 0, "bf16": 0}


def test_what_the_user_chose_is_not_adapted(
    tmp_path: Path, script: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    """A learning rate or dtype on the command line, another model, another optimizer section."""
    shipped = json.loads((REPO / "ds_configs" / "zo.json").read_text())
    own = tmp_path / "own.json"

    def read(config: dict, *arguments: str) -> tuple[float, bool, str]:
        own.write_text(json.dumps(config))
        found = script.read_config(script.parse_args(["--deepspeed", str(own), *arguments]))
        printed = capsys.readouterr().out
        return found["optimizer"]["params"]["lr"], found["bf16"]["enabled"], printed

    lr, bf16, printed = read(shipped)
    assert (lr, bf16) == (5e-4, False), "a copy of a shipped JSON, at any place"
    assert len(printed.splitlines()) == 1
    assert read(shipped, "--lr", "1e-6", "--dtype", "bf16") == (1e-6, True, "")
    lr, bf16, printed = read(shipped, "--dtype", "bf16")
    assert (lr, bf16) == (5e-4, True) and "float32" not in printed
    lr, bf16, printed = read(shipped, "--lr", "1e-4")
    assert (lr, bf16) == (1e-4, False) and "lr" not in printed.partition("(")[0]
    lr, _, printed = read(shipped, "--model", "facebook/opt-1.3b")
    assert lr == 1e-6 and "embedded" not in printed
    shipped["optimizer"]["params"]["lr"] = 2e-6
    lr, _, printed = read(shipped)
    assert lr == 2e-6 and "embedded" not in printed


@pytest.mark.slow
def test_gradient_checkpointing_changes_no_loss(tmp_path: Path, succeed: Succeed) -> None:
    config = write_config(tmp_path, {"type": "LOMO", "params": {"lr": 0.01}})
    losses = []
    for flags in ([], ["--gradient-checkpointing"]):
        output = tmp_path / f"out{len(flags)}"
        arguments = ["--deepspeed", config, "--steps", 2, "--num-eval", 4, "--output-dir", output, "--no-save"]
        succeed(*arguments, "--skip-zero-shot", *flags)
        losses.append([point["loss"] for point in json.loads((output / "summary.json").read_text())["curve"]])
    assert losses[0] == pytest.approx(losses[1], rel=1e-6) and losses[0][0] != losses[0][1]


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.file)
def test_the_commands_of_recipes_are_accepted(recipe: Recipe, script: ModuleType) -> None:
    launcher, path, *words = shlex.split(recipe.train_command)
    assert (launcher, path) == ("deepspeed", "launch/train.py")
    args = script.parse_args(words)
    assert args.deepspeed.is_absolute() or (REPO / args.deepspeed).is_file()
    needs_flag = backend_of(recipe.config) != "zo" and not recipe.offload
    assert args.task in TASKS and args.gradient_checkpointing == needs_flag


def test_help_names_every_task(script: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        script.parse_args(["--help"])
    text = capsys.readouterr().out
    for word in ("what to train", "how to train", "evaluating, saving, resuming", *TASKS):
        assert word in text


def test_counts_must_be_positive(script: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        script.parse_args(["--epochs", "0"])
    assert "--epochs must be positive, got 0" in capsys.readouterr().err


def test_regression_by_the_clock_with_a_row(tmp_path: Path, succeed: Succeed) -> None:
    """STS-B with a new head, padded on the left: training ends by time, and the best by dev is what is reported."""
    words = ["sun", "rain", "snow", "wind"]
    rows = [
        {"sentence1": f"The {a} came.", "sentence2": f"The {b} came.", "label": 5.0 if a == b else 0.0}
        for a in words
        for b in words
    ]
    for split in ("train", "dev", "test"):
        (tmp_path / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    results, output = tmp_path / "rows.jsonl", tmp_path / "out"
    config = write_config(tmp_path, {"type": "LOMO", "params": {"lr": 0.01}})
    arguments = ["--deepspeed", config, "--task", "stsb", "--head", "classifier", "--data-dir", tmp_path]
    arguments += ["--steps", 100_000, "--max-seconds", 1.5, "--eval-every", 20, "--padding-side", "left"]
    succeed(*arguments, "--results", results, "--output-dir", output, "--no-save", "--skip-zero-shot")
    (row,) = [json.loads(line) for line in results.read_text().splitlines()]
    assert row["metric"] == "pearson" and set(row["after_values"]) == {"pearson", "spearman"}
    assert 0 < row["steps"] < 100_000 and 1.5 <= row["train_s"] < 30
    scores = {point["step"]: point["dev"]["pearson"] for point in row["curve"] if point["dev"]}
    assert row["dev"] == max(scores.values()) == scores[row["best_step"]]
    assert not (output / "model").exists() and row["before"] is None
