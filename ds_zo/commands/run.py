"""`ds-zo run`: a command whose Python processes get ds_zo, though no script imports it."""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ds_zo import versions
from ds_zo.command_line import ENVIRONMENT
from ds_zo.commands.arguments import add_command
from ds_zo.plugin.patches import PATCHES

VARIABLE = "DS_ZO_AUTOLOAD"
"""The environment variable that each Python process reads when it starts."""
STARTUP = Path(__file__).with_name("startup")
"""The folder that `ds-zo run` puts on PYTHONPATH. Python imports its `sitecustomize`, which reads the variable."""

_PROBE = """
import sys
sys.path[:] = [folder for folder in sys.path if folder]  # the current folder may have a json.py
import json, platform
from importlib import metadata, util

def version(name):
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None

found = {name: version(name) for name in sys.argv[1:]}
found["python"] = platform.python_version()
autoload = "ds_zo_autoload"
print(json.dumps([autoload in sys.modules, bool(util.find_spec(autoload)), sys.executable, version("ds-zo"), found]))
"""


@dataclass(frozen=True)
class Interpreter:
    """A Python that was started."""

    autoloads: bool
    """Whether it loads ds_zo when it imports DeepSpeed."""
    has_package: bool
    """Whether it could load ds_zo."""
    path: str
    version: str | None
    """Version of its ds-zo; None if ds-zo is not installed there."""
    installed: dict[str, str | None]
    """Its version of each package of `versions.SUPPORTED`; None if the package is not installed."""

    @classmethod
    def start(cls, command: Sequence[str], env: Mapping[str, str]) -> Interpreter:
        probe = [*command, "-c", _PROBE, *versions.SUPPORTED]
        done = subprocess.run(probe, env=env, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            last = (done.stderr.strip().splitlines() or ["no message"])[-1]
            raise ValueError(
                f"ds-zo run starts the Python of the command to check it, got exit status {done.returncode} and "
                f"{last!r}: repair that Python, or name another ({shlex.join(command)})"
            )
        return cls(*json.loads(done.stdout.splitlines()[-1]))

    @property
    def effect(self) -> str:
        return f"`import deepspeed` {'imports ds_zo too' if self.autoloads else 'DOES NOT IMPORT ds_zo'}"

    def check(self) -> None:
        """Raises if ds_zo would not be loaded."""
        if not self.autoloads:
            remedy = "install it there by pip, or start a command of the environment that has it"
            if self.has_package:
                remedy = "leave out its options -E, -I and -S, and remove a sitecustomize that hides the one of ds-zo"
            raise ValueError(
                f"the Python of the command must load ds-zo, got {self.path}, which does not: {remedy} (COMMAND)"
            )

    def support(self) -> Iterator[tuple[str, str]]:
        """Name of each package, and how its installed version compares with the tested range."""
        for package, supported in versions.SUPPORTED.items():
            version = self.installed[package]
            if version is None:
                yield package, f"not installed, tested: {supported}"
            elif supported.contains(version):
                yield package, f"{version}, tested: {supported}"
            else:
                yield package, f"{version}, NOT TESTED: {versions.remedy(package)}"


def add(commands: Any) -> None:
    parser = add_command(
        commands,
        "run",
        help="run a command whose Python processes load ds_zo when they import DeepSpeed",
        about="Sets DS_ZO_AUTOLOAD=1, adds a folder to PYTHONPATH and executes COMMAND. Every Python process below it, "
        "launchers and their workers included, imports ds_zo right after DeepSpeed. Scripts need no `import ds_zo`.",
        examples=(
            "ds-zo run -- accelerate launch train.py --deepspeed ds_config.json",
            "ds-zo run --check -- trl sft --config sft.yaml",
        ),
    )
    parser.usage = "ds-zo run [-h] [--check] [-- COMMAND ...]"
    parser.add_argument("--check", action="store_true", help="print what would happen, and execute nothing")
    parser.add_argument("words", nargs="*", metavar="COMMAND", help="the command with its own options, after --")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    words: list[str] = args.words
    if not words and not args.check:
        raise ValueError("ds-zo run needs a command, got none: write ds-zo run -- COMMAND ... (COMMAND)")
    python = python_of(words[0]) if words else [sys.executable]
    if args.check:
        _check(words, python)
        return
    if python is None:
        print(f"ds-zo run: {_unknown(words[0])}", file=sys.stderr)
    else:
        Interpreter.start(python, _environment()).check()
    sys.stdout.flush()
    sys.stderr.flush()
    os.execvpe(words[0], words, _environment())


def _environment() -> dict[str, str]:
    """The environment of the command."""
    folders = [str(STARTUP), *filter(None, [ENVIRONMENT.get("PYTHONPATH")])]
    return {**ENVIRONMENT, VARIABLE: "1", "PYTHONPATH": os.pathsep.join(folders)}


def python_of(program: str) -> list[str] | None:
    """The Python that executes `program`, with its options. None if the program's file does not name one."""
    found = shutil.which(program, path=ENVIRONMENT.get("PATH"))
    if found is None:
        raise ValueError(f"ds-zo run needs a command that can be executed, got {program!r}: install it ({program})")
    if _is_python(found):
        return [found]
    with open(found, "rb") as file:
        first, second = (file.readline(4096).decode(errors="replace") for _ in range(2))
    if not first.startswith("#!"):
        return None
    words = shlex.split(first[2:])
    if words and Path(words[0]).name == "env":
        words = [word for word in words[1:] if word != "-S"]
    elif words and Path(words[0]).name == "sh" and second.startswith("'''exec' "):
        words = shlex.split(second)[1:2]  # pip writes this where the path is too long for the first line
    return words if words and _is_python(words[0]) else None


def _is_python(program: str) -> bool:
    return re.fullmatch(r"python[\d.]*", Path(program).name) is not None


def _unknown(program: str) -> str:
    return (
        f"{program} is not a Python script, so the Python that it starts is not checked. That Python must have ds-zo; "
        "check it by ds-zo run --check -- PYTHON"
    )


def _check(words: Sequence[str], python: Sequence[str] | None) -> None:
    rows: list[tuple[str, str]] = [("command", shlex.join(words) if words else "none: any script of this Python")]
    interpreter = None
    if python is None:
        rows.append(("python", _unknown(words[0])))
    else:
        interpreter = Interpreter.start(python, _environment())
        rows += [("python", interpreter.path), ("autoload", interpreter.effect)]
        rows.append(("ds-zo", interpreter.version or "NOT INSTALLED"))
        rows += interpreter.support()
    rows += [("replaces" if i == 0 else "", str(patch)) for i, patch in enumerate(PATCHES)]
    rows += [
        ("other hosts", f"deepspeed --hostfile, accelerate launch with pdsh, and srun send {VARIABLE} and PYTHONPATH"),
        ("", "torchrun, accelerate launch with standard, deepspeed --no_ssh: use ds-zo run on every host"),
        ("", "each host needs ds-zo in the Python that runs there, at the same path or after ds-zo autoload on"),
    ]
    width = max(len(name) for name, _ in rows)
    for name, text in rows:
        print(f"{name:<{width}}  {text}")
    if interpreter is not None:
        interpreter.check()
