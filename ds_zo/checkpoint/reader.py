"""Reads a checkpoint one tensor at a time, after every byte of it was found to be what was written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from ds_zo.checkpoint.encoding import decode
from ds_zo.checkpoint.errors import CheckpointError, taking_apart
from ds_zo.checkpoint.files import TORCH_DTYPES
from ds_zo.checkpoint.layout import Form
from ds_zo.checkpoint.manifest import (
    Manifest,
    check_hashes,
    check_sizes,
    folder_of,
    is_checkpoint,
    offer,
    read_latest,
    read_manifest,
)
from ds_zo.checkpoint.progress import progress_bar
from ds_zo.checkpoint.trajectory import Point
from ds_zo.checkpoint.writer import STATE, STATE_TENSORS


class Saved:
    """A verified checkpoint."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self.folder = folder
        self.manifest = manifest
        with taking_apart(folder, STATE):
            with safe_open(folder / STATE_TENSORS, framework="pt") as file:
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
            state = decode(json.loads((folder / STATE).read_text(encoding="utf-8")), tensors)
            self.engine_state: dict[str, Any] = dict(state["engine"])
            self.backend_state: dict[str, Any] = dict(state["backend"])
        self._file_of: dict[str, str] = {}
        for name in manifest.files:
            if name.startswith("weights-"):
                with taking_apart(folder, name), safe_open(folder / name, framework="pt") as file:
                    self._file_of.update(dict.fromkeys(file.keys(), name))
        self._open: tuple[str, Any] | None = None

    def names(self) -> set[str]:
        return set(self._file_of)

    def tensor(self, name: str) -> torch.Tensor:
        """A copy in host memory. Cheapest when asked for in the order of the files."""
        file = self._file_of[name]
        if self._open is None or self._open[0] != file:
            self._open = (file, safe_open(self.folder / file, framework="pt").__enter__())
        tensor: torch.Tensor = self._open[1].get_tensor(name)
        return tensor

    def form(self, name: str) -> Form:
        """Nothing but the file's header is read."""
        with safe_open(self.folder / self._file_of[name], framework="pt") as file:
            found = file.get_slice(name)
            return TORCH_DTYPES[found.get_dtype()], tuple(found.get_shape())

    def text(self, name: str) -> str | None:
        """One of the extra files, None where there is none."""
        return (self.folder / name).read_text(encoding="utf-8") if name in self.manifest.files else None


def tag_to_load(load_dir: Path, tag: str | None) -> str | None:
    """The tag asked for, or what `latest` names; None where there is no `latest`."""
    return read_latest(load_dir) if tag is None else str(tag)


def point_of(saved: Saved) -> Point:
    """A checkpoint of ZO, as trajectories refer to it."""
    manifest, state = saved.manifest, saved.backend_state
    return Point(
        step=state["step"],
        sha256=manifest.weights_sha256,
        manifest_sha256=manifest.to_json()["sha256"],
        recorded_as=saved.engine_state["trajectory"],
        has_all_weights=not state["omitted"],
    )


def is_ours(load_dir: Path, tag: str) -> bool:
    return is_checkpoint(folder_of(load_dir, tag))


def open_checkpoint(load_dir: Path, tag: str, *, verify: bool = True, progress: bool = True) -> Saved:
    """Verifies sizes and hashes before anything is used; a damaged checkpoint is named, and another one offered."""
    folder = folder_of(load_dir, tag)
    try:
        return open_folder(folder, verify=verify, progress=progress)
    except CheckpointError as error:
        raise CheckpointError(f"{error}; {offer(load_dir, but=tag)}") from error.__cause__


def open_folder(folder: Path, *, verify: bool = True, progress: bool = True) -> Saved:
    """`verify` False trusts that another process has read every byte."""
    manifest = read_manifest(folder)
    check_sizes(folder, manifest)
    if not verify:
        return Saved(folder, manifest)
    nbytes = sum(written.nbytes for written in manifest.files.values())
    with progress_bar(f"checking {folder.name}", nbytes=nbytes, shown=progress) as advance:
        check_hashes(folder, manifest, progress=advance)
    return Saved(folder, manifest)
