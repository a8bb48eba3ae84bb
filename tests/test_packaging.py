"""The package as it is installed, and the scripts that install it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from importlib.metadata import entry_points
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

REPO = Path(__file__).parents[1]
PROJECT = tomllib.loads((REPO / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def requirements() -> list[Requirement]:
    groups = [PROJECT["dependencies"], *PROJECT["optional-dependencies"].values()]
    return [Requirement(line) for group in groups for line in group]


def pins() -> list[Requirement]:
    lines = (REPO / "constraints.txt").read_text(encoding="utf-8").splitlines()
    return [Requirement(line) for line in lines if line and not line.startswith("#")]


def in_lib_sh(commands: str, *, repo: Path = REPO, **env: str) -> subprocess.CompletedProcess[str]:
    """Runs `commands` with launch/lib.sh sourced, as the scripts do."""
    script = f'set -euo pipefail\nsource "{repo}/launch/lib.sh"\n{commands}'
    return subprocess.run(
        ["bash", "-c", script], env={**os.environ, **env}, capture_output=True, text=True, timeout=120, check=False
    )


def clone_scripts(folder: Path) -> Path:
    (folder / "launch").mkdir(parents=True)
    shutil.copy(REPO / "launch" / "lib.sh", folder / "launch")
    for name in ("pyproject.toml", "constraints.txt"):
        shutil.copy(REPO / name, folder)
    return folder


@pytest.mark.parametrize("environment", [{"python_version": "3.10"}, {"python_version": "3.13"}])
def test_every_requirement_has_one_pin_that_satisfies_it(environment: dict[str, str]) -> None:
    pinned: dict[str, list[str]] = {}
    for pin in pins():
        if pin.marker is None or pin.marker.evaluate(environment):
            (specifier,) = pin.specifier
            pinned.setdefault(canonicalize_name(pin.name), []).append(specifier.version)
    for requirement in requirements():
        versions = pinned.get(canonicalize_name(requirement.name), [])
        assert len(versions) == 1, requirement
        assert requirement.specifier.contains(versions[0]), (str(requirement), versions)


def test_console_script_is_ours_and_answers(capsys: pytest.CaptureFixture[str]) -> None:
    import ds_zo
    from ds_zo.cli import main

    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    assert capsys.readouterr().out == f"ds-zo {ds_zo.__version__}\n"
    installed = entry_points(group="console_scripts", name="ds-zo")
    if not installed:
        pytest.skip("the package is run from its source folder, not installed")
    assert [script.value for script in installed] == [PROJECT["scripts"]["ds-zo"]]


def test_cli_prints_every_key_table(capsys: pytest.CaptureFixture[str]) -> None:
    from ds_zo.cli import main

    assert main(["config"]) == 0
    shown = capsys.readouterr().out
    assert shown.strip() in (REPO / "docs" / "keys.md").read_text(encoding="utf-8")
    for key in ("zo_eps", "clip_grad_value", "subspace_dim", "device_slots"):
        assert key in shown


def build(source: Path, target: Path, kind: str) -> Path:
    """Makes the wheel or the sdist of a folder, by setuptools alone."""
    code = f"import sys; from setuptools import build_meta; build_meta.build_{kind}(sys.argv[1])"
    subprocess.run([sys.executable, "-c", code, target], cwd=source, capture_output=True, check=True, timeout=120)
    (made,) = target.iterdir()
    return made


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a build reads of the repository, and a test, which setuptools would add to an sdist."""
    folder = tmp_path_factory.mktemp("source")
    for path in REPO.iterdir():
        if path.is_file() and path.name != ".git":
            shutil.copy(path, folder)
    shutil.copytree(REPO / "ds_zo", folder / "ds_zo", ignore=shutil.ignore_patterns("__pycache__"))
    (folder / "tests").mkdir()
    shutil.copy(__file__, folder / "tests")
    return folder


