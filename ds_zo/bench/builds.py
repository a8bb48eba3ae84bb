"""Compiles the DeepSpeed extensions that contenders use, once per machine, before anything is timed."""

from __future__ import annotations

import shutil
import subprocess
import sys
from contextlib import suppress

_BUILDERS = ("CPUAdamBuilder", "PinMemoryBuilder")
_LONGEST_S = 240.0


class Builds:
    """Builds in processes of their own, started with the command: compiling takes as long as the imports on a cold
    machine."""

    def __init__(self, *, wanted: bool) -> None:
        started = _BUILDERS if wanted and shutil.which("nvidia-smi") is not None else ()
        self._processes = [
            subprocess.Popen(
                [sys.executable, "-c", f"from deepspeed.ops.op_builder import {name}; {name}().load(verbose=False)"],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
            for name in started
        ]

    def wait(self) -> None:
        """Waits for the builds. The case that needs an extension reports a failed build."""
        for process in self._processes:
            with suppress(subprocess.TimeoutExpired):
                process.wait(_LONGEST_S)
        self._processes = []


def load_extensions() -> None:
    """Loads the extensions, and builds those that are not built. Without DeepSpeed's pinned memory all but two
    contenders run."""
    from deepspeed.ops import op_builder

    required, *others = (getattr(op_builder, name) for name in _BUILDERS)
    required().load(verbose=False)
    for builder in others:
        with suppress(Exception):
            builder().load(verbose=False)
