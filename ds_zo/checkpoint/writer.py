"""Writes a snapshot so that a crash, a kill or a full disk at any moment leaves the checkpoints that were there.

[Note: order of a save] Files under a temporary name, each fsynced; the manifest, last of them; the folder's rename;
then `latest`. A reader believes only in folders with a manifest, and `latest` changes from one whole checkpoint to
another.
"""

from __future__ import annotations

import contextlib
import os
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
    complete_tags,
    folder_of,
    read_latest,
)
from ds_zo.checkpoint.progress import progress_bar
from ds_zo.checkpoint.snapshot import Snapshot
from ds_zo.checkpoint.workers import THREADS, in_threads

STATE = "state.json"
STATE_TENSORS = "state.safetensors"


def weights_file(index: int) -> str:
    return f"weights-{index:05d}.safetensors"


@dataclass(frozen=True)
class Save:
    """One save as it was asked for."""

    save_dir: Path
    tag: str
    backend: str
    global_steps: int
    ds_zo_version: str
    snapshot: Snapshot
    state: Any
    """The engine's part: plain data and tensors, or a callable that gives it when it is written."""
    extra_files: Mapping[str, bytes] = field(default_factory=dict)
    latest: bool = True
    keep_last: int | None = None
    progress: bool = True
    threads: int = THREADS
    on_complete: Callable[[Manifest], None] | None = None


def check_tag(tag: str) -> None:
    if not tag or tag.startswith(".") or "/" in tag or "\0" in tag or tag == LATEST or WRITING in tag:
        raise CheckpointError(
            f"a checkpoint's tag is a folder name that does not start with a dot nor contain {WRITING}, got {tag!r} "
            "(tag)"
        )


def write_checkpoint(save: Save) -> Manifest:
    """See [Note: order of a save]. On any failure the snapshot is let go, what was written removed, and a
    `CheckpointError` says what failed."""
    temporary = save.save_dir / f"{save.tag}{WRITING}{os.getpid()}"
    try:
        files.make_save_folder(save.save_dir)
        files.remove(temporary)
        files.make_folder(temporary)
        manifest = _write_files(save, temporary)
        files.sync_folder(temporary)
        _put_in_place(save, temporary)
        if save.latest:
            files.replace_text(save.save_dir / LATEST, save.tag)
    except BaseException as error:
        files.remove(temporary)
        if isinstance(error, OSError):
            raise CheckpointError(
                f"checkpoint {save.save_dir / save.tag} was not written: {error}. Earlier checkpoints are whole; make "
                "room or name a folder that can be written, and save again"
            ) from error
        raise
    finally:
        save.snapshot.abandon()
    with contextlib.suppress(OSError, CheckpointError):  # the checkpoint is whole: what stays is only litter
        _tidy(save)
    if save.on_complete is not None:
        save.on_complete(manifest)
    return manifest


def _write_files(save: Save, folder: Path) -> Manifest:
    pieces = save.snapshot.pieces
    order = save.snapshot.order or range(len(pieces))
    nbytes = sum(piece.nbytes for piece in pieces)
    with progress_bar(f"saving {save.tag}", nbytes=nbytes, shown=save.progress) as advance:

        def write(index: int) -> tuple[str, files.Written]:
            name = weights_file(index)
            record = files.write_tensors(folder / name, pieces[index].tensors(), progress=advance)
            pieces[index].written()
            return name, record

        written = dict(in_threads(write, order, threads=save.threads, name="ds_zo-write"))
    tensors: dict[str, torch.Tensor] = {}
    engine = save.state() if callable(save.state) else save.state
    state = {
        "engine": encode(engine, tensors, at="engine"),
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
            {piece.key: written[weights_file(i)].sha256 for i, piece in enumerate(pieces) if piece.key}
        ),
        files=dict(sorted(written.items())),
    )
    files.write_json(folder / FILE, manifest.to_json())
    return manifest


def _put_in_place(save: Save, temporary: Path) -> None:
    final = save.save_dir / save.tag
    if not final.exists():
        files.rename(temporary, final)
        return
    # Readers look for the set-aside folder where the tag's own is missing (`folder_of`).
    aside = save.save_dir / f"{REPLACED}{save.tag}-{os.getpid()}"
    files.remove(aside)
    files.rename(final, aside)
    try:
        files.rename(temporary, final)
    except BaseException:
        if not final.exists():
            os.rename(aside, final)
        raise
    files.remove(aside)


def _tidy(save: Save) -> None:
    """Removes what crashes left, and checkpoints beyond `keep_last`."""
    for path in save.save_dir.iterdir():
        if WRITING in path.name or path.name.startswith(REMOVED):
            files.remove(path)
        elif path.name.startswith(REPLACED):
            tag = path.name.removeprefix(REPLACED).rpartition("-")[0]
            if folder_of(save.save_dir, tag) == path and not (save.save_dir / tag).exists():
                files.rename(path, save.save_dir / tag)
            else:
                files.remove(path)
    if save.keep_last is None:
        return
    tags = complete_tags(save.save_dir)
    spare = {save.tag, read_latest(save.save_dir)}
    for tag in tags[save.keep_last :]:
        if tag in spare:
            continue
        gone = save.save_dir / f"{REMOVED}{tag}-{os.getpid()}"
        try:
            files.rename(save.save_dir / tag, gone)  # so that a crash half-way leaves no tag that lacks files
        except OSError:
            continue
        files.remove(gone)


class Background:
    """At most one save at a time in a thread of its own; what went wrong there is raised here, later."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self.waited_s = 0.0
        """How long callers had to wait for a save that was still being written."""
        self.write_s: list[float] = []
        """How long each save took."""

    def start(self, save: Save) -> None:
        """Not before the last one is done: two at a time would hold two snapshots."""
        self.wait()

        def run() -> None:
            start = time.perf_counter()
            try:
                write_checkpoint(save)
                self.write_s.append(time.perf_counter() - start)
            except BaseException as error:
                self._error = error
                logger.error(f"ds_zo: {error}")

        # Not a daemon: an interpreter that ends lets the save finish.
        self._thread = threading.Thread(target=run, name="ds_zo-checkpoint", daemon=False)
        try:
            self._thread.start()
        except RuntimeError:  # the system has none left
            self._thread = None
            save.snapshot.abandon()
            raise

    def wait(self) -> float:
        """Until nothing is being written; returns for how long. Errors stay for `raise_error`."""
        start = time.perf_counter()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        waited_s = time.perf_counter() - start
        self.waited_s += waited_s
        return waited_s

    def raise_error(self) -> None:
        """Raises what the last save failed with, once."""
        error, self._error = self._error, None
        if isinstance(error, CheckpointError):
            raise error
        if error is not None:
            raise CheckpointError(f"a checkpoint could not be written in the background: {error!r}") from error
