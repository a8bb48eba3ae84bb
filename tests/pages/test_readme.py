"""Code that the README and the pages show is run, or is marked as what cannot run here and checked for its syntax.

A comment on the line before a fence says how it is checked:

- `<!-- script: NAME -->`: a test runs this Python script as it stands.
- `<!-- part: NAME -->`: lines for the script `deepspeed`; a test puts them there and runs the result.
- `<!-- json: NAME -->`: a test trains by this JSON, or compares it with another.
- `<!-- needs: WHAT -->`: the block needs WHAT, such as a GPU; its syntax, files and options are checked.
- `<!-- edit: JSON -->`: a diff of a JSON; a test reads both sides.
- `<!-- fragment: WHY -->`: the block is not a whole file.

A Python block without a comment fails. A line of a bash block without a comment is run here, or by the test that
`RUN_BY` names.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import re
import shlex
import shutil
import socket
import subprocess
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import yaml
from safetensors.torch import load_file

from benchmarks.recipes import RECIPES
from ds_zo.cli import main
from ds_zo.config import backend_of, resolve
from tests.helpers.processes import REPO, python_path

PAGES = [REPO / "README.md", *sorted((REPO / "docs").glob("*.md"))]
"""The pages whose code is checked."""


class Fence(NamedTuple):
    """One code block of a page."""

    page: str
    language: str
    mark: str
    """The comment before the block: script, part, json, edit, needs, fragment; empty: no comment."""
    name: str
    """The text after the comment's colon."""
    code: str

    @property
    def lines(self) -> list[str]:
        """The commands of a bash block, each on one line, without comments."""
        code = re.sub(r" \\\n +", " ", self.code)
        return [line for line in code.splitlines() if line.strip() and not line.startswith("#")]


