"""The examples run as their own text says, offline, and leave a model that loads."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from transformers import AutoModelForCausalLM

REPO = Path(__file__).resolve().parents[2]
EXAMPLES = REPO / "launch" / "examples"
SAVED_IN = {"accelerate_loop": ".", "trainer": "model", "peft_lora": "adapter", "sft_trainer": "model"}
NEEDS = {"peft_lora": "peft", "sft_trainer": "trl"}


def environment() -> dict[str, str]:
    launchers = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    return {name: value for name, value in os.environ.items() if name not in launchers and "ACCELERATE" not in name}


def printed_by(done: subprocess.CompletedProcess[str]) -> str:
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    return done.stdout + done.stderr


def check_trained(printed: str) -> None:
    assert "ds_zo: backend zo" in printed, "the start-up summary says that our engine trained"
    assert re.search(r"accuracy \d+\.\d% before, accuracy \d+\.\d% after", printed)


@pytest.mark.slow
@pytest.mark.parametrize("name", SAVED_IN)
def test_example_trains_and_saves(
    name: str, tmp_path: Path, run_script: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    if name in NEEDS and importlib.util.find_spec(NEEDS[name]) is None:
        pytest.skip(f"{NEEDS[name]} is not installed")
    arguments = ("--steps", 2, "--output-dir", tmp_path)
    check_trained(printed_by(run_script(EXAMPLES / f"{name}.py", *arguments, cwd=REPO, env=environment())))
    model = AutoModelForCausalLM.from_pretrained(tmp_path / SAVED_IN[name])
    assert sum(p.numel() for p in model.parameters()) >= 984_192


@pytest.mark.slow
def test_accelerate_launch_on_two_ranks(tmp_path: Path, free_port: int) -> None:
    options = ("--use_deepspeed", "--num_processes", "2", "--num_machines", "1", "--mixed_precision", "no")
    options += ("--dynamo_backend", "no", "--deepspeed_config_file", "ds_configs/zo.json")
    launcher = [sys.executable, "-m", "accelerate.commands.launch", "--main_process_port", str(free_port), *options]
    command = [*launcher, str(EXAMPLES / "accelerate_loop.py"), "--steps", "2", "--output-dir", str(tmp_path)]
    done = subprocess.run(command, cwd=REPO, env=environment(), capture_output=True, text=True, timeout=300)
    printed = printed_by(done)
    check_trained(printed)
    assert len(re.findall("ds_zo: backend zo", printed)) == 1, "one rank speaks for all"


def test_examples_are_short_and_say_how_they_are_run() -> None:
    files = sorted(EXAMPLES.glob("*.py"))
    assert {path.stem for path in files} == {*SAVED_IN, "embedded"}
    for path in files:
        text = path.read_text(encoding="utf-8")
        assert len(text.splitlines()) < 80, path.name
        if path.stem != "embedded":
            assert f"python launch/examples/{path.name}" in text


@pytest.mark.parametrize("path", sorted((REPO / "ds_configs").glob("*.yaml")), ids=lambda path: path.name)
def test_accelerate_takes_the_yaml_and_finds_its_json(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By what `accelerate launch --config_file` does before it starts the script."""
    monkeypatch.chdir(REPO)
    command = ["--config_file", f"ds_configs/{path.name}", "launch/examples/accelerate_loop.py"]
    settings, _, _ = _validate_launch_command(launch_command_parser().parse_args(command))
    assert settings.use_deepspeed and settings.num_processes == 1
    assert (REPO / settings.deepspeed_config_file).is_file()
    assert " ".join(command) in path.read_text(encoding="utf-8")
