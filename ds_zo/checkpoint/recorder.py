"""Writes a running engine's trajectory: in memory until a folder is known, then step by step to disk."""

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
    Point,
    Trajectory,
    TrajectoryFile,
    content_of,
    is_being_written,
    parse_trajectory,
    read_trajectory,
)

Header = dict[str, Any]
_OF_UPDATES = ("noise_version", "seed", "distribution", "num_directions", "num_groups")
"""Facts without which a row does not say what it did to the weights."""
_NOT_WRITABLE = (errno.EROFS, errno.EACCES, errno.EPERM)


class TrajectoryRecorder:
    """One run's steps. On a CUDA device a thread waits for each step's numbers, so that the engine does not: a step is
    on disk shortly after the device has finished it. On the CPU it is when `append` returns.

    Where the steps are written to is told by [Note: who owns a log].
    """

    def __init__(self, header: Callable[[], Header], *, step: int, base_sha256: str, on_device: bool) -> None:
        self._header = header
        self._lock = threading.Lock()
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="ds_zo-trajectory") if on_device else None
        self._last: Future[None] | None = None
        self._file: TrajectoryFile | None = None
        self._ended: TrajectoryFile | None = None
        """The log that `break_off` ended, until a later checkpoint is whole."""
        self._error: CheckpointError | None = None
        self._restart({"step": step, "sha256": base_sha256})

    def _restart(self, base: dict[str, Any]) -> None:
        """Another log. Only ids that one run alone has written tell of which steps a checkpoint is."""
        self.id = uuid.uuid4().hex
        self._base = base
        self._earlier: dict[str, int] = {}
        self._file = None
        self._waiting: list[torch.Tensor] = []
        """Steps since the base that are not on disk: no folder is known yet, or writing failed."""
        self._hashes: dict[int, str] = {}
        """Of the weights at steps that wait."""
        self._loaded_from: Path | None = None
        """Where an unsaved log is kept, from the load of a checkpoint to the first save."""

    def break_off(self, step: int) -> None:
        """Something else than a step changed the weights at `step`, which no row tells: what is recorded leads that far
        and no further. The next checkpoint starts a file of its own."""
        self.flush()
        with self._lock:
            if self._file is not None or self._loaded_from is not None:
                logger.warning(
                    "ds_zo: weights were changed by something else than a step, so "
                    f"{'the trajectory' if self._file is None else self._file.path} ends at step {step}; later steps "
                    "are recorded from the next checkpoint on (ds_zo.checkpoint.trajectory)"
                )
            if self._file is not None:
                self._close(self._ended)
                self._ended = self._file
            self._restart({"step": step, "sha256": ""})

    @property
    def follows_a_checkpoint(self) -> bool:
        """Whether steps from now on are recorded where they can be added to a checkpoint that is whole."""
        return self._loaded_from is not None or (self._file is not None and self._file.path.name == FILE)

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
            folder = self._loaded_from if self._file is None else self._file.path.parent
            try:
                if self._file is not None:
                    self._file.append(*self._waiting)
                    self._waiting = []
                elif folder is not None:
                    self._begin(folder)
            except OSError as error:
                if self._file is None and error.errno in _NOT_WRITABLE:
                    self._loaded_from = None
                    logger.warning(
                        f"ds_zo: {folder} was loaded from and can't be written to ({error.strerror}), so steps are "
                        "recorded in memory alone until the first save (ds_zo.checkpoint.trajectory)"
                    )
                else:
                    self._error = CheckpointError(f"{folder}: a step could not be recorded: {error}")

    def raise_error(self) -> None:
        """Raises, once, why steps are not on disk."""
        error, self._error = self._error, None
        if error is not None:
            raise error

    def flush(self) -> None:
        """Until every step made is recorded."""
        if self._last is not None:
            self._last.result()

    def prepare(self, folder: Path) -> None:
        """Before a checkpoint is written: a run that has no log on disk and none that it goes on from begins one."""
        self.flush()
        with self._lock:
            if self._file is None and self._loaded_from is None:
                try:
                    self._begin(folder.resolve())
                except OSError as error:
                    raise CheckpointError(
                        f"no trajectory could be begun in {folder}: {error}; name a folder that can be written to "
                        "(ds_zo.checkpoint.trajectory_dir)"
                    ) from error

    def complete(self, folder: Path, recorded_as: str, *, step: int, sha256: str | None) -> None:
        """A checkpoint of `step` is whole, whose run was `recorded_as` then: that log goes on in `folder`. The
        checkpoint stays whole if the trajectory can't be written: that error comes later."""
        folder = folder.resolve()
        with self._lock:
            try:
                if recorded_as == self.id:
                    if self._file is None:
                        self._begin(folder)
                    assert self._file is not None
                    self._file.append(*self._waiting)
                    self._waiting = []
                    log = self._file = _settle(self._file, folder, FILE)
                    if self._ended is not None and self._ended.path.name.startswith(UNSAVED):
                        self._ended = _settle(self._ended, folder, _free_name(folder / FILE))
                    self._close(self._ended)
                    self._ended = self._loaded_from = None
                elif self._ended is not None:  # since the snapshot was taken
                    log = self._ended = _settle(self._ended, folder, FILE)
                else:
                    return
                if sha256 is not None:
                    log.mark(step, sha256)
            except (OSError, CheckpointError) as error:
                self._error = CheckpointError(f"{folder}: a checkpoint could not be recorded: {error}")

    def resume(self, logs: Iterable[Trajectory], folder: Path, point: Point, *, newest: bool) -> torch.Tensor | None:
        """After the checkpoint `point` was loaded: the rows of later steps that `logs` hold, or None. `newest`: the
        caller wants the run as far as it came; otherwise the run branches off at `point`. Writes nothing."""
        self.flush()
        with self._lock:
            self._close(self._file)
            self._close(self._ended)
            self._ended = None
            header = self._header()
            fitting = []
            for found in logs:
                if found.leads_from(point) and _makes_the_same_updates(found.header, header):
                    fitting.append(found)
                elif found.end_step > point.step:
                    logger.warning(
                        f"ds_zo: {found.path} records another run than that of the checkpoint of step {point.step}, so "
                        f"its steps {found.first_step} to {found.end_step} are not made again; the file is kept"
                    )
            log = _longest(fitting, since=point.step) if newest else _of_earliest_base(fitting, step=point.step)
            if log is None:
                base = {"step": point.step, "sha256": point.sha256, "manifest_sha256": point.manifest_sha256}
                self._restart(base)
                self._earlier = {} if point.recorded_as is None else {point.recorded_as: point.step}
                self._loaded_from = folder.resolve()
                return None
            end_step = log.end_step if newest else point.step
            later = log.rows[point.step - log.first_step :] if newest else None
            if any(log.header[name] != header[name] for name in ("facts", "units")):
                logger.warning(
                    f"ds_zo: this run stores or rounds weights in another way than {log.path} was recorded with, so "
                    "later steps are recorded from the next checkpoint on (ds_zo.checkpoint.trajectory)"
                )
                self._restart({"step": end_step, "sha256": ""})
                return later
            self._restart(log.header["base"])
            self._earlier = {id: min(step, end_step) for id, step in {**log.earlier, log.id: end_step}.items()}
            self._waiting = list(log.rows[: end_step - log.first_step])
            self._hashes = {step: sha256 for step, sha256 in log.hashes.items() if step <= end_step}
            self._loaded_from = folder.resolve()
            return later

    # Files

    def _begin(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        header = {"id": self.id, "base": self._base, "earlier": self._earlier, **self._header()}
        content = content_of(header, self._waiting, self._hashes)
        self._file = TrajectoryFile(folder / f"{UNSAVED}{self.id[:8]}.bin", content)
        self._waiting, self._hashes = [], {}

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
            self._close(self._ended)


def read_logs(*folders: Path) -> list[Trajectory]:
    """Logs that a run which loads from the folders may go on from, a folder's own first."""
    found = []
    for folder in dict.fromkeys(folder.resolve() for folder in folders):
        for path in (folder / FILE, *sorted(folder.glob(f"{UNSAVED}*.bin"))):
            try:
                if path.name != FILE and is_being_written(path):
                    logger.warning(f"ds_zo: {path} belongs to a run that goes on, so its steps are not made again")
                    continue
                log = read_trajectory(path)
            except FileNotFoundError:
                continue
            except OSError as error:
                raise CheckpointError(
                    f"the steps recorded after a checkpoint must be readable, got {error}: permit it, or move the file "
                    f"elsewhere to go on without them ({path})"
                ) from error
            except CheckpointError as error:
                logger.warning(f"ds_zo: {error}: none of its steps is made again; the file is kept")
                continue
            for note in log.notes():
                logger.warning(f"ds_zo: {note}")
            found.append(log)
    return found


def _settle(log: TrajectoryFile, folder: Path, name: str) -> TrajectoryFile:
    """`log` as `folder / name`. Another run's file of that name is kept under another one, unless `log` has all of it.
    A folder that was saved to keeps its copy of `log`; from one that was only loaded from it goes away."""
    path = folder / name
    if log.path == path:
        return log
    content = log.content()
    steps = parse_trajectory(log.path, content)
    if path.exists() and not _has_all_of(path, steps):
        kept = path.with_name(_free_name(path))
        files.rename(path, kept)
        logger.warning(f"ds_zo: {path} is not the log of this run's steps: it is kept as {kept.name}")
    if log.path.parent == folder:
        log.rename(path)
        settled = log
    else:
        folder.mkdir(parents=True, exist_ok=True)
        settled = TrajectoryFile(path, content)
        log.close()
        if log.path.name.startswith(UNSAVED):
            files.remove(log.path)
    for unsaved in folder.glob(f"{UNSAVED}*.bin"):
        if _has_all_of(unsaved, steps):
            files.remove(unsaved)
    return settled


def _longest(logs: list[Trajectory], *, since: int) -> Trajectory | None:
    """The log with the most steps, if the others are parts of it; else the folder's own: which of two runs that were
    killed before they saved is meant, nobody has said."""
    longest = max(logs, key=lambda log: log.end_step, default=None)
    if longest is None or all(log.is_part_of(longest, since=since) for log in logs):
        return longest
    own = next((log for log in logs if log.path.name == FILE), None)
    others = [log for log in logs if own is None or not log.is_part_of(own, since=since)]
    logger.warning(
        f"ds_zo: {', '.join(str(log.path) for log in others)} hold other steps after step {since} than "
        f"{'one another' if own is None else own.path}: theirs are not made again; the files are kept"
    )
    return own


def _of_earliest_base(logs: list[Trajectory], *, step: int) -> Trajectory | None:
    for log in logs:
        if log.end_step > step:
            logger.warning(
                f"ds_zo: {log.path} holds the steps from {step} to {log.end_step}, which are not made again because a "
                "tag was named; the file is kept"
            )
    return min(logs, key=lambda log: log.first_step, default=None)


def _has_all_of(path: Path, log: Trajectory) -> bool:
    """Whether nothing is lost when `log` takes the place of the file."""
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
    """trajectory.1.bin, trajectory.2.bin, ..."""
    names = (f"{path.stem}.{i}{path.suffix}" for i in range(1, 10**6))
    return next(name for name in names if not path.with_name(name).exists())


def _makes_the_same_updates(there: Header, here: Header) -> bool:
    return all(there["facts"].get(name) == here["facts"][name] for name in _OF_UPDATES)