def fences_of(page: Path) -> list[Fence]:
    """All code blocks of a page, also indented ones of lists."""
    mark = r"(?:^ *<!-- (?P<mark>\w+): (?P<name>[^>]*?) -->\n)?"
    form = mark + r"^(?P<indent> *)```(?P<language>\w*)[^\n]*\n(?P<code>.*?)^(?P=indent)```$"
    found = re.finditer(form, page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    where = str(page.relative_to(REPO))
    return [Fence(where, m["language"], m["mark"] or "", m["name"] or "", m["code"]) for m in found]


FENCES = [fence for page in PAGES for fence in fences_of(page)]


def marked(mark: str) -> dict[str, str]:
    """Code by name, of the blocks with this comment."""
    return {fence.name: fence.code for fence in FENCES if fence.mark == mark}


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


SCRIPTS, JSONS, PARTS = marked("script"), marked("json"), marked("part")
LORA, CHECKPOINTS = PARTS["lora"], PARTS["checkpoints"]
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
    commands = [shlex.split(line, comments=True)[1:] for line in COMMANDS if re.match("ds-zo (export|replay) ", line)]
    assert [main(command) for command in commands] == [0, 0]
    on_gpu = torch.cuda.is_available()  # where the run's hashes are: the commands as shown replay on the CPU
    assert ("its hash is the recorded one" in capsys.readouterr().out) != on_gpu
    exported, replayed = (load_file(tmp_path / "runs" / name / "model.safetensors") for name in ("exported", "step8"))
    assert exported.keys() == replayed.keys()
    for name, value in exported.items():
        torch.testing.assert_close(value, replayed[name], rtol=0, atol=1e-5 if on_gpu else 0, msg=name)


@pytest.mark.slow
def test_without_the_import_deepspeed_says_what_the_pages_quote(tmp_path: Path, run_script: Run) -> None:
    script = SCRIPTS["deepspeed"]
    folder = str(REPO / "ds_zo" / "tasks" / "embedded")
    bare = re.sub(r"^import ds_zo.*\n", "", script, flags=re.MULTILINE).replace("ds_zo.EMBEDDED_MODEL", repr(folder))
    assert "ds_zo" not in bare.replace(folder, "")
    done = run_source(bare, tmp_path, run_script)
    quoted = re.search(r"stops with\s+`([^`]+)`", (REPO / "docs" / "index.md").read_text(encoding="utf-8"))
    assert quoted is not None
    assert done.returncode != 0
    assert quoted[1] in done.stderr


def test_edit_changes_the_optimizer_alone() -> None:
    before, after = (json.loads(JSONS[name]) for name in ("before", "after"))
    assert backend_of(before) is None
    assert resolve(after).backend == "zo"
    assert {**before, "optimizer": None} == {**after, "optimizer": None}
    type_alone = {**before, "optimizer": {**before["optimizer"], "type": "ZO"}}
    assert resolve(type_alone).backend == "zo", "the page says that changing the type is enough"
    assert "optimizer.params.betas" in resolve(type_alone).ignored


def test_both_sides_of_the_readmes_edit_are_jsons() -> None:
    lines = marked("edit")["JSON"].splitlines()
    sides = ("\n".join(line[1:] for line in lines if not line.startswith(other)) for other in "+-")
    before, after = (json.loads("{" + side + "}") for side in sides)
    assert backend_of(before) is None
    found = resolve({"train_micro_batch_size_per_gpu": 1, **after})
    assert (found.backend, found.ignored) == (
        "adalomo",
        ("zero_optimization.stage", "zero_optimization.offload_optimizer"),
    )
    assert {**before, "optimizer": None, "gradient_clipping": 0} == {**after, "optimizer": None}


RUN_BY = {
    "deepspeed launch/train.py --deepspeed ds_configs/zo.json": "tests/launch/test_train.py",
    "accelerate launch --config_file ds_configs/accelerate_zo.yaml": "tests/launch/test_examples.py",
    "python launch/compare.py --model random:llama-tiny": "tests/bench/test_compare.py",
    "python -m benchmarks.pages": "tests/pages/test_docs_figures.py",
    "python tools/draw_docs.py": "tests/pages/test_docs_figures.py",
    "ds-zo train": "tests/launch/test_train.py",
    "ds-zo export": "tests/pages/test_readme.py",
    "ds-zo replay": "tests/pages/test_readme.py",
    "ds-zo plan": "tests/pages/test_readme.py",
    "ds-zo run -- accelerate launch": "tools/check_autoload.py",
    "ds-zo run --check": "tests/test_autoload.py",
    "ds-zo autoload status": "tests/test_autoload.py",
    "ds-zo convert": "tests/pages/test_readme.py",
}
"""The test that runs a command, by the command's beginning."""
TAKES_LONG = ("python launch/compare.py --report-only",)
"""Beginnings of commands in generated parts of pages, which carry no comment. Their files are checked."""
COMMANDS = [
    line
    for fence in FENCES
    if fence.language == "bash" and not fence.mark
    for line in fence.lines
    if not line.startswith(TAKES_LONG)
]
"""Command lines that a test runs."""


def test_every_block_is_run_or_says_why_not() -> None:
    for fence in FENCES:
        where = f"{fence.page}: {fence.code[:80]!r}"
        assert fence.mark in ("", "script", "part", "json", "edit", "needs", "fragment"), where
        if fence.language == "python":
            ast.parse(fence.code)
            assert fence.mark in ("script", "part", "needs"), f"{where} is neither run nor marked"
        elif fence.language == "json":
            found = json.loads(fence.code)
            if fence.mark != "fragment" and backend_of(found) is not None:
                assert resolve(found).backend, where
        elif fence.language == "bash":
            done = subprocess.run(
                ["bash", "-n"], input=fence.code, capture_output=True, text=True, timeout=20, check=False
            )
            assert done.returncode == 0, f"{where}: {done.stderr}"
        else:
            assert fence.language in ("", "text", "diff", "mermaid", "yaml", "dockerfile", "ini"), where
    names = [(fence.mark, fence.name) for fence in FENCES if fence.mark in ("script", "part", "json")]
    assert len(names) == len(set(names)), "two blocks have one name"
    tried = {"before", "after", "LOMO", "AdaLOMO", "LoRA", "LSP"}
    assert (set(PARTS), set(JSONS)) == ({"lora", "checkpoints"}, tried), "a test below trains by each of them"


@pytest.mark.parametrize("line", COMMANDS)
def test_a_test_runs_the_command(line: str) -> None:
    by = [file for start, file in RUN_BY.items() if line.startswith(start)]
    assert by, f"{line!r} is neither run nor marked"
    script = next((word for word in line.split() if re.fullmatch(r"(?:launch|tools)/[\w/]+\.py", word)), "")
    assert Path(script).stem in (REPO / by[0]).read_text(encoding="utf-8")


def test_commands_name_files_and_options_that_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    parse = argparse.ArgumentParser.parse_args

    def parse_alone(parser: argparse.ArgumentParser, words: list[str]) -> argparse.Namespace:
        found = parse(parser, words)  # exits if an option is unknown
        found.run = lambda _: None
        return found

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse_alone)
    extra = fences_of(REPO / "CONTRIBUTING.md")
    lines = [line for fence in [*FENCES, *extra] if fence.language == "bash" for line in fence.lines]
    commands = [shlex.split(line, comments=True) for line in lines]
    files = {word for command in commands for word in command if re.fullmatch(r"[\w/]+\.(sh|py|json|txt|yaml)", word)}
    assert {"launch/quickstart.sh", "launch/test.sh", "launch/train.py", "ds_configs/zo.json"} <= files
    made = {command[i + 1] for command in commands for i, word in enumerate(command[:-1]) if word == ">"}
    made |= {fence.name.split()[-1] for fence in FENCES if fence.mark == "fragment"}  # the page shows the file
    assert [name for name in sorted(files - made) if not (REPO / name).exists()] == []
    for command in commands:
        if command[0] == "ds-zo":
            words = command[1 : command.index(">")] if ">" in command else command[1:]
            assert main(words) == 0


