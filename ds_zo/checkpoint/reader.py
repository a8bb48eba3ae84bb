"""Reads a checkpoint one tensor at a time, after the hashes of all its files were checked."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from ds_zo.checkpoint.encoding import decode
from ds_zo.checkpoint.errors import CheckpointError, reading_content
from ds_zo.checkpoint.files import TORCH_DTYPES
from ds_zo.checkpoint.layout import Form
from ds_zo.checkpoint.manifest import (
    LATEST,
    Manifest,
    check_hashes,
    check_sizes,
    folder_of,
    is_checkpoint,
    read_latest,
    read_manifest,
    suggest_complete,
)
from ds_zo.checkpoint.progress import progress_bar
from ds_zo.checkpoint.trajectory import CheckpointRef
from ds_zo.checkpoint.writer import STATE, STATE_TENSORS

_MAX_TAG_NBYTES = 255
"""File systems have no longer names."""


class Saved:
    """A checkpoint whose files were verified, open for reading."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self.folder = folder
        self.manifest = manifest
        with reading_content(folder, STATE):
            with safe_open(folder / STATE_TENSORS, framework="pt") as file:
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
            state = decode(json.loads((folder / STATE).read_text(encoding="utf-8")), tensors)
            self.engine_state: dict[str, Any] = dict(state["engine"])
            self.backend_state: dict[str, Any] = dict(state["backend"])
        self._file_of: dict[str, str] = {}
        for name in manifest.files:
            if name.startswith("weights-"):
                with reading_content(folder, name), safe_open(folder / name, framework="pt") as file:
                    self._file_of.update(dict.fromkeys(file.keys(), name))
        self._open: tuple[str, Any] | None = None

    def names(self) -> set[str]:
        return set(self._file_of)

    def tensor(self, name: str) -> torch.Tensor:
        """A copy in host memory. Reading is cheapest in the order of the files, because one file is open at a time."""
        file = self._file_of[name]
        if self._open is None or self._open[0] != file:
            self._open = (file, safe_open(self.folder / file, framework="pt").__enter__())
        tensor: torch.Tensor = self._open[1].get_tensor(name)
        return tensor

    def form(self, name: str) -> Form:
        """The dtype and shape of a tensor, read from its file's header."""
        with safe_open(self.folder / self._file_of[name], framework="pt") as file:
            found = file.get_slice(name)
            return TORCH_DTYPES[found.get_dtype()], tuple(found.get_shape())

    def text(self, name: str) -> str | None:
        """The text of one of the extra files; None if the checkpoint has no such file."""
        return (self.folder / name).read_text(encoding="utf-8") if name in self.manifest.files else None


def tag_to_load(load_dir: Path, tag: str | None) -> str | None:
    """`tag`, or the tag that the file `latest` names; None where there is no such file."""
    found = read_latest(load_dir) if tag is None else str(tag)
    if found is not None and (not found.isprintable() or len(found.encode()) > _MAX_TAG_NBYTES):
        raise CheckpointError(
            f"a checkpoint's tag is a folder name of at most {_MAX_TAG_NBYTES} bytes in printable characters, got "
            f"{found[:40]!r} of {len(found)} characters: pass the name of a folder in it (tag, or {load_dir / LATEST})"
        )
    return found


def point_of(saved: Saved) -> CheckpointRef:
    """A checkpoint of the ZO backend, as trajectories refer to it."""
    manifest, state = saved.manifest, saved.backend_state
    return CheckpointRef(
        step=state["step"],
        sha256=manifest.weights_sha256,
        manifest_sha256=manifest.to_json()["sha256"],
        log_id=saved.engine_state["trajectory"],
        has_all_weights=not state["omitted"],
    )


def is_ours(load_dir: Path, tag: str) -> bool:
    return is_checkpoint(folder_of(load_dir, tag))


def open_checkpoint(load_dir: Path, tag: str, *, verify: bool = True, progress: bool = True) -> Saved:
    """Opens a tag after verifying sizes and hashes. The error of a damaged checkpoint names a complete one, if any."""
    folder = folder_of(load_dir, tag)
    try:
        return open_folder(folder, verify=verify, progress=progress)
    except CheckpointError as error:
        raise CheckpointError(f"{error}; {suggest_complete(load_dir, but=tag)}") from error.__cause__


def open_folder(folder: Path, *, verify: bool = True, progress: bool = True) -> Saved:
    """Opens the folder of a checkpoint. With `verify` False, its hashes are not checked: another process did so."""
    manifest = read_manifest(folder)
    check_sizes(folder, manifest)
    if not verify:
        return Saved(folder, manifest)
    nbytes = sum(written.nbytes for written in manifest.files.values())
    with progress_bar(f"checking {folder.name}", nbytes=nbytes, shown=progress) as advance:
        check_hashes(folder, manifest, progress=advance)
    return Saved(folder, manifest)
