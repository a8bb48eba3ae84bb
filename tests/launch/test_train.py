"""`ds-zo train` and launch/train.py as a user runs them: from nothing, on files, resumed, and wrong."""

from __future__ import annotations

import json
import os
import re
import runpy
import shlex
import shutil
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from huggingface_hub import constants
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.recipes import RECIPES, Recipe
from ds_zo.cli import main
from ds_zo.config import backend_of, with_section_on_top
from ds_zo.planner.models import load_config
from ds_zo.tasks import TASKS, hub
from ds_zo.tasks.embedded_model import FOLDER
from ds_zo.training.arguments import CONFIGS, METHODS, parse_args
from ds_zo.training.job import run
from ds_zo.training.json_config import EMBEDDED_PARAMS, model_dtype, read_config
from ds_zo.training.model import add_lora, base_weights, load_model
from tests.helpers.tiny_models import tiny_model
from tests.helpers.warm_interpreter import WarmInterpreter

REPO = Path(__file__).resolve().parent.parent.parent
SCRIPT = REPO / "launch" / "train.py"
SGD = {"type": "SGD", "params": {"lr": 0.05}}
ZO = {"type": "ZO", "params": {"lr": 1e-3, "zo_eps": 1e-3}}


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


@pytest.fixture
def rank_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    """The job sets these variables where they are missing; they are restored after the test. The job does not end the
    process group, which other tests use."""
    monkeypatch.setattr("ds_zo.training.job.dist.destroy_process_group", lambda: None)
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, os.environ.get(name, "0"))


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


