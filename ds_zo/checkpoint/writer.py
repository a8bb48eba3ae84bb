"""Writes a snapshot so that a crash, a kill or a full disk at any moment leaves earlier checkpoints whole.

[Note: order of a save] The writer creates a folder with a temporary name. It writes and fsyncs each file there, and the
manifest last. It renames the folder to its tag, and then replaces the file `latest`. A reader uses only folders with a
manifest, and `latest` changes from one whole checkpoint to another. Several runs may save to one folder: see
[Note: owned folders].
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from deepspeed.utils import logger

from ds_zo.checkpoint import files
from ds_zo.checkpoint.encoding import encode
from ds_zo.checkpoint.errors import CheckpointError
from ds_zo.checkpoint.manifest import (
    FILE,
    LATEST,
    REMOVED,
    REPLACED,
    WRITING,
    Manifest,
    check_sizes,
    complete_tags,
    is_checkpoint,
    read_latest,
    read_manifest,
)
from ds_zo.checkpoint.owners import MARK, OwnedFolder, abandoned, is_owned
from ds_zo.checkpoint.progress import progress_bar
from ds_zo.checkpoint.snapshot import Snapshot
from ds_zo.checkpoint.workers import THREADS, in_threads

STATE = "state.json"
STATE_TENSORS = "state.safetensors"
_ATTEMPTS = 20


def weights_file(index: int) -> str:
    return f"weights-{index:05d}.safetensors"


@dataclass(frozen=True)
class SaveRequest:
    """The snapshot and the settings of one save."""

    save_dir: Path
    tag: str
    backend: str
    global_steps: int
    ds_zo_version: str
    snapshot: Snapshot
    state: Any
    """The engine's part of the state: plain data and tensors."""
    extra_files: Mapping[str, bytes] = field(default_factory=dict)
    latest: bool = True
    """Whether the file `latest` is to name this checkpoint."""
    keep_last: int | None = None
    """Number of complete checkpoints to keep in the folder; None keeps all."""
    progress: bool = True
    threads: int = THREADS
    on_complete: Callable[[Manifest], None] | None = None


def check_tag(tag: str) -> None:
    if not tag or tag.startswith(".") or "/" in tag or not tag.isprintable() or tag == LATEST or WRITING in tag:
        raise CheckpointError(
            "a checkpoint's tag is a folder name of printable characters that does not start with a dot nor contain "
            f"{WRITING}, got {tag!r}: pass another name (tag)"
        )


def write_checkpoint(save: SaveRequest) -> Manifest:
    """Writes the files in the order of [Note: order of a save].

    On any failure it releases the snapshot and removes the files that it wrote. It raises a `CheckpointError` for
    errors of the file system.
    """
    owned: OwnedFolder | None = None
    final = save.save_dir / save.tag
    try:
        files.make_save_folder(save.save_dir)
        owned = OwnedFolder(save.save_dir / f"{save.tag}{WRITING}{files.writer_id()}")
        manifest = _write_files(save, owned.path)
        files.sync_folder(owned.path)
        _check_whole(owned.path, manifest)
        _put_in_place(save, owned.path)
        if save.latest:
            files.replace_text(save.save_dir / LATEST, save.tag)
    except BaseException as error:
        if owned is not None:
            files.remove(owned.path, last=(MARK,))
        if isinstance(error, OSError):
            raise CheckpointError(
                f"checkpoint {final} was not written: {error}. Earlier checkpoints are whole; free disk space or name "
                "a folder that can be written to, and save again"
            ) from error
        raise
    finally:
        if owned is not None:
            owned.release(now_at=final)
        save.snapshot.abandon()
    with contextlib.suppress(OSError, CheckpointError):  # the checkpoint is whole, and the next save tries again
        _remove_leftovers(save)
    if save.on_complete is not None:
        save.on_complete(manifest)
    return manifest


def _check_whole(folder: Path, manifest: Manifest) -> None:
    """Checks, before the folder gets its tag, that no other program has removed files from it."""
    try:
        read_manifest(folder)
        check_sizes(folder, manifest)
    except CheckpointError as error:
        raise OSError(f"another program changed it while it was being written ({error})") from error


def _write_files(save: SaveRequest, folder: Path) -> Manifest:
    contents = save.snapshot.weights_files
    order = save.snapshot.order or range(len(contents))
    nbytes = sum(content.nbytes for content in contents)
    with progress_bar(f"saving {save.tag}", nbytes=nbytes, shown=save.progress) as advance:

        def write(index: int) -> tuple[str, files.Written]:
            name = weights_file(index)
            record = files.write_tensors(folder / name, contents[index].tensors(), progress=advance)
            contents[index].written()
            return name, record

        written = dict(in_threads(write, order, threads=save.threads, name="ds_zo-write"))
    tensors: dict[str, torch.Tensor] = {}
    state = {
        "engine": encode(save.state, tensors, at="engine"),
        "backend": encode(save.snapshot.state(), tensors, at="backend"),
    }
    on_host = {name: tensor.cpu() for name, tensor in tensors.items()}
    written[STATE_TENSORS] = files.write_tensors(folder / STATE_TENSORS, on_host)
    written[STATE] = files.write_json(folder / STATE, state)
    for name, content in save.extra_files.items():
        written[name] = files.write_bytes(folder / name, content)
    manifest = Manifest(
        backend=save.backend,
        tag=save.tag,
        global_steps=save.global_steps,
        saved_unix_s=time.time(),
        ds_zo_version=save.ds_zo_version,
        weights_sha256=files.hash_json(
            {content.key: written[weights_file(i)].sha256 for i, content in enumerate(contents) if content.key}
        ),
        files=dict(sorted(written.items())),
    )
    files.write_json(folder / FILE, manifest.to_json())
    return manifest


