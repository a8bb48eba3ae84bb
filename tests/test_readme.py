"""What the README shows is run: its scripts as they stand, its commands against the files they name."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import socket
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from conftest import python_path
from safetensors.torch import load_file

from ds_zo.cli import main
from ds_zo.config import backend_of, resolve

REPO = Path(__file__).parents[1]
README = (REPO / "README.md").read_text(encoding="utf-8")


def fences(language: str, text: str = README) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", text, flags=re.DOTALL | re.MULTILINE)


Run = Callable[..., subprocess.CompletedProcess[str]]


def run_source(source: str, folder: Path, run_script: Run) -> subprocess.CompletedProcess[str]:
    """As one rank, in the environment that the deepspeed launcher gives it, in a folder with the JSON that it names."""
    (folder / "launch" / "examples").mkdir(parents=True, exist_ok=True)
    shutil.copy(REPO / "launch" / "examples" / "zo.json", folder / "launch" / "examples")
    script = folder / "finetune.py"
    script.write_text(source, encoding="utf-8")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    ranks = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    env = {**os.environ, **ranks, "HF_HUB_OFFLINE": "1", "PYTHONPATH": python_path(REPO), "OMP_NUM_THREADS": "1"}
    return run_script(script, cwd=folder, env=env)


PARTS = ["deepspeed", "lora", "streamed", "accelerate", "trainer", "checkpoints"]
SCRIPTS = dict(zip(PARTS, fences("python"), strict=True))
JSONS = dict(zip(["before", "after", "LOMO", "AdaLOMO", "LoRA", "LSP"], fences("json"), strict=True))
LORA, CHECKPOINTS = SCRIPTS.pop("lora"), SCRIPTS.pop("checkpoints")
"""Lines for the first script: before its engine is made, and instead of all from there on."""
USED_OUR_ENGINE = """
import gc
from ds_zo.plugin.engine import PluginEngine
assert any(type(thing) is PluginEngine for thing in gc.get_objects())
"""


@pytest.mark.slow
@pytest.mark.parametrize("name", SCRIPTS)
def test_script_trains_offline(name: str, tmp_path: Path, run_script: Run) -> None:
    done = run_source(SCRIPTS[name] + USED_OUR_ENGINE, tmp_path, run_script)
    assert done.returncode == 0, done.stderr[-3000:]
    loss = re.findall(r"(?:^loss )?(\d+\.\d+)$", done.stdout, flags=re.MULTILINE)[-1]
    assert 0 < float(loss) < 8, "a pretrained model predicts better than a uniform choice among a few thousand tokens"


MOVED = """
moved = {name for name, p in model.named_parameters() if not torch.equal(p.cpu(), before[name])}
print(engine.resolved.backend, bool(moved), any("lora_B" in n for n in moved), any("base_layer" in n for n in moved))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("LOMO", "lomo True False False"),
        ("AdaLOMO", "adalomo True False False"),
        ("LoRA", "lomo True True True"),
        ("LSP", "lsp True False False"),
    ],
)
def test_the_first_script_trains_by_the_json_of(name: str, expected: str, tmp_path: Path, run_script: Run) -> None:
    if name == "LoRA":
        pytest.importorskip("peft")
    (tmp_path / "changed.json").write_text(JSONS[name], encoding="utf-8")
    head, made, rest = SCRIPTS["deepspeed"].replace("launch/examples/zo.json", "changed.json").partition("engine, *_ =")
    keep = "import torch\nbefore = {name: p.detach().clone() for name, p in model.named_parameters()}\n"
    lines = [head, LORA if name == "LoRA" else "", keep, made, rest, MOVED]
    done = run_source("".join(lines), tmp_path, run_script)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.splitlines()[-1] == expected


