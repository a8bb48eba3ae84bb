"""Runs one untrusted program: `python -I -B guarded_program.py`, with a JSON request on stdin.

The process limits its own memory, CPU time and file sizes. It refuses sockets, new processes, and changes of files
outside the current folder. These are limits for mistakes of a language model. The barrier is `isolate`, where the
request asks for it. When the program has run to its end, the process writes the request's `token` to stdout. A program
that exits by itself thus does not count as passed. The program shares this process, so one that means to pass can.
"""

from __future__ import annotations

import _posixsubprocess
import ctypes
import json
import os
import resource
import signal
import sys
from typing import Any, NoReturn

_NAMESPACES = 0x10000000 | 0x00020000 | 0x20000000 | 0x40000000 | 0x08000000
"""CLONE_NEWUSER, NEWNS (mounts), NEWPID, NEWNET, NEWIPC."""
_MS_NOSUID_NODEV, _MS_BIND, _MS_REC, _MS_PRIVATE = 6, 0x1000, 0x4000, 0x40000
_MOUNT_SETATTR, _AT_FDCWD, _AT_RECURSIVE, _MOUNT_ATTR_RDONLY = 442, -100, 0x8000, 1
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_NO_NEW_PRIVS = 1, 4, 38
_SEEN = ("/usr", "/lib", "/lib32", "/lib64", "/bin", "/dev/null", "/dev/urandom")
"""What an isolated program sees beside the folders of this Python."""
_FILES_BYTES = 1 << 26
"""Bytes of all files of an isolated program. They are in memory."""
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


def isolate() -> None:
    """Goes on in a process that has no network, sees no process of others, and may write to memory alone.

    Of the file system it sees this Python and the system's libraries, read-only. It dies with the calling process, and
    with it all processes that it starts. Raises OSError where the system does not allow that.
    """
    libc = ctypes.CDLL(None, use_errno=True)

    def call(name: str, *arguments: Any) -> None:
        if getattr(libc, name)(*arguments) != 0:
            raise OSError(ctypes.get_errno(), f"{name} is not allowed")

    ids = {"setgroups": "deny", "uid_map": f"0 {os.getuid()} 1", "gid_map": f"0 {os.getgid()} 1"}
    call("unshare", _NAMESPACES)
    for name, text in ids.items():
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)
    root = os.getcwd()
    call("mount", b"none", b"/", None, _MS_REC | _MS_PRIVATE, None)
    call("mount", b"none", root.encode(), b"tmpfs", _MS_NOSUID_NODEV, b"size=%d,nr_inodes=4096" % _FILES_BYTES)
    read_only = (ctypes.c_uint64 * 4)(_MOUNT_ATTR_RDONLY, 0, 0, 0)
    bound: list[str] = []
    for path in sorted({*_SEEN, sys.prefix, sys.base_prefix, *sys.path}):
        if not os.path.exists(path) or path.startswith(tuple(f"{folder}/" for folder in bound)):
            continue
        target = f"{root}{path}"
        os.makedirs(os.path.dirname(target), exist_ok=True)
        if os.path.islink(path) and path in _SEEN:
            os.symlink(os.readlink(path), target)
            continue
        os.mkdir(target) if os.path.isdir(path) else os.close(os.open(target, os.O_CREAT))
        call("mount", path.encode(), target.encode(), None, _MS_BIND | _MS_REC, None)
        call("syscall", _MOUNT_SETATTR, _AT_FDCWD, target.encode(), _AT_RECURSIVE, read_only, ctypes.c_size_t(32))
        bound.append(path)
    os.makedirs(f"{root}{root}", exist_ok=True)
    os.chroot(root)
    os.chdir(root)
    _go_on_in_child()  # it is the first process of its namespace: when it ends, all others are killed
    call("prctl", _PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    call("prctl", _PR_SET_DUMPABLE, 0, 0, 0, 0)
    _go_on_in_child()
    call("prctl", _PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    call("capset", (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)())


def _go_on_in_child() -> None:
    """Forks. The parent waits for the child, and ends."""
    child = os.fork()
    if child:
        os.waitpid(child, 0)
        os._exit(0)


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
    if request["isolated"]:
        isolate()
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
