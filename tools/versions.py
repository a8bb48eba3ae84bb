"""Runs the smoke suite with other versions of DeepSpeed, transformers, accelerate, peft, torch and Python.

    bash tools/versions.sh                  # every corner of tools/corners.txt without a result of this commit
    bash tools/versions.sh --only oldest    # one corner, again
    bash tools/versions.sh --render         # writes docs/support.md from the rows, runs nothing

Each corner has an environment of its own, which a later run uses again. An interrupted run goes on where it ended. Rows
are in benchmarks/results/cpu_versions.jsonl. It needs the standard library alone.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

REPO = Path(__file__).resolve().parents[1]
CORNERS = REPO / "tools" / "corners.txt"
ROWS = REPO / "benchmarks" / "results" / "cpu_versions.jsonl"
PAGE = REPO / "docs" / "support.md"
BEGIN, END = "<!-- versions: written by `bash tools/versions.sh`, not by hand -->", "<!-- end of versions -->"
PACKAGES = ("torch", "deepspeed", "transformers", "accelerate", "peft")
SMOKE_PACKAGES = ("datasets", "greenlet", "numpy", "pydantic", "pytest", "safetensors", "tqdm")
Corner = dict[str, str]


def read_corners() -> dict[str, Corner]:
    lines = [line.split() for line in CORNERS.read_text().splitlines() if line.strip() and not line.startswith("#")]
    return {name: dict(zip(("python", *PACKAGES), pins, strict=True)) for name, *pins in lines}


def read_rows() -> dict[str, dict[str, Any]]:
    rows = map(json.loads, ROWS.read_text().splitlines()) if ROWS.exists() else ()
    return {row["corner"]: row for row in rows}


def write_rows(rows: dict[str, dict[str, Any]]) -> None:
    ordered = [rows[name] for name in read_corners() if name in rows]
    ROWS.write_text("".join(json.dumps(row) + "\n" for row in ordered))


def find_interpreter(version: str) -> str | None:
    """A Python of this version on PATH or of pyenv; None without one."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"), "versions")
    found = [shutil.which(f"python{version}"), *sorted(pyenv.glob(f"{version}.*/bin/python"))]
    probe = "import sys; print('%d.%d' % sys.version_info[:2])"
    for candidate in map(str, filter(None, found)):
        run = subprocess.run([candidate, "-c", probe], capture_output=True, text=True)
        if run.returncode == 0 and run.stdout.strip() == version:
            return candidate
    return None


def pip(python: Path, *arguments: str) -> str:
    """The standard output of pip. Raises with the last line of its errors."""
    run = subprocess.run([python, "-m", "pip", *arguments], capture_output=True, text=True)
    if run.returncode:
        raise RuntimeError((run.stderr.strip().splitlines() or ["pip failed"])[-1])
    return run.stdout


def needs_cuda_libraries(python: Path, torch: str) -> bool:
    """Whether pip would install CUDA libraries, which are gigabytes, beside this version of torch."""
    report = json.loads(pip(python, "install", "--quiet", "--dry-run", "--report", "-", f"torch=={torch}"))
    names = [package["metadata"]["name"] for package in report["install"]]
    return any(name.startswith(("nvidia-", "cuda-")) for name in names)


def make_environment(corner: Corner, folder: Path) -> Path:
    """The Python of the corner's environment, which is made unless a complete one is there. Raises if it cannot be."""
    python, stamp = folder / "bin" / "python", folder / "installed.json"
    if stamp.exists() and json.loads(stamp.read_text()) == corner:
        return python
    interpreter = find_interpreter(corner["python"])
    if interpreter is None:
        raise RuntimeError(f"this machine has no Python {corner['python']}")
    subprocess.run([interpreter, "-m", "venv", "--clear", folder], check=True)
    if needs_cuda_libraries(python, corner["torch"]):
        text = f"pip offers torch {corner['torch']} for Python {corner['python']} with gigabytes of CUDA libraries only"
        raise RuntimeError(f"{text} ({platform.machine()})")
    install = "install", "--quiet", "--no-compile"  # Python compiles the few modules that are imported
    pip(python, *install, f"torch=={corner['torch']}", "setuptools", "wheel")
    pip(python, *install, *(f"{package}=={corner[package]}" for package in PACKAGES), *SMOKE_PACKAGES)
    stamp.write_text(json.dumps(corner))
    return python