@pytest.mark.slow
def test_checkpoints_resume_export_and_replay_as_shown(
    tmp_path: Path, run_script: Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    head = SCRIPTS["deepspeed"].partition("engine, *_ =")[0]
    last = "print(engine.global_steps, [p.double().sum().item() for p in model.parameters()])\n"
    first, again = (run_source(head + CHECKPOINTS + last, tmp_path, run_script) for _ in range(2))
    assert (first.returncode, again.returncode) == (0, 0), (first.stderr + again.stderr)[-3000:]
    assert first.stdout.splitlines()[-1] == again.stdout.splitlines()[-1]
    assert "2 steps after the checkpoint were recorded" in again.stdout + again.stderr

    (tmp_path / "ds_zo").symlink_to(REPO / "ds_zo")
    monkeypatch.chdir(tmp_path)
    shown = [line for block in fences("bash") for line in block.splitlines()]
    commands = [shlex.split(line, comments=True)[1:] for line in shown if re.match("ds-zo (export|replay) ", line)]
    assert [main(command) for command in commands] == [0, 0]
    on_gpu = torch.cuda.is_available()  # where the run's hashes are: the commands as shown replay on the CPU
    assert ("its hash is the recorded one" in capsys.readouterr().out) != on_gpu
    exported, replayed = (load_file(tmp_path / "runs" / name / "model.safetensors") for name in ("exported", "step8"))
    assert exported.keys() == replayed.keys()
    for name, value in exported.items():
        torch.testing.assert_close(value, replayed[name], rtol=0, atol=1e-5 if on_gpu else 0, msg=name)


@pytest.mark.slow
def test_without_the_import_deepspeed_says_what_the_readme_quotes(tmp_path: Path, run_script: Run) -> None:
    script = SCRIPTS["deepspeed"]
    folder = str(REPO / "ds_zo" / "tasks" / "embedded")
    bare = re.sub(r"^import ds_zo.*\n", "", script, flags=re.MULTILINE).replace("ds_zo.EMBEDDED_MODEL", repr(folder))
    assert "ds_zo" not in bare.replace(folder, "")
    done = run_source(bare, tmp_path, run_script)
    quoted = re.search(r"stops with\s+`([^`]+)`", README)
    assert quoted is not None
    assert done.returncode != 0
    assert quoted[1] in done.stderr


def test_edit_changes_the_optimizer_alone() -> None:
    before, after = (json.loads(JSONS[name]) for name in ("before", "after"))
    assert backend_of(before) is None
    assert resolve(after).backend == "zo"
    assert {**before, "optimizer": None} == {**after, "optimizer": None}
    type_alone = {**before, "optimizer": {**before["optimizer"], "type": "ZO"}}
    assert resolve(type_alone).backend == "zo", "the README says that changing the type is enough"
    assert "optimizer.params.betas" in resolve(type_alone).ignored


def test_commands_name_files_that_exist() -> None:
    commands = [
        line.split("#")[0].split()
        for name in ("README.md", "CONTRIBUTING.md")
        for block in fences("bash", (REPO / name).read_text(encoding="utf-8"))
        for line in block.splitlines()
    ]
    files = {word for command in commands for word in command if re.fullmatch(r"[\w/]+\.(sh|py|json|txt)", word)}
    assert {"launch/quickstart.sh", "launch/test.sh", "launch/train.py", "ds_configs/zo.json"} <= files
    assert [name for name in sorted(files) if not (REPO / name).exists()] == []


def test_the_plan_is_made_as_shown(capsys: pytest.CaptureFixture[str]) -> None:
    shown = [line for block in fences("bash") for line in block.splitlines() if line.startswith("ds-zo plan ")]
    assert shown
    for line in shown:
        assert main(shlex.split(line)[1:]) == 0
        assert "zo" in capsys.readouterr().out


PAGES = [
    *REPO.glob("*.md"),
    *(path for folder in ("docs", "ds_configs", "ds_zo") for path in (REPO / folder).rglob("*.md")),
]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(REPO)))
def test_links_and_paths_lead_somewhere(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    links = {link for link in re.findall(r"\]\(([^)]+)\)", text) if "://" not in link}
    for file, _, anchor in (link.partition("#") for link in sorted(links)):
        target = page.parent / file if file else page
        assert target.exists(), file
        assert not anchor or anchor in anchors_of(target), f"{file}#{anchor}"
    paths = re.findall(r"`((?:ds_zo|ds_configs|launch|tests)/[\w./-]+)`", text)
    assert [path for path in paths if not (REPO / path).exists()] == []


def anchors_of(page: Path) -> set[str]:
    heads = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {re.sub(r"[^\w -]", "", head.lower()).replace(" ", "-") for head in heads}