def _put_in_place(save: SaveRequest, temporary: Path) -> None:
    """Renames the temporary folder to its tag. If another run does this at the same time, the last one remains."""
    final = save.save_dir / save.tag
    # Readers use the folder `aside` where the folder of the tag is missing (`folder_of`).
    aside = save.save_dir / f"{REPLACED}{save.tag}-{files.writer_id()}"
    files.remove(aside, last=(FILE,))
    for attempt in range(_ATTEMPTS):
        may_try_again = attempt < _ATTEMPTS - 1
        if final.exists():
            try:
                files.rename(final, aside)
            except FileNotFoundError:
                if may_try_again:
                    continue
                raise
        try:
            files.rename(temporary, final)
        except BaseException as error:
            if may_try_again and isinstance(error, OSError) and error.errno in (errno.ENOTEMPTY, errno.EEXIST):
                files.remove(aside, last=(FILE,))
                continue
            if aside.exists() and not final.exists():
                os.rename(aside, final)
            raise
        files.remove(aside, last=(FILE,))
        return


_BEING_WRITTEN = re.compile(f".+{re.escape(WRITING)}\\d+")
_BEING_REMOVED = re.compile(f"{re.escape(REMOVED)}.+-\\d+")
_SET_ASIDE = re.compile(f"{re.escape(REPLACED)}(.+)-\\d+")


def _remove_leftovers(save: SaveRequest) -> None:
    """Removes files and folders that crashed saves left, and checkpoints beyond `keep_last`.

    A folder is removed only if its name and its content are ours: the mark of a writer, or a manifest. Folders that
    other runs are writing stay.
    """
    files.remove_abandoned(save.save_dir / LATEST)
    now_s = (save.save_dir / save.tag).stat().st_mtime
    for path in save.save_dir.iterdir():
        if _BEING_WRITTEN.fullmatch(path.name):
            with abandoned(path, now_s=now_s) as is_free:
                if is_free:
                    files.remove(path, last=(MARK,))
            _remove_if_empty(path)
        elif _BEING_REMOVED.fullmatch(path.name):
            if is_checkpoint(path):
                files.remove(path, last=(FILE,))
            _remove_if_empty(path)
        elif found := _SET_ASIDE.fullmatch(path.name):
            _remove_replaced(path, save.save_dir / found[1], now_s)
            _remove_if_empty(path)
    if save.keep_last is None:
        return
    for tag in complete_tags(save.save_dir)[save.keep_last :]:
        # The mark is read before `latest`, because a save writes `latest` before it removes its mark.
        if tag == save.tag or is_owned(save.save_dir / tag, now_s=now_s) or tag == read_latest(save.save_dir):
            continue
        gone = save.save_dir / f"{REMOVED}{tag}-{files.writer_id()}"
        try:
            files.rename(save.save_dir / tag, gone)  # a crash during the removal leaves no tag that lacks files
        except OSError:
            continue
        files.remove(gone, last=(FILE,))


def _remove_replaced(path: Path, final: Path, now_s: float) -> None:
    """Removes the folder `path` that a newer one of its tag, `final`, has replaced.

    After a crash that came before `final` was in place, renames `path` back. While another run replaces the tag, does
    nothing.
    """
    writing = [beside for beside in final.parent.iterdir() if beside.name.startswith(f"{final.name}{WRITING}")]
    if not is_checkpoint(path) or any(is_owned(folder, now_s=now_s) for folder in (final, *writing)):
        return
    if is_checkpoint(final):
        files.remove(path, last=(FILE,))
    elif not final.exists():
        files.rename(path, final)


def _remove_if_empty(path: Path) -> None:
    """Removes a folder whose run crashed before it had a mark or after it had none."""
    with contextlib.suppress(OSError):
        os.rmdir(path)


class BackgroundWriter:
    """Writes at most one checkpoint at a time in a thread. `raise_error` raises the error of the last one."""

    def __init__(self) -> None:
        self._starting = threading.Lock()
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self.waited_s = 0.0
        """Seconds, in sum, that callers waited for a save that was still being written."""
        self.write_s: list[float] = []
        """Seconds that each save took."""

    def start(self, save: SaveRequest) -> None:
        """Starts a save when the last one is done: two at a time would keep two snapshots in memory."""

        def run() -> None:
            start = time.perf_counter()
            try:
                write_checkpoint(save)
                self.write_s.append(time.perf_counter() - start)
            except BaseException as error:
                self._error = error
                logger.error(f"ds_zo: {error}")

        with self._starting:  # threads of a user may save at the same time
            self.wait()
            # The thread is not a daemon, so that an interpreter that ends waits for the save.
            thread = threading.Thread(target=run, name="ds_zo-checkpoint", daemon=False)
            try:
                thread.start()
            except RuntimeError:  # the system can start no more threads
                save.snapshot.abandon()
                raise
            self._thread = thread

    def wait(self) -> float:
        """Waits until no save is being written, and returns the seconds. Errors stay for `raise_error`."""
        start = time.perf_counter()
        thread = self._thread
        if thread is not None:
            thread.join()
            if self._thread is thread:
                self._thread = None
        waited_s = time.perf_counter() - start
        self.waited_s += waited_s
        return waited_s

    def raise_error(self) -> None:
        """Raises the error of the last save, once."""
        error, self._error = self._error, None
        if isinstance(error, CheckpointError):
            raise error
        if error is not None:
            raise CheckpointError(f"a checkpoint was not written in the background: {error!r}; save again") from error