@pytest.fixture(scope="module")
def wheel(source: Path, tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    return zipfile.ZipFile(build(source, tmp_path_factory.mktemp("wheel"), "wheel"))


def test_the_wheel_has_the_package_and_nothing_else(wheel: zipfile.ZipFile) -> None:
    import ds_zo

    names = set(wheel.namelist())
    package = {path for path in (REPO / "ds_zo").rglob("*.py") if "__pycache__" not in path.parts}
    package |= {REPO / "ds_zo" / "py.typed", *(REPO / "ds_zo/tasks/embedded").iterdir()}
    package |= {REPO / "ds_zo/bench/contenders.json", *(REPO / "ds_zo/training/configs").glob("*.json")}
    assert {name for name in names if name.startswith("ds_zo/")} == {p.relative_to(REPO).as_posix() for p in package}
    about = f"ds_zo-{ds_zo.__version__}.dist-info/"
    assert {f"{about}METADATA", f"{about}licenses/LICENSE", f"{about}entry_points.txt"} <= names
    others = {name for name in names if not name.startswith(("ds_zo/", about))}
    assert others == {"ds_zo_autoload.py"}, "and no .pth file, which every Python would execute"
    assert f"\nVersion: {ds_zo.__version__}\n" in wheel.read(f"{about}METADATA").decode()


def test_the_sdist_makes_the_same_wheel(source: Path, wheel: zipfile.ZipFile, tmp_path: Path) -> None:
    for name in ("sdist", "unpacked", "wheel"):
        (tmp_path / name).mkdir()
    with tarfile.open(build(source, tmp_path / "sdist", "sdist")) as sdist:
        assert not any("/tests/" in name or "/benchmarks/" in name for name in sdist.getnames())
        filtered = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}  # Python 3.11.3 and older have none
        sdist.extractall(tmp_path / "unpacked", **filtered)
    (unpacked,) = (tmp_path / "unpacked").iterdir()
    again = zipfile.ZipFile(build(unpacked, tmp_path / "wheel", "wheel"))
    assert {name: again.read(name) for name in again.namelist()} == {
        name: wheel.read(name) for name in wheel.namelist()
    }


def test_the_typed_file_has_every_public_name() -> None:
    """tools/wheel.sh checks the file's types."""
    import ds_zo

    text = (REPO / "tests" / "typed_user.py").read_text(encoding="utf-8")
    assert [name for name in ds_zo.__all__ if f"ds_zo.{name}" not in text] == []