@pytest.mark.usefixtures("single_process")
@pytest.mark.parametrize(
    ("flag", "place", "message"),
    [
        ("--output-dir", "file/name", r"write to .*file.* got .*: name another folder \(--output-dir\)"),
        ("--results", "file/name", r"write to .*file.* got .*: name another folder \(--results\)"),
        ("--results", "", r"got Is a directory: name another file \(--results\)"),
    ],
)
def test_a_place_that_cannot_be_written_to_is_told_before_training(
    flag: str, place: str, message: str, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    words = ["--deepspeed", str(write_config(tmp_path, ZO)), "--steps", "1", "--num-eval", "2", "--skip-zero-shot"]
    words += ["--output-dir", str(tmp_path / "out"), flag, str(tmp_path / place)]
    with pytest.raises(ValueError, match=message):
        run(parse_args(words))
    assert not (tmp_path / "out" / "model").exists()


@pytest.mark.usefixtures("single_process")
def test_a_resumed_run_says_what_it_cannot_go_on_with(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Another learning rate, another batch size of groups, other rows, another number of rows to evaluate on, and
    another folder than that of the best model."""
    path = write_config(tmp_path, ZO)
    config = json.loads(path.read_text())
    del config["scheduler"]
    path.write_text(json.dumps(config))
    common = ["--deepspeed", str(path), "--skip-zero-shot", "--num-eval", "2", "--num-train", "16", "--lr", "1e-9"]
    common += ["--group-by-length", "--eval-every", "1"]
    first = tmp_path / "first"
    run(parse_args([*common, "--steps", "2", "--save-every", "2", "--output-dir", str(first)]))
    again = [*common, "--steps", "3", "--resume", str(first / "checkpoints"), "--output-dir", str(tmp_path / "other")]
    with pytest.raises(ValueError, match=r"which is 1e-09, got 1e-05: leave it out, .* \(--lr\)"):
        run(parse_args([*again, "--lr", "1e-5"]))
    with pytest.raises(ValueError, match=r"the checkpoint has 4, got 8 \(--batch-size\)"):
        run(parse_args([*again, "--batch-size", "8"]))
    with pytest.raises(ValueError, match=r"has 16 training examples of rows \w+, got 16 .*\(--data, .*--num-dev"):
        run(parse_args([*again, "--num-dev", "8"]))
    with pytest.raises(ValueError, match=r"the checkpoint has 2, got 3 \(--num-eval\)"):
        run(parse_args([*again, "--num-eval", "3"]))
    capsys.readouterr()
    summary = run(parse_args(again))
    assert summary is not None and summary.model_folder is None and not (tmp_path / "other" / "model").exists()
    printed = capsys.readouterr().out
    assert f"is not in {tmp_path / 'other' / 'model'}" in printed and "the best is elsewhere" in printed


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", [SGD, ZO], ids=["DeepSpeed's engine", "ours"])
def test_resume_equals_uninterrupted(tmp_path: Path, succeed: Succeed, optimizer: dict) -> None:
    """Every backend's checkpoints are resumed in tests/checkpoint."""
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


def test_launcher_and_summary(
    tmp_path: Path, free_port: int, succeed: Succeed, warm_interpreter: WarmInterpreter
) -> None:
    """Launcher and rank are forks of a warm process. Then as if it had been killed after step 3: the trajectory
    brings the checkpoint of step 2 there, and what was scored on the way is not forgotten."""
    launcher = [warm_interpreter.python(), "-m", "deepspeed.launcher.runner"]
    launcher += ["--num_accelerators", "1", "--master_port", str(free_port)]
    output = tmp_path / "out"
    config = write_config(tmp_path, ZO, ds_zo={"checkpoint": {"trajectory": True}})
    arguments = ["--deepspeed", config, "--steps", 3, "--eval-every", 2, "--num-eval", 8, "--output-dir", output]
    arguments += ["--save-every", 2]
    command = list(map(str, [*launcher, SCRIPT, *arguments]))
    extensions = tmp_path / "extensions"
    env = {**environment(), "TORCH_EXTENSIONS_DIR": str(extensions)}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert not extensions.exists(), "one process needs no compiled extension of DeepSpeed"
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


@pytest.mark.usefixtures("single_process")
def test_text_file_with_own_model(tmp_path: Path) -> None:
    """A user's file and folder; ten steps of SGD on one repeated sentence lower its perplexity."""
    notes = tmp_path / "notes.txt"
    notes.write_text("\n\n".join(["The lazy dog sleeps under the warm yellow sun."] * 60))
    config = write_config(tmp_path, SGD)
    output = tmp_path / "out"
    common = ["--deepspeed", config, "--data", notes, "--model", FOLDER, "--max-length", 32, "--output-dir", output]
    run(parse_args([*map(str, common), "--lr", "0.5", "--epochs", "1"]))
    summary = json.loads((output / "summary.json").read_text())
    assert summary["metric"] == "perplexity" and summary["task"] == "text"
    assert summary["after"] < summary["before"] / 2


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
@pytest.mark.usefixtures("rank_variables")
def test_mistakes_say_what_was_looked_for_in_one_line(tmp_path: Path, arguments: list[str], message: str) -> None:
    config = [] if "--deepspeed" in arguments else ["--deepspeed", str(write_config(tmp_path, SGD))]
    with pytest.raises(SystemExit) as exited:  # Python prints the message, and the status is 1
        main(["train", *config, *arguments, "--output-dir", str(tmp_path / "out")])
    said = str(exited.value.code)
    assert said.startswith("error: ") and message in said and "\n" not in said


def test_a_hub_name_out_of_reach_is_told_at_once(monkeypatch: pytest.MonkeyPatch, free_port: int) -> None:
    """By the trainer and by `ds-zo plan`: transformers would try again for half a minute."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{free_port}")  # where nothing listens
    monkeypatch.setattr(hub, "getproxies", dict)
    for load in (
        lambda: load_model("no/such-model", dtype=torch.float32, lazily=False),
        lambda: load_config("no/such-model", seq=8),
    ):
        with pytest.raises(ValueError, match=r"no/such-model is not in the Hub's cache, and 127\.0\.0\.1 cannot be"):
            load()
    hub.check_reachable(str(FOLDER))


def test_a_folder_without_a_tokenizer_is_told(tmp_path: Path) -> None:
    tiny_model("llama").save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="it has no tokenizer, which `ds-zo export --tokenizer NAME` adds"):
        load_model(str(tmp_path), dtype=torch.float32, lazily=False)


@pytest.mark.parametrize("lazily", [False, True])
def test_a_file_of_weights_that_is_cut_off_is_told(tmp_path: Path, lazily: bool) -> None:
    shutil.copytree(FOLDER, tmp_path / "cut")
    os.truncate(tmp_path / "cut" / "model.safetensors", 1000)
    with pytest.raises(ValueError, match=r"could not load .*looked for the folder .*cut: .*header.*\(--model\)"):
        load_model(str(tmp_path / "cut"), dtype=torch.float32, lazily=lazily)


def test_a_trained_base_is_told_from_its_adapters() -> None:
    """PEFT saves adapters alone; what `--train-base` trained is saved beside them, under the model's own names."""
    model = tiny_model("llama")
    plain = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    wrapped = add_lora(model, parse_args(["--lora-rank", "2", "--train-base"]))
    with torch.no_grad():
        for p in wrapped.parameters():
            assert p.requires_grad
            p.add_(1.0)
    found = base_weights(wrapped, wrapped.state_dict())
    assert found.keys() == plain.keys()
    assert all(torch.equal(found[name], plain[name] + 1.0) for name in plain)


def test_every_name_of_lora_targets_must_be_a_modules() -> None:
    """PEFT passes over a name that the model does not have, if it has another."""
    words = ["--lora-rank", "2", "--lora-targets"]
    wrapped = add_lora(tiny_model("llama"), parse_args([*words, "q_proj, v_proj"]))
    assert {name.split(".")[-2] for name, _ in wrapped.named_modules() if name.endswith(".lora_A")} == {
        "q_proj",
        "v_proj",
    }
    with pytest.raises(ValueError, match=r"no module named v_prj, proj: correct the names \(--lora-targets\)"):
        add_lora(tiny_model("llama"), parse_args([*words, "q_proj,v_prj,proj"]))


def test_a_mistake_is_one_line_without_traceback(tmp_path: Path, run_script: Run) -> None:
    """Also one that is found when the engine is made."""
    arguments = ("--deepspeed", write_config(tmp_path, {"type": "LOMOO"}), "--skip-zero-shot")
    done = run_script(SCRIPT, *arguments, cwd=REPO, env=environment())
    assert done.returncode != 0
    assert 'got "LOMOO"; did you mean "LOMO"?' in done.stderr
    assert "Traceback" not in done.stderr


def test_options_override_the_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    schedule = {"type": "WarmupLR", "params": {"warmup_max_lr": 1.0}}
    path = write_config(tmp_path, SGD, bf16={"enabled": True}, scheduler=schedule)
    words = ["--deepspeed", str(path), "--lr", "0.25", "--dtype", "fp16", "--batch-size", "3", "--method", "lsp"]
    config = read_config(parse_args(words))
    assert config["optimizer"]["params"]["lr"] == config["scheduler"]["params"]["warmup_max_lr"] == 0.25
    assert config["bf16"] == {"enabled": False} and config["fp16"] == {"enabled": True}
    assert config["train_micro_batch_size_per_gpu"] == 3
    assert capsys.readouterr().out == f"--deepspeed {path} overrides --method lsp\n"


@pytest.mark.parametrize("params", [{}, {"warmup_max_lr": 1.0}])
def test_options_override_keys_that_deepspeed_also_reads(tmp_path: Path, params: dict[str, float]) -> None:
    """The old name of bf16, and a scheduler that has a learning rate of its own where the JSON names none."""
    schedule = {"type": "WarmupDecayLR", "params": {"total_num_steps": 9, **params}}
    path = write_config(tmp_path, SGD, bfloat16={"enabled": True}, scheduler=schedule)
    config = read_config(parse_args(["--deepspeed", str(path), "--lr", "0.25", "--dtype", "fp32"]))
    assert config["scheduler"]["params"]["warmup_max_lr"] == 0.25
    assert config["bf16"] == {"enabled": False} and "bfloat16" not in config
    config = read_config(parse_args(["--deepspeed", str(path), "--dtype", "bf16"]))
    assert config["bf16"] == {"enabled": True} and model_dtype(config) == "bf16"


@pytest.mark.parametrize(
    ("kind", "params"),
    [
        ("OneCycle", {"cycle_min_lr": 0.1, "cycle_max_lr": 1.0}),
        ("OneCycleLR", {"max_lr": 1.0}),
        ("CyclicLR", {"base_lr": 0.1, "max_lr": 1.0}),
        ("LRRangeTest", {}),
    ],
)
def test_lr_is_refused_where_the_scheduler_replaces_it(tmp_path: Path, kind: str, params: dict[str, float]) -> None:
    path = write_config(tmp_path, SGD, scheduler={"type": kind, "params": params})
    with pytest.raises(ValueError, match=rf"scheduler {kind} does not use, got 0.25: set scheduler.params.\w+ in"):
        read_config(parse_args(["--deepspeed", str(path), "--lr", "0.25"]))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"bf16": True}, "bf16 must be an object, got true"),
        ({"optimizer": "ZO"}, 'optimizer must be an object, got "ZO"'),
        ({"scheduler": "WarmupLR"}, 'scheduler must be an object, got "WarmupLR"'),
        ({"optimizer": {}}, "training needs an optimizer, got none in"),
        ({"optimizer": {"type": "AdamW", "params": {"lr": "1e-3"}}}, "write 1e-3 without quotes"),
        ({"train_micro_batch_size_per_gpu": "4"}, "write 4 without quotes"),
        ({"train_micro_batch_size_per_gpu": "auto"}, "got it in train_micro_batch_size_per_gpu: write values in"),
        ({"train_micro_batch_size_per_gpu": None}, "training needs a batch size, got none in"),
        ({"train_batch_size": 6}, "got 6 with 4 x 1 x 1: leave train_batch_size out of"),
        ({"train_batch_size": 8, "gradient_accumulation_steps": 4}, "got 8 with 4 x 4 x 1"),
        ({"bf16": {"enabled": "auto"}}, "got it in bf16.enabled: write values in"),
        ({"optimizer": {"type": "AdamW", "params": {"lr": "auto"}}}, "got it in optimizer.params.lr: write values in"),
    ],
)
def test_a_json_that_deepspeed_fails_on_is_refused(tmp_path: Path, changes: dict[str, object], message: str) -> None:
    path = tmp_path / "wrong.json"
    path.write_text(json.dumps({"train_micro_batch_size_per_gpu": 4, "optimizer": SGD, **changes}))
    with pytest.raises(ValueError, match=re.escape(message)):
        read_config(parse_args(["--deepspeed", str(path)]))


