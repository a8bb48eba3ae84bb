"""Writes a running engine's trajectory: in memory until a folder is known, then step by step to disk."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from deepspeed.utils import logger

from ds_zo.checkpoint.errors import CheckpointError
from ds_zo.checkpoint.trajectory import FILE, Trajectory, TrajectoryFile, read_trajectory

Header = dict[str, Any]
_OF_UPDATES = ("noise_version", "seed", "distribution", "num_directions", "num_groups")
"""Facts without which a row does not say what it did to the weights."""


class Recorder:
    """One run's steps. On a CUDA device a thread waits for each step's numbers, so that the engine does not: a step is
    on disk shortly after the device has finished it. On the CPU it is when `append` returns."""

    def __init__(self, header: Callable[[], Header], *, step: int, base_sha256: str, on_device: bool) -> None:
        self._header = header
        self._lock = threading.Lock()
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="ds_zo-trajectory") if on_device else None
        self._last: Future[None] | None = None
        self._file: TrajectoryFile | None = None
        self._waiting: list[torch.Tensor] = []
        """Steps that are not on disk: no folder is known yet, or writing failed."""
        self._error: CheckpointError | None = None
        self._restart(step, base_sha256)

    def _restart(self, step: int, base_sha256: str) -> None:
        self.id = uuid.uuid4().hex
        self._base = {"step": step, "sha256": base_sha256}

    def break_off(self, step: int) -> None:
        """Something else than a step changed the weights at `step`, which no row tells: what is recorded leads that far
        and no further. The next checkpoint starts a file of its own."""
        self.flush()
        with self._lock:
            if self._file is not None:
                logger.warning(
                    f"ds_zo: weights were changed by something else than a step, so {self._file.path} ends at step "
                    f"{step}; later steps are recorded from the next checkpoint on (ds_zo.checkpoint.trajectory)"
                )
                self._file.close()
            self._file, self._waiting = None, []
            self._restart(step, "")

    @property
    def path(self) -> Path | None:
        return None if self._file is None else self._file.path

    def append(self, row: torch.Tensor) -> None:
        """A step was logged. What goes wrong is raised by `raise_error`, and tried again with the next step."""
        if self._pool is None:
            self._take(row.detach().cpu().clone())
            return
        copy = torch.empty(row.shape, dtype=row.dtype, pin_memory=True)
        copy.copy_(row, non_blocking=True)
        copied = torch.cuda.Event()
        copied.record()

        def run() -> None:
            copied.synchronize()
            self._take(copy.clone())  # steps may wait here for a folder for long; pinned memory is for the next ones

        self._last = self._pool.submit(run)

    def _take(self, row: torch.Tensor) -> None:
        with self._lock:
            self._waiting.append(row)
            if self._file is not None:
                try:
                    self._file.append(*self._waiting)
                    self._waiting = []
                except OSError as error:
                    self._error = CheckpointError(f"{self._file.path}: a step could not be recorded: {error}")

    def raise_error(self) -> None:
        """Raises, once, why steps are not on disk."""
        error, self._error = self._error, None
        if error is not None:
            raise error

    def flush(self) -> None:
        """Until every step made is recorded."""
        if self._last is not None:
            self._last.result()

    def start(self, folder: Path) -> None:
        """From now on to disk, with every step since the base. Nothing if that is so already."""
        self.flush()
        with self._lock:
            if self._file is not None:
                return
            folder.mkdir(parents=True, exist_ok=True)
            self._set_aside(folder / FILE)
            self._file = TrajectoryFile(folder / FILE, header=self._full_header())
            self._file.append(*self._waiting)
            self._waiting = []

    def _full_header(self) -> Header:
        return {"id": self.id, "base": self._base, **self._header()}

    def mark(self, step: int, sha256: str) -> None:
        """A checkpoint of `step` is whole. It stays so if the trajectory can't say it: that error comes later."""
        with self._lock:
            if self._file is not None:
                try:
                    self._file.mark(step, sha256)
                except OSError as error:
                    self._error = CheckpointError(f"{self._file.path}: a checkpoint could not be recorded: {error}")

    def resume(
        self, folder: Path, *, step: int, sha256: str, recorded_as: str | None, newest: bool
    ) -> torch.Tensor | None:
        """After a checkpoint of `step` was loaded: the rows of later steps that a crash left here, or None. `newest`:
        the caller wants the run as far as it came; otherwise the run branches off at `step`."""
        self.flush()
        with self._lock:
            if self._file is not None:
                self._file.close()
            self._file, self._waiting = None, []
            path = folder / FILE
            old, header = _read_if_whole(path), self._header()
            is_ours = old is not None and old.id == recorded_as and old.first_step <= step <= old.end_step
            if old is None or not is_ours or not _makes_the_same_updates(old.header, header):
                folder.mkdir(parents=True, exist_ok=True)
                self._set_aside(path)
                self._restart(step, sha256)
                self._file = TrajectoryFile(path, header=self._full_header())
                return None
            if any(old.header[name] != header[name] for name in ("facts", "units")):
                logger.warning(
                    f"ds_zo: this run stores or rounds weights in another way than {path} was recorded with, so later "
                    "steps are recorded from the next checkpoint on (ds_zo.checkpoint.trajectory)"
                )
                self._restart(old.end_step if newest else step, "")
                return old.rows[step - old.first_step :] if newest else None
            if newest:
                self.id, self._base = old.id, old.header["base"]
                self._file = TrajectoryFile(path, keep_nbytes=old.nbytes)
                return old.rows[step - old.first_step :]
            self._branch(path, old, step)
            return None

    def _branch(self, path: Path, old: Trajectory, step: int) -> None:
        self._restart(0, "")
        self._base = old.header["base"]
        self._set_aside(path)
        self._file = TrajectoryFile(path, header=self._full_header())
        self._file.append(*old.rows[: step - old.first_step])
        for at, sha256 in old.hashes.items():
            if at <= step:
                self._file.mark(at, sha256)

    @staticmethod
    def _set_aside(path: Path) -> None:
        """Another run's file, or this one's other branch, is kept under another name."""
        if path.exists():
            number = next(i for i in range(1, 10**6) if not path.with_name(f"{path.stem}.{i}{path.suffix}").exists())
            path.rename(path.with_name(f"{path.stem}.{number}{path.suffix}"))

    def close(self) -> None:
        try:
            self.flush()
        finally:
            if self._pool is not None:
                self._pool.shutdown()
            if self._file is not None:
                self._file.close()


def _makes_the_same_updates(there: Header, here: Header) -> bool:
    return all(there["facts"].get(name) == here["facts"][name] for name in _OF_UPDATES)


def _read_if_whole(path: Path) -> Trajectory | None:
    try:
        return read_trajectory(path)
    except (FileNotFoundError, CheckpointError):
        return None
