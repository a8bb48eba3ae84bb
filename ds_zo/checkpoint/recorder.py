"""Records the trajectory of a running engine: in memory until a folder is known, then step by step on disk."""

from __future__ import annotations

import errno
import threading
import uuid
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from deepspeed.utils import logger

from ds_zo.checkpoint import files
from ds_zo.checkpoint.errors import CheckpointError
from ds_zo.checkpoint.trajectory import (
    FILE,
    UNSAVED,
    CheckpointRef,
    Trajectory,
    TrajectoryFile,
    content_of,
    is_being_written,
    parse_trajectory,
    read_trajectory,
)
from ds_zo.streaming.streams import current_stream

Header = dict[str, Any]
_UPDATE_FACTS = ("noise_version", "seed", "distribution", "num_directions", "num_groups")
"""Facts of the header that determine, with a row, the update that the row stands for."""
_NOT_WRITABLE = (errno.EROFS, errno.EACCES, errno.EPERM)


class TrajectoryRecorder:
    """Records the steps of one run.

    On a CUDA device a thread waits for the numbers of each step, so that the engine does not. A step is on disk shortly
    after the device has finished it. On the CPU it is on disk when `append` returns. [Note: who owns a log] says which
    file a run writes to.
    """

    def __init__(self, header: Callable[[], Header], *, step: int, base_sha256: str, on_device: bool) -> None:
        self._header = header
        self._lock = threading.Lock()
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="ds_zo-trajectory") if on_device else None
        self._last: Future[None] | None = None
        self._file: TrajectoryFile | None = None
        self._ended_file: TrajectoryFile | None = None
        """The file of the log that `end_log` ended, until a later checkpoint is complete; None without one."""
        self._error: CheckpointError | None = None
        self._start_log({"step": step, "sha256": base_sha256})

    def _start_log(self, base: dict[str, Any]) -> None:
        """Starts a log with a new id. An id that only one run has written tells which steps a checkpoint contains."""
        self.id = uuid.uuid4().hex
        self._base = base
        self._earlier: dict[str, int] = {}
        self._file = None
        self._unwritten: list[torch.Tensor] = []
        """Steps after the base that are not on disk: no folder is known yet, or writing failed."""
        self._hashes: dict[int, str] = {}
        """Hashes of the weights at such steps, by step."""
        self._loaded_folder: Path | None = None
        """Folder of the unsaved log, from the load of a checkpoint to the first save; None at other times."""

    def end_log(self, step: int) -> None:
        """Ends the log at `step`, where the weights were changed by something else than a step.

        No row describes such a change, so later steps can't be replayed from this log. The next checkpoint starts a
        new file.
        """
        self.flush()
        with self._lock:
            if self._file is not None or self._loaded_folder is not None:
                logger.warning(
                    "ds_zo: the weights were changed by something else than a step, so "
                    f"{'the trajectory' if self._file is None else self._file.path} ends at step {step}; later steps "
                    "are recorded from the next checkpoint on (ds_zo.checkpoint.trajectory)"
                )
            if self._file is not None:
                self._close(self._ended_file)
                self._ended_file = self._file
            self._start_log({"step": step, "sha256": ""})

    @property
    def first_step(self) -> int:
        """The step of the weights that the log starts from."""
        return int(self._base["step"])

    @property
    def follows_a_checkpoint(self) -> bool:
        """Whether the steps from now on can be replayed from a complete checkpoint."""
        return self._loaded_folder is not None or (self._file is not None and self._file.path.name == FILE)

    def append(self, row: torch.Tensor) -> None:
        """Records a step. An error is raised by `raise_error`, and writing is tried again with the next step."""
        if self._pool is None:
            self._record(row.detach().cpu().clone())
            return
        copy = torch.empty(row.shape, dtype=row.dtype, pin_memory=True)
        copy.copy_(row, non_blocking=True)
        copied = current_stream(row.device).recorded()

        def run() -> None:
            copied.synchronize()
            self._record(copy.clone())  # rows may stay in memory for long; the pinned memory is freed for later rows

        self._last = self._pool.submit(run)

    def _record(self, row: torch.Tensor) -> None:
        with self._lock:
            self._unwritten.append(row)
            folder = self._loaded_folder if self._file is None else self._file.path.parent
            try:
                if self._file is not None:
                    self._file.append(*self._unwritten)
                    self._unwritten = []
                elif folder is not None:
                    self._create_file(folder)
            except OSError as error:
                if self._file is None and error.errno in _NOT_WRITABLE:
                    self._loaded_folder = None
                    logger.warning(
                        f"ds_zo: the folder loaded from can't be written to ({error.strerror}), so steps are recorded "
                        f"in memory alone until the first save: {folder} (ds_zo.checkpoint.trajectory)"
                    )
                else:
                    self._error = CheckpointError(
                        f"a step could not be recorded: {error}; free disk space, and it is written with the next step "
                        f"({folder})"
                    )

    def raise_error(self) -> None:
        """Raises, once, the error that kept steps from the disk."""
        error, self._error = self._error, None
        if error is not None:
            raise error

    def flush(self) -> None:
        """Waits until every step made is recorded."""
        if self._last is not None:
            self._last.result()

    def prepare(self, folder: Path) -> None:
        """Creates the file of a run that has none and continues none, before its first checkpoint is written."""
        self.flush()
        with self._lock:
            if self._file is None and self._loaded_folder is None:
                try:
                    self._create_file(folder.resolve())
                except OSError as error:
                    raise CheckpointError(
                        f"a trajectory needs a folder that can be written to, got {folder}: {error}; name another "
                        "folder (ds_zo.checkpoint.trajectory_dir)"
                    ) from error

    def complete(self, folder: Path, log_id: str, *, step: int, sha256: str | None) -> None:
        """Moves the log `log_id` to `folder`, where a checkpoint of `step` with that log is now complete.

        If the trajectory can't be written the checkpoint stays whole, and `raise_error` raises the error.
        """
        folder = folder.resolve()
        with self._lock:
            try:
                if log_id == self.id:
                    if self._file is None:
                        self._create_file(folder)
                    assert self._file is not None
                    self._file.append(*self._unwritten)
                    self._unwritten = []
                    log = self._file = _move_log(self._file, folder, FILE)
                    if self._ended_file is not None and self._ended_file.path.name.startswith(UNSAVED):
                        self._ended_file = _move_log(self._ended_file, folder, _free_name(folder / FILE))
                    self._close(self._ended_file)
                    self._ended_file = self._loaded_folder = None
                elif self._ended_file is not None:  # `end_log` was called after the snapshot was made
                    log = self._ended_file = _move_log(self._ended_file, folder, FILE)
                else:
                    return
                if sha256 is not None:
                    log.add_hash(step, sha256)
            except (OSError, CheckpointError) as error:
                self._error = CheckpointError(
                    f"a checkpoint could not be recorded: {error}; free disk space and save again ({folder})"
                )

    def resume(
        self, logs: Iterable[Trajectory], folder: Path, point: CheckpointRef, *, newest: bool
    ) -> torch.Tensor | None:
        """Continues the log of the loaded checkpoint `point`, and returns the rows of later steps in `logs`, or None.

        With `newest` the run continues at its last recorded step; without it, at `point`. Writes no file.
        """
        self.flush()
        with self._lock:
            self._close(self._file)
            self._close(self._ended_file)
            self._ended_file = None
            header = self._header()
            fitting = []
            for found in logs:
                if found.continues(point) and _makes_the_same_updates(found.header, header):
                    fitting.append(found)
                elif found.end_step > point.step:
                    logger.warning(
                        f"ds_zo: {found.path} records another run than that of the checkpoint of step {point.step}, so "
                        f"its steps {found.first_step} to {found.end_step} are not replayed; the file is kept"
                    )
            log = _longest(fitting, since=point.step) if newest else _of_earliest_base(fitting, step=point.step)
            if log is None:
                base = {"step": point.step, "sha256": point.sha256, "manifest_sha256": point.manifest_sha256}
                self._start_log(base)
                self._earlier = {} if point.log_id is None else {point.log_id: point.step}
                self._loaded_folder = folder.resolve()
                return None
            end_step = log.end_step if newest else point.step
            later = log.rows[point.step - log.first_step :] if newest else None
            if any(log.header[name] != header[name] for name in ("facts", "units")):
                logger.warning(
                    f"ds_zo: this run stores or rounds weights in another way than {log.path} was recorded with, so "
                    "later steps are recorded from the next checkpoint on (ds_zo.checkpoint.trajectory)"
                )
                self._start_log({"step": end_step, "sha256": ""})
                return later
            self._start_log(log.header["base"])
            self._earlier = {id: min(step, end_step) for id, step in {**log.earlier, log.id: end_step}.items()}
            self._unwritten = list(log.rows[: end_step - log.first_step])
            self._hashes = {step: sha256 for step, sha256 in log.hashes.items() if step <= end_step}
            self._loaded_folder = folder.resolve()
            return later

    # Files

    def _create_file(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        header = {"id": self.id, "base": self._base, "earlier": self._earlier, **self._header()}
        content = content_of(header, self._unwritten, self._hashes)
        self._file = TrajectoryFile(folder / f"{UNSAVED}{self.id[:8]}.bin", content)
        self._unwritten, self._hashes = [], {}

    @staticmethod
    def _close(log: TrajectoryFile | None) -> None:
        if log is not None:
            log.close()

    def close(self) -> None:
        try:
            self.flush()
        finally:
            if self._pool is not None:
                self._pool.shutdown()
            self._close(self._file)
            self._close(self._ended_file)


def read_logs(*folders: Path) -> list[Trajectory]:
    """The logs in `folders` that a run may continue after a load, `trajectory.bin` of each folder first."""
    found = []
    for folder in dict.fromkeys(folder.resolve() for folder in folders):
        for path in (folder / FILE, *sorted(folder.glob(f"{UNSAVED}*.bin"))):
            try:
                if path.name != FILE and is_being_written(path):
                    logger.warning(f"ds_zo: {path} belongs to a run that is still running: its steps are not replayed")
                    continue
                log = read_trajectory(path)
            except FileNotFoundError:
                continue
            except OSError as error:
                raise CheckpointError(
                    f"the steps recorded after a checkpoint must be readable, got {error}: make the file readable, or "
                    f"move the file elsewhere to continue without them ({path})"
                ) from error
            except CheckpointError as error:
                logger.warning(f"ds_zo: {error}: none of its steps are replayed; the file is kept")
                continue
            for text in log.warnings():
                logger.warning(f"ds_zo: {text}")
            found.append(log)
    return found


def _move_log(log: TrajectoryFile, folder: Path, name: str) -> TrajectoryFile:
    """Makes `log` the file `folder / name`.

    Another run's file of that name is renamed, unless `log` contains all of it. If `log` was in another folder, its
    file there stays when that folder was saved to, and is removed when it was only loaded from.
    """
    path = folder / name
    if log.path == path:
        return log
    content = log.content()
    steps = parse_trajectory(log.path, content)
    if path.exists() and not _has_all_of(path, steps):
        kept = path.with_name(_free_name(path))
        files.rename(path, kept)
        logger.warning(f"ds_zo: {path} holds other steps than this run's: it is kept as {kept.name}")
    if log.path.parent == folder:
        log.rename(path)
        moved = log
    else:
        folder.mkdir(parents=True, exist_ok=True)
        moved = TrajectoryFile(path, content)
        log.close()
        if log.path.name.startswith(UNSAVED):
            files.remove(log.path)
    for unsaved in folder.glob(f"{UNSAVED}*.bin"):
        if _has_all_of(unsaved, steps):
            files.remove(unsaved)
    return moved


def _longest(logs: list[Trajectory], *, since: int) -> Trajectory | None:
    """The log with the most steps, if all other logs are parts of it; else `trajectory.bin` or None.

    Two runs that were killed before they saved leave two logs, and nothing says which of them is to be continued.
    """
    longest = max(logs, key=lambda log: log.end_step, default=None)
    if longest is None or all(log.is_part_of(longest, since=since) for log in logs):
        return longest
    own = next((log for log in logs if log.path.name == FILE), None)
    others = [log for log in logs if own is None or not log.is_part_of(own, since=since)]
    logger.warning(
        f"ds_zo: {', '.join(str(log.path) for log in others)} hold other steps after step {since} than "
        f"{'one another' if own is None else own.path}: their steps are not replayed; the files are kept"
    )
    return own


def _of_earliest_base(logs: list[Trajectory], *, step: int) -> Trajectory | None:
    for log in logs:
        if log.end_step > step:
            logger.warning(
                f"ds_zo: {log.path} holds the steps from {step} to {log.end_step}, which are not replayed: a tag "
                "was named, or HF Trainer continues at its own step; the file is kept"
            )
    return min(logs, key=lambda log: log.first_step, default=None)


def _has_all_of(path: Path, log: Trajectory) -> bool:
    """Whether `log` contains everything that the file at `path` does."""
    try:
        if is_being_written(path):
            return False
        old = read_trajectory(path)
    except (CheckpointError, OSError):
        return False
    return (
        old.damage is None
        and old.header["base"] == log.header["base"]
        and old.hashes.items() <= log.hashes.items()
        and old.is_part_of(log, since=old.first_step)
    )


def _free_name(path: Path) -> str:
    """The first of trajectory.1.bin, trajectory.2.bin, ... that does not exist beside `path`."""
    names = (f"{path.stem}.{i}{path.suffix}" for i in range(1, 10**6))
    return next(name for name in names if not path.with_name(name).exists())


def _makes_the_same_updates(there: Header, here: Header) -> bool:
    return all(there["facts"].get(name) == here["facts"][name] for name in _UPDATE_FACTS)
