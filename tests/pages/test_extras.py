"""The notebooks, the Dockerfile and the citation, as far as they can be checked without running a notebook or Docker.

`tools/notebooks.sh` runs the notebooks, after the tests.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest
import yaml

import ds_zo
from tests.helpers.processes import REPO

NOTEBOOKS = sorted((REPO / "notebooks").glob("*.ipynb"))
WITH_OUTPUTS = ("lora_of_14b_in_15gb",)
"""Stored as they ran on a GPU, which CI has not. The others are stored without outputs."""
DOCKERFILE = (REPO / "Dockerfile").read_text(encoding="utf-8")
HADOLINT = shutil.which("hadolint") or shutil.which("hadolint", path=Path(sys.executable).parent)


# Notebooks


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_compiles_and_has_outputs_only_of_a_gpu(path: Path) -> None:
    notebook = json.loads(path.read_text(encoding="utf-8"))
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    if path.stem in WITH_OUTPUTS:
        assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1)), "one run, in order"
        assert not any(output["output_type"] == "error" for cell in code for output in cell["outputs"])
    else:
        assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in code)
    sources = ["".join(cell["source"]) for cell in code]
    for source in sources:
        compile(source, str(path), "exec")
    first = sources[0]
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        assert f"{name}=" in first.partition("import deepspeed")[0], f"{name} is set before DeepSpeed is imported"
    assert sum(source.count("plt.show()") for source in sources) == 1
    texts = [cell for cell in notebook["cells"] if cell["cell_type"] == "markdown"]
    assert len(texts) >= len(code) - 1, "text stands between the cells"


def test_ci_runs_the_notebooks_after_the_tests() -> None:
    scripts = re.findall(r"^bash (\S+\.sh)", (REPO / ".ci" / "run").read_text(encoding="utf-8"), re.MULTILINE)
    assert scripts.index("launch/test.sh") < scripts.index("tools/notebooks.sh")
    assert all((REPO / script).is_file() for script in scripts)
    assert len(NOTEBOOKS) == 4
    subprocess.run(["bash", "-n", str(REPO / "tools" / "notebooks.sh")], check=True)


# The citation

FIELDS = {
    *("abstract", "authors", "cff-version", "commit", "contact", "date-released", "doi", "identifiers", "keywords"),
    *("license", "license-url", "message", "preferred-citation", "references", "repository", "repository-artifact"),
    *("repository-code", "title", "type", "url", "version"),
}
"""All that version 1.2.0 of the Citation File Format allows at the top."""


def test_the_citation_is_valid_and_agrees_with_the_package() -> None:
    citation: dict[str, Any] = yaml.safe_load((REPO / "CITATION.cff").read_text(encoding="utf-8"))
    assert citation.keys() <= FIELDS
    assert {"authors", "cff-version", "message", "title"} <= citation.keys()
    assert citation["cff-version"] == "1.2.0" and citation["type"] in ("software", "dataset")
    assert citation["authors"] and all(
        "name" in author or {"family-names", "given-names"} <= author.keys() for author in citation["authors"]
    )
    assert len(citation["keywords"]) == len(set(citation["keywords"])) > 0
    assert str(citation["version"]) == ds_zo.__version__
    assert f'license = "{citation["license"]}"' in (REPO / "pyproject.toml").read_text(encoding="utf-8")


# Docker


def copied() -> list[tuple[list[str], str]]:
    """Sources and target of every COPY."""
    lines = [line.split()[1:] for line in DOCKERFILE.splitlines() if line.startswith("COPY ")]
    return [(words[:-1], words[-1]) for words in lines]


def in_build_context(path: str) -> bool:
    """By .dockerignore's rule: the last line that matches decides."""
    kept = True
    for line in (REPO / ".dockerignore").read_text(encoding="utf-8").splitlines():
        folders = [path, *map(str, Path(path).parents)][:-1]
        if line and not line.startswith("#") and any(fnmatch(part, line.removeprefix("!")) for part in folders):
            kept = line.startswith("!")
    return kept


def test_the_dockerfile_copies_what_is_in_the_build_context() -> None:
    for sources, _ in copied():
        for source in sources:
            assert (REPO / source).exists() and in_build_context(source), source
    assert not in_build_context(".venv") and not in_build_context("tests")
    for file in (REPO / "launch").glob("*.py"):
        assert in_build_context(f"launch/{file.name}") != ("benchmarks" in file.read_text(encoding="utf-8"))


@pytest.mark.skipif(HADOLINT is None, reason="hadolint is not installed")
def test_hadolint_finds_nothing_in_the_dockerfile() -> None:
    done = subprocess.run([str(HADOLINT), str(REPO / "Dockerfile")], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
def test_the_files_in_the_image_make_the_wheel(tmp_path: Path) -> None:
    image = tmp_path / "image"
    image.mkdir()
    for sources, target in copied():
        for source in sources:
            to = image / target
            if (REPO / source).is_dir():
                shutil.copytree(REPO / source, to, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(REPO / source, to)
    assert (image / "launch" / "train.py").is_file() and (image / "ds_configs" / "zo.json").is_file()
    build = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(tmp_path)]
    subprocess.run([*build, str(image)], capture_output=True, check=True, timeout=300)
    assert list(tmp_path.glob("ds_zo-*.whl"))


def test_the_docker_page_explains_every_option_of_its_commands() -> None:
    page = (REPO / "docs" / "index.md").read_text(encoding="utf-8").partition("\n## Docker\n")[2]
    fences = re.findall(r"^```bash\n(.*?)^```$", page, flags=re.DOTALL | re.MULTILINE)
    assert len(fences) == 3
    for fence in fences:
        subprocess.run(["bash", "-n"], input=fence, text=True, check=True)
    explained = set(re.findall(r"^- `(--[\w-]+)", page, flags=re.MULTILINE))
    for fence in fences[1:]:
        options = set(re.findall(r"[ (](--[\w-]+)", fence.partition(" ds-zo deepspeed ")[0]))
        assert {"--gpus", "--ipc", "--ulimit"} <= options and options - {"--rm"} <= explained
