"""Marks the folder that a save writes, so that no other run removes it.

[Note: owned folders] A save writes into a folder that holds a mark, a file on which the save has a lock. The mark stays
in the folder, also when it is renamed, until `latest` names it. No run removes a folder whose mark is locked, neither
as a leftover nor for `keep_last`. The kernel releases the lock when a process ends, in any way. Locks (`flock`) reach
other hosts on some file systems: NFS 4, GPFS, Lustre with `-o flock`. On other file systems, a folder of another host
counts as abandoned when nothing in it has changed for `STALE_S` seconds, by the file server's clock.
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
from ds_zo.config.json_text import parse_json

MARK = "writer.json"
STALE_S = 3600.0
_ATTEMPTS = 100


class OwnedFolder:
    """A new folder that belongs to this save until `release`. See [Note: owned folders]."""

    def __init__(self, path: Path) -> None:
        self.path = path
        content = json.dumps({"host": socket.gethostname(), "pid": os.getpid()}).encode()
        for attempt in range(_ATTEMPTS):
            files.remove(path)
            files.make_folder(path)
            try:
                lock = files.make_locked(path / MARK, content)
            except FileNotFoundError:  # another run removed the folder before it had a mark
                if attempt == _ATTEMPTS - 1:
                    raise
                continue
            if lock is not None:
                self._lock = lock
                return
        raise OSError(f"another run removed {path} {_ATTEMPTS} times")

    def release(self, *, now_at: Path) -> None:
        """Ends the ownership of the folder, whose path is `now_at`, and removes its mark."""
        mark = now_at / MARK
        with contextlib.suppress(OSError):
            if os.path.samestat(os.stat(mark), os.fstat(self._lock)):  # not the mark of a later save of this tag
                os.unlink(mark)
        os.close(self._lock)


@contextmanager
def abandoned(folder: Path, *, now_s: float) -> Iterator[bool]:
    """Yields whether the run that marked the folder has ended. Inside, no other run finds the folder abandoned.

    `now_s` is the time by the file server's clock.
    """
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
    """Whether a run is writing the folder."""
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
        is_local = not content or parse_json(content)["host"] == socket.gethostname()
    except (ValueError, KeyError, TypeError):  # the mark is not ours
        return False
    return is_local or _is_stale(folder, now_s)


def _is_stale(folder: Path, now_s: float) -> bool:
    try:
        changed_s = max(path.stat().st_mtime for path in (folder, *folder.iterdir()))
    except OSError:
        return False
    return now_s - changed_s > STALE_S