@pytest.mark.parametrize(
    ("tag", "cited", "message"),
    [
        ("", "", "==> version "),
        ("v{}", "", "==> version "),
        ("v9.9.9", "", "a tag names ds_zo.__version__, {}, but this commit has v9.9.9"),
        ("", "9.9.9", "ds_zo.__version__ is {}, but CITATION.cff has 9.9.9"),
    ],
)
def test_tag_and_citation_have_the_version(tmp_path: Path, tag: str, cited: str, message: str) -> None:
    import ds_zo

    version = ds_zo.__version__
    repo = clone_scripts(tmp_path / "clone")
    (repo / "tools").mkdir()
    shutil.copy(REPO / "tools" / "wheel.sh", repo / "tools")
    (repo / "ds_zo").mkdir()
    shutil.copy(REPO / "ds_zo" / "__init__.py", repo / "ds_zo")
    (repo / "CITATION.cff").write_text(f"version: {cited or version}\n", encoding="utf-8")
    (repo / "CHANGELOG.md").write_text(f"## [{version}] - 2026-01-01\n", encoding="utf-8")
    git = ["git", "-C", str(repo), "-c", "user.name=a", "-c", "user.email=a@b"]
    for words in (
        ["init", "-q"],
        ["commit", "-q", "--allow-empty", "-m", "a"],
        *([["tag", tag.format(version)]] * bool(tag)),
    ):
        subprocess.run([*git, *words], check=True, timeout=60)
    command = ["bash", str(repo / "tools" / "wheel.sh"), "--versions"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert message.format(version) in done.stdout + done.stderr
    assert (done.returncode == 0) == message.startswith("==>"), done.stderr


def test_scripts_install_the_tested_versions() -> None:
    """pyproject.toml has no upper bound of torch, whose newest release may bring gigabytes of CUDA libraries."""
    scripts = [*REPO.glob("launch/*.sh"), *REPO.glob("tools/*.sh"), REPO / "Dockerfile"]
    lines = [line for path in scripts for line in path.read_text(encoding="utf-8").splitlines()]
    installs = [line for line in lines if re.search(r'\bpip"? install ', line)]
    assert len(installs) >= 7
    assert [line for line in installs if "--constraint" not in line] == []


def test_no_usable_python_is_said_clearly() -> None:
    done = in_lib_sh("find_python", PYTHON="python-that-is-not-there")
    assert done.returncode == 1
    assert "need 3.10 to 3.13" in done.stderr
    assert "python-that-is-not-there" in done.stderr
    assert in_lib_sh("find_python", PYTHON=f"python-that-is-not-there {sys.executable}").stdout.strip()


def test_a_python_whose_path_has_a_space_is_one_path(tmp_path: Path) -> None:
    python = tmp_path / "my tools" / "python"
    python.parent.mkdir()
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n', encoding="utf-8")
    python.chmod(0o755)
    done = in_lib_sh("find_python", PYTHON=str(python))
    assert (done.returncode, done.stdout.strip()) == (0, sys.executable), done.stderr


def test_second_install_is_skipped_until_versions_change(tmp_path: Path) -> None:
    repo = clone_scripts(tmp_path / "clone")
    pip_calls = tmp_path / "pip-calls"
    python = repo / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(f'#!/bin/sh\ncase "$*" in *install*) echo "$@" >>"{pip_calls}";; esac\n', encoding="utf-8")
    python.chmod(0o755)

    assert in_lib_sh("use_environment test", repo=repo).returncode == 0
    first = pip_calls.read_text(encoding="utf-8").splitlines()
    assert [" torch" in call for call in first] == [True, False], "torch comes first, and pinned"
    assert all(f"--constraint {repo}/constraints.txt" in call for call in first)
    again = in_lib_sh("use_environment test", repo=repo)
    assert "up to date" in again.stdout
    assert len(pip_calls.read_text(encoding="utf-8").splitlines()) == 2
    with (repo / "constraints.txt").open("a", encoding="utf-8") as constraints:
        constraints.write("# touched\n")
    in_lib_sh("use_environment test", repo=repo)
    assert len(pip_calls.read_text(encoding="utf-8").splitlines()) == 4


@pytest.mark.slow
def test_environment_that_was_moved_is_made_anew(tmp_path: Path) -> None:
    """The first environment has no pip, which takes longer to install than all else: the second must have it."""
    repo = clone_scripts(tmp_path / "here")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", repo / ".venv"], check=True)
    (repo / ".venv" / ".location").write_text(f"{repo / '.venv'}\n", encoding="utf-8")
    repo = repo.rename(tmp_path / "there")
    done = in_lib_sh("make_environment", repo=repo, PYTHON=sys.executable)
    assert "emptying .venv" in done.stdout
    assert str(repo) in (repo / ".venv" / "bin" / "pip").read_text(encoding="utf-8")
    assert in_lib_sh("make_environment", repo=repo).stdout == ""


@pytest.mark.skipif(shutil.which("flock") is None, reason="needs flock to know who else is running")
def test_build_locks_go_only_when_nobody_is_building(tmp_path: Path) -> None:
    repo = clone_scripts(tmp_path / "clone")
    lock = repo / ".venv" / "torch_extensions" / "cpu_adam" / "lock"
    lock.parent.mkdir(parents=True)
    lock.touch()
    enter = "install_package() { :; }; make_environment() { :; }; use_environment test; share_environment;"
    with subprocess.Popen(
        ["bash", "-c", f'source "{repo}/launch/lib.sh"; {enter} touch "{lock}"; echo ready; read -r _'],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as builder:
        assert builder.stdout is not None
        while builder.stdout.readline() != "ready\n":
            pass
        assert in_lib_sh(enter, repo=repo).returncode == 0
        assert lock.exists(), "somebody else is in this environment: the lock may be theirs"
        builder.communicate("\n", timeout=60)
    assert "left by a build that was killed" in in_lib_sh(enter, repo=repo).stdout
    assert not lock.exists()


def test_the_hosted_checks_run_scripts_that_exist_on_both_processors() -> None:
    workflow = yaml.safe_load((REPO / ".github/workflows/tests.yml").read_text(encoding="utf-8"))
    commands = [step["run"] for job in workflow["jobs"].values() for step in job["steps"] if "run" in step]
    assert {"bash launch/test.sh --package", "bash launch/test.sh --pages"} < {*commands}
    assert all((REPO / command.split()[1]).is_file() for command in commands)
    machines = workflow["jobs"]["suite"]["strategy"]["matrix"]["include"]
    assert {machine["processor"] for machine in machines} == {"x86-64", "aarch64"}


def test_hooks_before_a_commit_are_the_checks_of_the_suite() -> None:
    hooks = yaml.safe_load((REPO / ".pre-commit-config.yaml").read_text(encoding="utf-8"))["repos"][0]["hooks"]
    suite = (REPO / "launch/test.sh").read_text(encoding="utf-8").splitlines()
    assert hooks
    assert all(any(line.startswith(hook["entry"].removeprefix(".venv/bin/")) for line in suite) for hook in hooks)


@pytest.mark.parametrize("chosen", ["fast.txt", "smoke.txt"])
def test_lists_of_tests_name_tests_that_exist(chosen: str) -> None:
    for line in (REPO / "tests" / chosen).read_text(encoding="utf-8").splitlines():
        place, _, test = line.partition("#")[0].strip().partition("::")
        assert (REPO / place).exists(), line
        assert not test or f"def {test.partition('[')[0]}(" in (REPO / place).read_text(encoding="utf-8"), line
