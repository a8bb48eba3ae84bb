"""Runs programs that a model wrote, several at once, each in a process of its own with limits on time and memory."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import secrets
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from ds_zo.logs import show
from ds_zo.tasks.errors import TaskError

GUARD = Path(__file__).with_name("guarded_program.py")
WALL_S, CPU_S, MEMORY_BYTES = 15.0, 5, 1 << 30
"""Limits of one program. The wall time is longer, for machines with other work."""
HOW = {
    True: "isolated, in namespaces of their own",
    False: "in processes with limits for mistakes, no barrier against an attacker: this system allows no namespaces",
}
"""What the log says of a run with and without isolation."""
_MAX_AT_ONCE = 8
_ENVIRONMENT = {"PATH": os.defpath, "PYTHONHASHSEED": "0", "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
"""Each thread of numpy's products would reserve memory."""


def run_all(programs: Sequence[str], *, wall_s: float = WALL_S, cpu_s: int = CPU_S) -> list[bool]:
    """Whether each program runs to its end without an error. Raises if not even an empty program does: scores would be
    zero for any model."""
    if programs and not run(""):
        raise TaskError(
            f"programs of a model run by {sys.executable} with {MEMORY_BYTES >> 20} MiB of memory within {WALL_S:g} s, "
            "got an empty program that does not: raise the limits of this process (ulimit -a), or stop other work"
        )
    if programs:
        show(f"ds_zo: the model's programs run {HOW[isolates()]}")
    at_once = max(1, min(_MAX_AT_ONCE, os.cpu_count() or 1))
    with ThreadPoolExecutor(at_once) as threads:
        return list(threads.map(partial(run, wall_s=wall_s, cpu_s=cpu_s), programs))


@functools.cache
def isolates() -> bool:
    """Whether this system allows the namespaces of `guarded_program.isolate`."""
    return run("", isolated=True)


def run(program: str, *, wall_s: float = WALL_S, cpu_s: int = CPU_S, isolated: bool | None = None) -> bool:
    """Runs a program in an empty temporary folder, without this process's environment. All processes of its session are
    killed at its end. `isolated`: in namespaces of its own; None: where the system allows them."""
    token = secrets.token_hex(16)
    isolated = isolates() if isolated is None else isolated
    request = {"program": program, "token": token, "memory_bytes": MEMORY_BYTES, "cpu_s": cpu_s, "isolated": isolated}
    with (
        tempfile.TemporaryFile() as written,  # a pipe would have no limit on its bytes
        tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder,
    ):
        process = subprocess.Popen(
            [sys.executable, "-I", "-B", str(GUARD)],
            stdin=subprocess.PIPE,
            stdout=written,
            stderr=subprocess.DEVNULL,
            cwd=folder,
            env={**_ENVIRONMENT, "HOME": folder, "TMPDIR": folder},
            start_new_session=True,
        )
        try:
            process.communicate(json.dumps(request).encode(), timeout=wall_s)
        except subprocess.TimeoutExpired:
            return False
        finally:
            _kill(process)
        written.seek(0)
        return written.read() == token.encode()


def _kill(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
