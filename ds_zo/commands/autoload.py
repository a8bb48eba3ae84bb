"""`ds-zo autoload`: a file with which DS_ZO_AUTOLOAD=1 has an effect in every process of this Python."""

from __future__ import annotations

import argparse
import site
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

from ds_zo.checkpoint.files import replace_text
from ds_zo.command_line import ENVIRONMENT
from ds_zo.commands.arguments import add_command
from ds_zo.commands.run import VARIABLE, Interpreter

FILE = "ds_zo_autoload.pth"
LINE = f"""\
import os; os.environ.get("{VARIABLE}", "0") not in ("", "0") and __import__("ds_zo_autoload").install()
"""
"""The content of that file. Python executes it when it starts."""


def add(commands: Any) -> None:
    parser = add_command(
        commands,
        "autoload",
        help=f"switch {VARIABLE}=1 on or off for this Python, for jobs that are not started by ds-zo run",
        about=f"`on` writes {FILE} to site-packages. Every Python process of this environment then reads {VARIABLE} "
        "when it starts. `off` removes the file; run it before pip uninstall. `status` says what holds here.",
        examples=("ds-zo autoload on", "ds-zo autoload status"),
    )
    parser.add_argument("action", choices=("on", "off", "status"))
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    path = _site_packages() / FILE
    if args.action == "on":
        replace_text(path, LINE)
    elif args.action == "off":
        path.unlink(missing_ok=True)
    value = ENVIRONMENT.get(VARIABLE)
    print(f"file      {path}{'' if path.exists() else ': not there; ds-zo autoload on writes it'}")
    print(f"variable  {f'{VARIABLE}={value}' if value is not None else f'{VARIABLE} is not set'}")
    print(f"here      {Interpreter.start([sys.executable], ENVIRONMENT).effect}")


def _site_packages() -> Path:
    """The folder in which pip has installed ds-zo, where Python executes `.pth` files."""
    folders = [*site.getsitepackages(), *([site.getusersitepackages()] if site.ENABLE_USER_SITE else [])]
    for found in metadata.distributions(name="ds-zo", path=folders):
        return Path(str(found.locate_file("")))
    raise ValueError(
        f"ds-zo autoload writes beside an installed ds-zo, got a Python without one in {', '.join(folders)}: install "
        f"it by pip, or start the job by ds-zo run ({sys.executable})"
    )