def test_the_batch_size_goes_with_the_total_of_the_json(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_config(tmp_path, SGD, train_batch_size=24, gradient_accumulation_steps=3)
    with pytest.raises(ValueError, match=r"got 24 with 4 x 3 x 1: .*\(--batch-size\)"):
        read_config(parse_args(["--deepspeed", str(path)]))
    assert read_config(parse_args(["--deepspeed", str(path), "--batch-size", "8"]))["train_batch_size"] == 24
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert read_config(parse_args(["--deepspeed", str(path)]))["train_micro_batch_size_per_gpu"] == 4


def test_auto_is_accepted_where_it_is_replaced_or_means_the_default(tmp_path: Path) -> None:
    automatic = {"lr": "auto"}
    path = write_config(
        tmp_path,
        {"type": "AdamW", "params": automatic},
        train_micro_batch_size_per_gpu="auto",
        bf16={"enabled": "auto"},
        zero_optimization={"stage": 2, "reduce_bucket_size": "auto"},
    )
    words = ["--deepspeed", str(path), "--lr", "0.25", "--batch-size", "3", "--dtype", "fp32"]
    assert read_config(parse_args(words))["optimizer"]["params"] == {"lr": 0.25}
    path = write_config(tmp_path, {"type": "ZO", "params": {**automatic, "compute_dtype": "auto"}})
    assert read_config(parse_args(["--deepspeed", str(path)]))["optimizer"]["params"]["lr"] == "auto"


def test_a_key_that_stands_twice_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "twice.json"
    path.write_text('{"steps_per_print": 1, "steps_per_print": 2}')
    with pytest.raises(ValueError, match=r"without repeated keys: .*steps_per_print"):
        read_config(parse_args(["--deepspeed", str(path)]))


def test_the_jsons_of_methods_are_those_of_ds_configs() -> None:
    """AdaLOMO, which has no file there, has LOMO's settings, without the clipping that costs a second backward pass."""
    assert {path.name for path in CONFIGS.iterdir()} == set(METHODS.values())
    for name in set(METHODS.values()) - {"adalomo.json"}:
        assert (CONFIGS / name).read_bytes() == (REPO / "ds_configs" / name).read_bytes(), f"copy ds_configs/{name}"
    adalomo, lomo = (json.loads((CONFIGS / f"{name}.json").read_text()) for name in ("adalomo", "lomo"))
    recipe = json.loads((REPO / "ds_configs" / "adalomo_7b_24gb.json").read_text())
    assert adalomo == {**lomo, "optimizer": recipe["optimizer"], "gradient_clipping": 0.0}


def test_every_shipped_json_is_read() -> None:
    """Also with the ds_zo section inside zero_optimization."""
    for path in REPO.glob("ds_configs/*.json"):
        config = read_config(parse_args(["--deepspeed", str(path), "--model", "a/b", "--dtype", "fp32"]))
        assert "ds_zo" not in config["zero_optimization"], path


def test_the_method_adapter_trains_lora() -> None:
    args = parse_args(["--method", "adapter"])
    assert (args.lora_rank, args.lora_targets) == (16, "all-linear")
    assert parse_args(["--method", "adapter", "--lora-rank", "4", "--lora-targets", "v_proj"]).lora_targets == "v_proj"
    assert parse_args([]).lora_rank is None and parse_args(["--lora-rank", "4"]).lora_targets == "q_proj,v_proj"


@pytest.mark.parametrize("method", METHODS)
def test_a_shipped_json_is_adapted_to_the_embedded_model(method: str, capsys: pytest.CaptureFixture[str]) -> None:
    """In one line, and in nothing but the parameters that it names and the dtype."""
    written = with_section_on_top(json.loads((CONFIGS / METHODS[method]).read_text()))
    [suited] = [params for shipped, params in EMBEDDED_PARAMS if shipped == written["optimizer"]]
    config = read_config(parse_args(["--method", method]))
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


def test_what_the_user_chose_is_not_adapted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A learning rate or dtype on the command line, another model, another optimizer section."""
    shipped = json.loads((REPO / "ds_configs" / "zo.json").read_text())
    own = tmp_path / "own.json"

    def read(config: dict, *arguments: str) -> tuple[float, bool, str]:
        own.write_text(json.dumps(config))
        found = read_config(parse_args(["--deepspeed", str(own), *arguments]))
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


@pytest.mark.usefixtures("single_process")
def test_gradient_checkpointing_changes_no_loss(tmp_path: Path) -> None:
    config = write_config(tmp_path, {"type": "LOMO", "params": {"lr": 0.01}})
    losses = []
    for flags in ([], ["--gradient-checkpointing"]):
        output = tmp_path / f"out{len(flags)}"
        arguments = ["--deepspeed", config, "--steps", 2, "--num-eval", 4, "--output-dir", output, "--no-save"]
        run(parse_args([*map(str, arguments), "--skip-zero-shot", *flags]))
        losses.append([point["loss"] for point in json.loads((output / "summary.json").read_text())["curve"]])
    assert losses[0] == pytest.approx(losses[1], rel=1e-6) and losses[0][0] != losses[0][1]


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.file)
def test_the_commands_of_recipes_are_accepted(recipe: Recipe) -> None:
    launcher, path, *words = shlex.split(recipe.train_command)
    assert (launcher, path) == ("deepspeed", "launch/train.py")
    args = parse_args(words)
    assert args.deepspeed.is_absolute() or (REPO / args.deepspeed).is_file()
    needs_flag = backend_of(recipe.config) != "zo" and not recipe.offload
    assert args.task in TASKS and args.gradient_checkpointing == needs_flag


def test_help_names_every_task(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_args(["--help"])
    text = capsys.readouterr().out
    for word in ("what to train", "how to train", "evaluating, saving, resuming", *TASKS):
        assert word in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--epochs", "0"], "--epochs must be positive and finite, got 0"),
        (["--epochs", "nan"], "--epochs must be positive and finite, got nan"),
        (["--max-seconds", "inf"], "--max-seconds must be positive and finite, got inf"),
        (["--eval-every", "-5"], "--eval-every must be finite and not negative, got -5"),
        (["--save-every", "-5"], "--save-every must be finite and not negative, got -5"),
        (["--method", "adamw", "--lr", "-1"], "--lr must be finite and not negative, got -1"),
        (["--method", "adamw", "--lr", "nan"], "--lr must be finite and not negative, got nan"),
        (["--seed", str(2**43)], f"--seed must be from -{2**42} to {2**42}, got {2**43}"),
        (["--lora-rank", "2", "--lora-alpha", "nan"], "--lora-alpha must be positive and finite, got nan"),
        (["--lora-alpha", "32"], "--lora-alpha is a setting of LoRA adapters: it needs --lora-rank"),
        (["--lora-targets", "all-linear"], "--lora-targets is a setting of LoRA adapters: it needs --lora-rank"),
    ],
)
def test_options_that_cannot_work_are_refused(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parse_args(arguments)
    assert message in capsys.readouterr().err


@pytest.mark.usefixtures("single_process")
def test_regression_by_the_clock_with_a_row(tmp_path: Path) -> None:
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
    arguments += ["--results", results, "--output-dir", output, "--no-save", "--skip-zero-shot"]
    run(parse_args([*map(str, arguments)]))
    (row,) = [json.loads(line) for line in results.read_text().splitlines()]
    assert row["metric"] == "pearson" and set(row["after_values"]) == {"pearson", "spearman"}
    assert 0 < row["steps"] < 100_000 and 1.5 <= row["train_s"] < 30
    scores = {point["step"]: point["dev"]["pearson"] for point in row["curve"] if point["dev"]}
    assert row["dev"] == max(scores.values()) == scores[row["best_step"]]
    assert not (output / "model").exists() and row["before"] is None


# The command of the installed package

COMMAND = """
import sys
from ds_zo.cli import main
sys.exit(main(["train", *sys.argv[1:]]))
"""
INTERRUPTED = """
import os, pathlib, signal, sys, threading, time
from ds_zo.cli import main

def interrupt():
    while not pathlib.Path("out/checkpoints/latest").exists():
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGINT)

