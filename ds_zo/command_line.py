"""Standard output of `ds-zo` is its answer and nothing else: JSON, a table.

DeepSpeed's logger keeps the standard output that it finds when it is imported, and writes to it then and there (where
there is no GPU, for one). That is before `cli` can have a say: it is in this package, which imports DeepSpeed.
"""

from __future__ import annotations

import sys
from contextlib import redirect_stdout
from importlib import import_module
from pathlib import Path


def is_command() -> bool:
    """Whether this process is the `ds-zo` command, by name or by `python -m`."""
    script = sys.argv[0] if sys.argv else ""
    return Path(script).stem == "ds-zo" or (script == "-m" and "ds_zo.cli" in sys.orig_argv)


if is_command():
    with redirect_stdout(sys.stderr):
        import_module("deepspeed")
