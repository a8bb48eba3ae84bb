"""The examples run as their own text says, offline, and leave a model that loads."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from transformers import AutoModelForCausalLM

from tests.helpers.warm_interpreter import WarmInterpreter

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


FEW = """
import runpy, sys
sys.path.insert(0, FOLDER)
import embedded
embedded.accuracy.__kwdefaults__["num_examples"] = 8
sys.argv[0] = FOLDER + "/NAME.py"
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def evaluated_on_few(name: str, folder: Path) -> Path:
    """A script that runs the example, which then evaluates on 8 test examples instead of 100."""
    script = folder / f"few_{name}.py"
    script.write_text(FEW.replace("FOLDER", repr(str(EXAMPLES))).replace("NAME", name))
    return script


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
    script = evaluated_on_few(name, tmp_path)
    check_trained(printed_by(run_script(script, *arguments, cwd=REPO, env=environment())))
    model = AutoModelForCausalLM.from_pretrained(tmp_path / SAVED_IN[name])
    assert sum(p.numel() for p in model.parameters()) >= 984_192


@pytest.mark.slow
def test_accelerate_launch_with_the_shipped_yaml_on_two_ranks(
    tmp_path: Path, free_port: int, warm_interpreter: WarmInterpreter
) -> None:
    """The YAML names launch/examples/zo.json. The other YAML differs from it in the JSON alone, which the plain run of
    the loop reads. The launcher and its ranks are forks of a warm process."""
    launcher = [warm_interpreter.python(), "-m", "accelerate.commands.launch", "--main_process_port", str(free_port)]
    launcher += ["--config_file", "ds_configs/accelerate_zo.yaml", "--num_processes", "2"]
    script, arguments = evaluated_on_few("accelerate_loop", tmp_path), ("--steps", 2, "--output-dir", tmp_path)
    command = [*launcher, str(script), *map(str, arguments)]
    printed = printed_by(
        subprocess.run(command, cwd=REPO, env=environment(), capture_output=True, text=True, timeout=240, check=False)
    )
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
def test_yaml_names_a_json_that_exists(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    settings = yaml.safe_load(text)
    assert settings["distributed_type"] == "DEEPSPEED"
    assert (REPO / settings["deepspeed_config"]["deepspeed_config_file"]).is_file()
    assert f"--config_file ds_configs/{path.name}" in text
