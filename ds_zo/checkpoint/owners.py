"""Whose a folder is while a save writes it, so that no other run tidies it away.

[Note: owned folders] A save writes into a folder that holds a mark, a file on which the save has a lock. The mark stays
in the folder, through its rename, until `latest` names it. Tidying and `keep_last` leave a folder alone while its mark
is locked. The kernel gives the lock back when a process ends, however it ends. A run on another host is seen where the
file system carries locks (`flock`) between hosts: NFS 4, GPFS, Lustre with `-o flock`. Where it does not, a folder of
another host counts as abandoned when nothing in it has changed for `STALE_S`, by the file server's clock.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ds_zo.checkpoint import files

MARK = "writer.json"
STALE_S = 3600.0
_ATTEMPTS = 100


class OwnedFolder:
    """A new folder, this save's own until `release`. See [Note: owned folders]."""

    def __init__(self, path: Path) -> None:
        self.path = path
        content = json.dumps({"host": socket.gethostname(), "pid": os.getpid()}).encode()
        for attempt in range(_ATTEMPTS):
            files.remove(path)
            files.make_folder(path)
            try:
                lock = files.make_locked(path / MARK, content)
            except FileNotFoundError:  # tidied away by another run while it had no mark
                if attempt == _ATTEMPTS - 1:
                    raise
                continue
            if lock is not None:
                self._lock = lock
                return
        raise OSError(f"another run removes {path} again and again")

    def release(self, *, now_at: Path) -> None:
        """The folder, wherever it is by now, is nobody's."""
        mark = now_at / MARK
        with contextlib.suppress(OSError):
            if os.path.samestat(os.stat(mark), os.fstat(self._lock)):  # not the mark of a later save of this tag
                os.unlink(mark)
        os.close(self._lock)


@contextmanager
def abandoned(folder: Path, *, now_s: float) -> Iterator[bool]:
    """Whether the run that marked a folder is gone. Inside, no other run finds the same. `now_s`: the time by the file
    server's clock."""
    try:
        mark = os.open(folder / MARK, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        yield False
        return
    try:
        yield _is_abandoned(folder, mark, now_s)
    finally:
        os.close(mark)


def is_owned(folder: Path, *, now_s: float) -> bool:
    """A run is writing it."""
    with abandoned(folder, now_s=now_s) as is_free:
        return (folder / MARK).exists() and not is_free


def _is_abandoned(folder: Path, mark: int, now_s: float) -> bool:
    try:
        fcntl.flock(mark, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # the file system has no locks
        return _is_stale(folder, now_s)
    content = os.read(mark, 4096)
    try:
        is_local = not content or json.loads(content)["host"] == socket.gethostname()
    except (ValueError, KeyError, TypeError):  # not what we write
        return False
    return is_local or _is_stale(folder, now_s)


def _is_stale(folder: Path, now_s: float) -> bool:
    try:
        changed_s = max(path.stat().st_mtime for path in (folder, *folder.iterdir()))
    except OSError:
        return False
    return now_s - changed_s > STALE_S