threading.Thread(target=interrupt, daemon=True).start()
main(["train", "--method", "lomo", "--steps", "100000", "--save-every", "1", "--skip-zero-shot", "--output-dir", "out"])
"""
VARYING = {"config", "train_s", "tokens_per_s", "peak_host_gb", "curve", "model_folder"}


def test_the_command_and_the_script_make_the_same_row(tmp_path: Path, run_script: Run, succeed: Succeed) -> None:
    """The command from its own JSONs, in a folder of the user; the script by ds_configs, in the repository."""
    common = ["--steps", 3, "--num-eval", 4, "--max-length", 32]
    (tmp_path / "command.py").write_text(COMMAND)
    done = run_script(tmp_path / "command.py", "--method", "adamw", *common, cwd=tmp_path, env=environment())
    assert done.returncode == 0, done.stderr[-3000:]
    succeed("--deepspeed", "ds_configs/zero_offload.json", *common, "--output-dir", tmp_path / "script")
    folders = [tmp_path / "runs" / "zero_offload-code_or_text", tmp_path / "script"]
    rows = [json.loads((folder / "summary.json").read_text()) for folder in folders]
    assert [point["loss"] for point in rows[0]["curve"]] == [point["loss"] for point in rows[1]["curve"]]
    assert {k: v for k, v in rows[0].items() if k not in VARYING} == {
        k: v for k, v in rows[1].items() if k not in VARYING
    }
    assert rows[0]["optimizer"] == "AdamW" and rows[0]["steps"] == 3
    command, script = (weights(folder) for folder in folders)
    assert all(torch.equal(command[name], script[name]) for name in command)


def test_ctrl_c_is_one_line(tmp_path: Path, run_script: Run) -> None:
    (tmp_path / "interrupted.py").write_text(INTERRUPTED)
    done = run_script(tmp_path / "interrupted.py", cwd=tmp_path, env=environment(), timeout_s=120)
    assert done.returncode == 130
    assert done.stderr.splitlines()[-1].startswith("error: stopped by Ctrl-C; --resume latest goes on")
    assert "Traceback" not in done.stderr


SECOND_RUN = """
import os, pathlib, signal, sys, threading, time
from ds_zo.cli import main
from ds_zo.training.arguments import parse_args
from ds_zo.training.job import run