@pytest.mark.usefixtures("models_are_traced_once")
def test_the_plan_is_made_as_shown(capsys: pytest.CaptureFixture[str]) -> None:
    """Those of recipes are made by tests/benchmarks/test_recipes.py."""
    of_recipes = {recipe.plan_command for recipe in RECIPES}
    shown = {line for line in COMMANDS if line.startswith("ds-zo plan ")}
    assert shown - of_recipes and of_recipes < shown
    shown -= of_recipes
    printed = ""
    for line in sorted(shown):
        words = shlex.split(line)[1:]
        assert main(words) == 0
        backend = words[words.index("--backend") + 1] if "--backend" in words else "zo"
        out = capsys.readouterr().out
        assert backend in out
        printed += out
    page = next(page for page in PAGES if page.name == "many-tokens.md")
    (config,) = (json.loads(fence.code) for fence in fences_of(page) if fence.language == "json")
    assert config in [json.loads(made) for made in re.findall(r"^  JSON  (\{.*)$", printed, re.MULTILINE)]
    page = next(page for page in PAGES if page.name == "choose.md")
    (answer,) = (fence.code for fence in fences_of(page) if fence.language == "text")
    if versions_are_pinned():
        assert answer and [line for line in answer.splitlines() if f"\n{line}" not in printed] == []
        return
    rows = [row.split() for row in printed.splitlines()]
    for line in answer.splitlines():
        assert any(same_but_for_versions(line.split(), row) for row in rows), line


def versions_are_pinned() -> bool:
    """Whether torch and transformers, whose operations a plan counts, are those of constraints.txt."""
    text = (REPO / "constraints.txt").read_text(encoding="utf-8")
    return all(
        version(name).partition("+")[0] in re.findall(rf"^{name}==([\w.]+)", text, re.MULTILINE)
        for name in ("torch", "transformers")
    )


def same_but_for_versions(shown: list[str], printed: list[str]) -> bool:
    """`printed` starts with the words of `shown`. Numbers may differ by 1%, as between versions of transformers."""

    def same(a: str, b: str) -> bool:
        try:
            return float(a.replace(",", "")) == pytest.approx(float(b.replace(",", "")), rel=0.01)
        except ValueError:
            return a == b

    return bool(shown) and len(printed) >= len(shown) and all(map(same, shown, printed))


