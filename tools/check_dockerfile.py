"""Follows the Dockerfile without Docker: its COPY, pip and ds-zo lines, in a new folder and environment. Minutes.

    python tools/check_dockerfile.py

COPY takes the files that .dockerignore lets through. `pip` and `python3` are those of a new environment, made with the
Python that executes this script. Lines that need root or CUDA (FROM, apt-get, mkdir in the root) are shown and left
out. CMD is executed at the end: `ds-zo report` must start, and may find no GPU. Settings of pip apply: without an index
of CPU builds, torch brings gigabytes of CUDA libraries.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import tempfile
import venv
from pathlib import Path

REPO = Path(__file__).resolve().parents[1]


def instructions(text: str) -> list[tuple[str, str]]:
    """(instruction, its argument), with continued lines joined and comments left out."""
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    joined = re.sub(r"\\\n\s*", "", "\n".join(lines))
    return [(word, rest.strip()) for word, _, rest in (line.partition(" ") for line in joined.splitlines() if line)]


def is_let_through(path: str, ignored: str) -> bool:
    """Whether .dockerignore, which names what it lets through after `*`, does so for a file or folder."""
    return f"!{path.split('/')[0]}" in ignored.splitlines()


def copy(words: list[str], folder: Path, ignored: str) -> None:
    *sources, target = words
    for source in sources:
        assert is_let_through(source, ignored), f".dockerignore keeps {source} out of the image"
        if (REPO / source).is_dir():
            shutil.copytree(REPO / source, folder / target, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(REPO / source, folder / target)


def main() -> None:
    ignored = (REPO / ".dockerignore").read_text(encoding="utf-8")
    with tempfile.TemporaryDirectory() as root:
        folder, environment = Path(root) / "ds_zo", Path(root) / "venv"
        folder.mkdir()
        path = f"{environment / 'bin'}{os.pathsep}{os.environ['PATH']}"
        dropped = ("PYTHONPATH", "VIRTUAL_ENV", "PYTHONHOME")
        env = {key: value for key, value in os.environ.items() if key not in dropped} | {"PATH": path}
        for word, rest in instructions((REPO / "Dockerfile").read_text(encoding="utf-8")):
            if word == "COPY":
                copy(shlex.split(rest), folder, ignored)
            elif word == "RUN" and rest.startswith("python3 -m venv"):
                venv.create(environment, with_pip=True)
            elif word == "RUN" and rest.startswith("pip "):
                subprocess.run(rest, shell=True, cwd=folder, env=env, check=True)
            elif word == "CMD":
                done = subprocess.run(json.loads(rest), cwd=root, env=env, capture_output=True, text=True)
                print(done.stdout)
                assert done.returncode == 0 and done.stdout.startswith("check"), done.stderr[-3000:]
            else:
                print(f"left out: {word} {rest}")
                continue
            print(f"done: {word} {rest}", flush=True)
        check = "import ds_zo, torch, deepspeed, peft, sys; print(ds_zo.__file__); assert sys.prefix in ds_zo.__file__"
        subprocess.run([environment / "bin" / "python", "-c", check], cwd=root, env=env, check=True)


if __name__ == "__main__":
    main()