words = ["--method", "lomo", "--save-every", "1", "--skip-zero-shot", "--num-eval", "2", "--output-dir", "out"]

def begin_another():
    while not pathlib.Path("out/checkpoints/latest").exists():
        time.sleep(0.01)
    try:
        run(parse_args(words))
    except ValueError as error:
        pathlib.Path("refusal").write_text(str(error))
    os.kill(os.getpid(), signal.SIGKILL)

threading.Thread(target=begin_another, daemon=True).start()
main(["train", *words, "--steps", "100000"])
"""


def test_one_run_at_a_time_writes_to_a_folder(tmp_path: Path, run_script: Run) -> None:
    """A second run is refused while the first trains. After a kill the next run resumes in that folder."""
    (tmp_path / "second.py").write_text(SECOND_RUN)
    done = run_script(tmp_path / "second.py", cwd=tmp_path, env=environment(), timeout_s=120)
    assert done.returncode == -signal.SIGKILL, done.stderr[-3000:]
    refusal = (tmp_path / "refusal").read_text()
    assert re.search(r"got out, where process \d+ of \S+ writes: .* \(--output-dir\)$", refusal), refusal
    (tmp_path / "resumed.py").write_text(COMMAND)
    step = int((tmp_path / "out" / "checkpoints" / "latest").read_text().removeprefix("step"))
    words = ["--method", "lomo", "--steps", step + 1, "--num-eval", 2, "--output-dir", "out", "--resume", "latest"]
    done = run_script(tmp_path / "resumed.py", *words, cwd=tmp_path, env=environment())
    assert done.returncode == 0, done.stderr[-3000:]


CLOSED_PIPE = """
import os, sys

