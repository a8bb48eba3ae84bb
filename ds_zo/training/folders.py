"""The folders that a run writes to, and the lock by which the output folder belongs to one run at a time."""

from __future__ import annotations

import argparse
import fcntl
import os
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from deepspeed.utils import logger

from ds_zo.training.errors import UserError

LOCK = ".lock"
"""This file of the output folder is locked during a run. The kernel releases the lock when the process ends."""


@contextmanager
def own_folders(args: argparse.Namespace) -> Iterator[None]:
    """Makes the folders that the run writes to, and keeps other runs out of its output folder.

    Raises if the run may not write there, or if another run does. The first rank calls this for all ranks.
    """
    path: Path = args.output_dir / LOCK
    _check_folders(args, path)
    with path.open("a+b") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            owner = file.read().decode().strip() or "another process"
            raise UserError(
                f"one run at a time writes to an output folder, got {args.output_dir}, where {owner} writes: wait for "
                "the end of that run, or name another folder (--output-dir)"
            ) from None
        except OSError as error:
            logger.warning(
                f"ds_zo: {path} cannot be locked ({error.strerror}), so another run in this folder would not be "
                "refused: name a folder of its own for each run (--output-dir)"
            )
        file.truncate(0)
        file.write(f"process {os.getpid()} of {socket.gethostname()}\n".encode())
        file.flush()
        yield


def _check_folders(args: argparse.Namespace, lock: Path) -> None:
    folders, files = {"--output-dir": args.output_dir}, {"--output-dir": lock}
    if args.results is not None:
        folders["--results"], files["--results"] = args.results.parent, args.results
    for flag, folder in folders.items():
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder):
                pass
        except OSError as error:
            text = f"the run must be able to write to {folder}, got {error.strerror}: name another folder ({flag})"
            raise UserError(text) from error
    for flag, file in files.items():
        try:
            if file.exists():
                file.open("ab").close()
        except OSError as error:
            text = f"the run must be able to write to {file}, got {error.strerror}: name another file ({flag})"
            raise UserError(text) from error
