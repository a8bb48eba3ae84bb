"""Keeps DeepSpeed's log lines out of the standard output of `ds-zo`, which is its answer alone: JSON or a table.

DeepSpeed's logger keeps the standard output that it finds when DeepSpeed is imported, and writes to it during that
import (without a GPU, for example). `ds_zo.cli` cannot redirect it, because importing the package `ds_zo` imports
DeepSpeed first.
"""

from __future__ import annotations

import os
import sys
from contextlib import redirect_stdout
from importlib import import_module
from pathlib import Path

ENVIRONMENT = dict(os.environ)
"""The environment that this process was started with. Importing DeepSpeed adds variables."""


def is_command() -> bool:
    """Whether this process is the `ds-zo` command, started by its name or by `python -m ds_zo.cli`."""
    script = sys.argv[0] if sys.argv else ""
    return Path(script).stem == "ds-zo" or (script == "-m" and "ds_zo.cli" in sys.orig_argv)


if is_command():
    with redirect_stdout(sys.stderr):
        import_module("deepspeed")
