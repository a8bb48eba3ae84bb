"""Standard output of `ds-zo ... --json` is JSON and nothing else.

DeepSpeed's logger keeps the standard output that it finds when it is imported, and writes to it then and there (where
there is no GPU, for one). That is before `cli` can have a say: it is in this package, which imports DeepSpeed.
"""

from __future__ import annotations

import sys
from contextlib import redirect_stdout
from importlib import import_module
from pathlib import Path


def prints_json() -> bool:
    """Whether this process is the `ds-zo` command, by name or by `python -m`, told to print JSON."""
    script = sys.argv[0] if sys.argv else ""
    is_ours = Path(script).stem == "ds-zo" or (script == "-m" and "ds_zo.cli" in sys.orig_argv)
    return is_ours and "--json" in sys.argv


if prints_json():
    with redirect_stdout(sys.stderr):
        import_module("deepspeed")