read, write = os.pipe()
os.dup2(write, 1)
os.close(read)
from ds_zo.cli import main

main(["train", "--steps", "1", "--num-eval", "2", "--no-save"])
"""


def test_a_closed_pipe_is_one_line(tmp_path: Path, run_script: Run) -> None:
    """As `ds-zo train | head -1` closes it."""
    (tmp_path / "closed.py").write_text(CLOSED_PIPE)
    done = run_script(tmp_path / "closed.py", cwd=tmp_path, env=environment(), timeout_s=120)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("error: the reader of the output has closed it")
    assert "Traceback" not in done.stderr and "BrokenPipe" not in done.stderr


@pytest.mark.usefixtures("rank_variables")
def test_an_unexpected_error_keeps_its_traceback(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "task.py").write_text("int('x')")
    with pytest.raises(SystemExit, match="1"):
        main(["train", "--task-file", str(tmp_path / "task.py")])
    shown = capsys.readouterr().err
    assert "Traceback" in shown and "task.py" in shown and "ValueError" in shown


@pytest.mark.usefixtures("rank_variables")
def test_the_module_takes_what_the_launcher_adds(monkeypatch: pytest.MonkeyPatch) -> None:
    """As `deepspeed --module ds_zo.training --task nope` starts a rank."""
    monkeypatch.setattr("sys.argv", ["ds_zo.training", "--local_rank=0", "--task", "nope"])
    with pytest.raises(SystemExit, match="error: looked for a task named 'nope'"):
        runpy.run_module("ds_zo.training", run_name="__main__")


def test_help_has_examples(capsys: pytest.CaptureFixture[str]) -> None:
    """Each example of the help is accepted, less its file and its model, which are the reader's."""
    with pytest.raises(SystemExit):
        main(["train", "--help"])
    examples = re.findall(r"^    (?:ds-zo train|deepspeed --module ds_zo.training)(.*)$", capsys.readouterr().out, re.M)
    assert len(examples) == 6
    for words in examples:
        assert parse_args(shlex.split(words)).task in TASKS
