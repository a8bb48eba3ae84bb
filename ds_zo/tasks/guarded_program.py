"""Runs one untrusted program: `python -I -B guarded_program.py`, with a JSON request on stdin.

The process limits its own memory, CPU time and file sizes, and leaves the network. It refuses sockets, new processes,
and changes of files outside the current folder. When the program has run to its end, the process writes the request's
`token` to stdout. A program that exits by itself thus does not count as passed. These are limits for mistakes of a
language model, not a barrier against an attacker.
"""

from __future__ import annotations

import _posixsubprocess
import ctypes
import json
import os
import resource
import sys
from typing import Any, NoReturn

_CLONE_NEWUSER, _CLONE_NEWNET = 0x10000000, 0x40000000
_MAX_FILE_BYTES = 1 << 20
_REFUSED = (
    *("socket.", "subprocess.", "ctypes.", "os.system", "os.exec", "os.fork", "os.posix_spawn", "os.spawn"),
    *("os.kill", "ftplib.", "smtplib.", "urllib."),
)
"""Beginnings of the names of Python's audit events that end the program with an error."""
_CHANGES = (
    *("shutil.", "os.remove", "os.rename", "os.rmdir", "os.mkdir", "os.truncate", "os.link", "os.symlink"),
    *("os.chmod", "os.chown", "os.utime", "os.setxattr", "os.removexattr"),
)
"""The same of events that do so for paths outside the current folder. One or two paths are their first arguments."""
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_FOLDER = os.path.join(os.path.realpath(os.curdir), "")


def leave_network() -> bool:
    """Enters a network namespace without interfaces. Returns False where the system does not allow it."""
    try:
        return ctypes.CDLL(None, use_errno=True).unshare(_CLONE_NEWUSER | _CLONE_NEWNET) == 0
    except (AttributeError, OSError):  # not Linux
        return False


def _limit(kind: int, value: int) -> None:
    hard = resource.getrlimit(kind)[1]
    value = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(kind, (value, value))


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    if event.startswith(_REFUSED):
        raise PermissionError(f"{event} is refused")
    is_write = event == "open" and arguments[2] & _WRITES
    if is_write or event.startswith(_CHANGES):
        for path in arguments[: 1 if is_write else 2]:
            if isinstance(path, (str, bytes, os.PathLike)) and not _may_change(os.fsdecode(path)):
                raise PermissionError(f"{event} is refused outside the current folder")


def _may_change(path: str) -> bool:
    return path == os.devnull or os.path.join(os.path.realpath(path), "").startswith(_FOLDER)


def _refuse_process(*_: Any) -> NoReturn:
    """Takes the place of the function that `subprocess` and `multiprocessing` call, which has no audit event."""
    raise PermissionError("new processes are refused")


def main() -> None:
    request = json.load(sys.stdin)
    leave_network()
    _limit(resource.RLIMIT_AS, request["memory_bytes"])
    _limit(resource.RLIMIT_CPU, request["cpu_s"])
    _limit(resource.RLIMIT_FSIZE, _MAX_FILE_BYTES)
    _limit(resource.RLIMIT_CORE, 0)
    out = os.dup(1)
    nothing = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(nothing, stream)
    _posixsubprocess.fork_exec = _refuse_process
    sys.addaudithook(_audit)
    exec(compile(request["program"], "program", "exec"), {"__name__": "program"})
    os.write(out, request["token"].encode())


if __name__ == "__main__":
    main()