def test_jsons_are_converted_as_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = next(page for page in PAGES if page.name == "converting.md")
    (tmp_path / "ds_configs").symlink_to(REPO / "ds_configs")
    monkeypatch.chdir(tmp_path)
    said = {}
    for line in (line for fence in fences_of(page) if fence.language == "bash" for line in fence.lines):
        command, _, file = line.partition(" > ")
        assert main(shlex.split(command)[1:]) == 0
        out, said[line] = capsys.readouterr()
        if file:
            Path(file).write_text(out, encoding="utf-8")
        else:
            assert out.splitlines()[-1] == "valid" or (out.startswith("stock: ") and "zero3" in line)
    shown = next(fence.code for fence in fences_of(page) if fence.language == "text")
    assert next(iter(said.values())) == shown
    assert resolve(json.loads(Path("zo.json").read_text(encoding="utf-8"))).stream


def test_every_page_is_in_the_navigation() -> None:
    text = (REPO / "mkdocs.yml").read_text(encoding="utf-8")
    site = yaml.safe_load(re.sub(r"!!python/name:\S+", "null", text))

    def files(entries: list[dict[str, object]]) -> list[str]:
        found: list[str] = []
        for entry in entries:
            for value in entry.values():
                found += files(value) if isinstance(value, list) else [str(value)]
        return found

    named = files(site["nav"])
    assert sorted(name for name in named if "/" not in name) == sorted(path.name for path in PAGES[1:])
    others = [name.removeprefix("repository/") for name in named if "/" in name]
    assert all((REPO / name).exists() for name in others)


def test_the_readme_is_short() -> None:
    assert len((REPO / "README.md").read_bytes()) <= 6_500


def prose_of(page: Path) -> list[str]:
    """The words of a page outside tables, code, comments and folded parts."""
    text = page.read_text(encoding="utf-8")
    for left_out in (
        r"<details.*?</details>",
        r"^ *```.*?^ *```$",
        r"<!--.*?-->",
        r"^ *\|[^\n]*$",
        r"(?<=\])\([^)]*\)",
    ):
        text = re.sub(left_out, "", text, flags=re.DOTALL | re.MULTILINE)
    return text.split()


def test_the_pages_are_few_and_short() -> None:
    assert len(PAGES) - 1 <= 20
    assert sum(len(prose_of(page)) for page in PAGES) <= 16_320, "say it shorter, or in a table"


def test_troubleshooting_quotes_messages_that_exist() -> None:
    quoted = re.findall(r"\*\*`([^`]+)`\*\*", (REPO / "docs" / "help.md").read_text(encoding="utf-8"))
    assert len(quoted) >= 8
    messages = [text for path in (REPO / "ds_zo").rglob("*.py") for text in strings_of(path)]
    assert [words for words in quoted if not any(words in message for message in messages)] == []


def strings_of(path: Path) -> list[str]:
    """The strings of a source file; a replacement field of an f-string shows its expression in braces."""
    found = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.append(node.value)
        elif isinstance(node, ast.JoinedStr):
            found.append("".join(map(_shown, node.values)))
    return found


def _shown(part: ast.expr) -> str:
    assert isinstance(part, ast.Constant | ast.FormattedValue)
    return str(part.value) if isinstance(part, ast.Constant) else f"{{{ast.unparse(part.value)}}}"


LINKED = [
    *REPO.glob("*.md"),
    *(path for folder in ("docs", "ds_configs", "ds_zo") for path in (REPO / folder).rglob("*.md")),
]


@pytest.mark.parametrize("page", LINKED, ids=lambda page: str(page.relative_to(REPO)))
def test_links_and_paths_lead_somewhere(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    links = {link for link in re.findall(r"\]\(([^)]+)\)", text) if "://" not in link}
    for file, _, anchor in (link.partition("#") for link in sorted(links)):
        target = page.parent / file if file else page
        assert target.exists(), file
        assert not anchor or anchor in anchors_of(target), f"{file}#{anchor}"
    paths = re.findall(r"`((?:ds_zo|ds_configs|launch|tests|tools)/[\w./-]+)`", text)
    assert [path for path in paths if not (REPO / path).exists()] == []


def anchors_of(page: Path) -> set[str]:
    heads = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {re.sub(r"[^\w -]", "", head.lower()).replace(" ", "-") for head in heads}