def run_smoke(python: Path, folder: Path) -> dict[str, Any]:
    """Runs the smoke suite; a row's outcome, counts and seconds."""
    lines = (line.partition("#")[0].strip() for line in (REPO / "tests" / "smoke.txt").read_text().splitlines())
    tests = [line for line in lines if line]
    environment = os.environ | {
        "PATH": f"{python.parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(REPO),
        "TORCH_EXTENSIONS_DIR": str(folder / "torch_extensions"),
        "CUDA_VISIBLE_DEVICES": "",
        "DS_ACCELERATOR": "cpu",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    log = folder / "smoke.log"
    options = ["-p", "tests.helpers.no_shared_memory_op", "-p", "no:cacheprovider", "-q", "-m", "not gpu", "--tb=short"]
    began = time.monotonic()
    with log.open("w") as file:
        command: list[str | Path] = [python, "-m", "pytest", *options, *tests]
        code = subprocess.run(command, cwd=REPO, env=environment, stdout=file, stderr=subprocess.STDOUT).returncode
    summary = log.read_text().strip().splitlines()[-1]
    counts = {word: int(number) for number, word in re.findall(r"(\d+) (passed|failed|skipped|error)", summary)}
    seconds = round(time.monotonic() - began)
    reason = "" if code == 0 else summary.strip("= ")
    return {"outcome": "passed" if code == 0 else "failed", **counts, "seconds": seconds, "reason": reason}


def run_corner(name: str, corner: Corner, environments: Path) -> dict[str, Any]:
    folder, tested = environments / name, commit()  # before the run: a later commit is not what ran
    say(f"{name}: making the environment {folder} (minutes the first time)")
    try:
        python = make_environment(corner, folder)
    except (RuntimeError, subprocess.CalledProcessError) as error:
        outcome: dict[str, Any] = {"outcome": "not tested", "reason": str(error)}
    else:
        say(f"{name}: running the smoke suite, log {folder / 'smoke.log'}")
        outcome = run_smoke(python, folder)
    return {"corner": name, **corner, **outcome, "machine": platform.machine(), "commit": tested}


def commit() -> str:
    run = subprocess.run(["git", "-C", REPO, "describe", "--always", "--dirty"], capture_output=True, text=True)
    return run.stdout.strip()


def supported() -> dict[str, Any]:
    """The table of ds_zo/versions.py, without importing the package, which needs DeepSpeed."""
    spec = importlib.util.spec_from_file_location("_versions", REPO / "ds_zo" / "versions.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["_versions"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return dict(module.SUPPORTED)


def tables(rows: dict[str, dict[str, Any]]) -> str:
    """The generated part of docs/support.md: tested ranges, and the outcome of each corner."""
    lines = ["| package | tested | refused at import | refused by pip |", "| --- | --- | --- | --- |"]
    for package, found in supported().items():
        refused = f"<{found.fails_below}" if found.fails_below else ""
        lines.append(f"| {package} | {found} | {refused} | {f'>={found.end}' if found.end else ''} |")
    head = ("environment", "Python", *PACKAGES, "smoke suite", "commit")
    lines += ["", f"| {' | '.join(head)} |", f"|{' --- |' * len(head)}"]
    for name, corner in read_corners().items():
        row = rows.get(name, {"outcome": "not tested", "reason": "not run yet"})
        counted = f"passed, {row.get('passed')} tests in {row.get('seconds')} s"
        outcome = counted if row["outcome"] == "passed" else f"{row['outcome']}: {row['reason']}"
        cells = [name, *corner.values(), outcome, row.get("commit", "")]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def render() -> None:
    text = PAGE.read_text()
    before, rest = text.split(BEGIN)
    after = rest.split(END)[1]
    PAGE.write_text(f"{before}{BEGIN}\n\n{tables(read_rows())}\n\n{END}{after}")


def say(text: str) -> None:
    print(f"==> {text}", flush=True)


def main() -> None:
    corners = read_corners()
    parser = argparse.ArgumentParser(
        prog="bash tools/versions.sh",
        description="Runs tests/smoke.txt with the versions of tools/corners.txt, and writes docs/support.md.",
        epilog="example: bash tools/versions.sh --only oldest",
    )
    parser.add_argument("--only", metavar="CORNER", nargs="+", choices=corners, help=f"run these: {', '.join(corners)}")
    default = REPO / "runs" / "versions"
    parser.add_argument("--environments", type=Path, default=default, help="folder of environments: 1 GB each")
    parser.add_argument("--render", action="store_true", help="write docs/support.md from the rows, run nothing")
    args = parser.parse_args()
    chosen: list[str] = [] if args.render else args.only or list(corners)
    failed = False
    for number, name in enumerate(chosen, 1):
        rows = read_rows()
        is_done = name in rows and rows[name]["commit"] == commit() and rows[name]["outcome"] != "failed"
        if is_done and args.only is None:
            say(f"{number}/{len(chosen)} {name}: {rows[name]['outcome']} at this commit already")
            continue
        say(f"{number}/{len(chosen)} {name}: {' '.join(f'{key} {value}' for key, value in corners[name].items())}")
        row = run_corner(name, corners[name], args.environments.resolve())
        say(f"{number}/{len(chosen)} {name}: {row['outcome']} {row['reason']}")
        failed |= row["outcome"] == "failed"
        write_rows(read_rows() | {name: row})
        render()
    if args.render:
        render()
    print(tables(read_rows()))
    sys.exit(failed)


if __name__ == "__main__":
    main()
