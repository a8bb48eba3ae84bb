"""The power fails at every moment of a save, on a file system that keeps nothing that was not synced.

Calls of a save are recorded and made again on a model of a disk. Names reach it with the sync of their folder, or at
once, as journals do, or at once in subfolders alone; bytes with the sync of their file. What is on it after each call
is a folder to resume from.
"""

from __future__ import annotations

import os
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from ds_zo.checkpoint import files, manifest
from ds_zo.checkpoint.reader import open_folder
from tests.helpers.small_saves import save


@dataclass
class File:
    written: bytes = b""
    on_disk: bytes = b""


@dataclass
class Folder:
    names: dict[str, Any] = field(default_factory=dict)
    on_disk: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, path: Path) -> Folder:
        found = {
            inside.name: cls.of(inside) if inside.is_dir() else File(inside.read_bytes(), inside.read_bytes())
            for inside in path.iterdir()
        }
        return cls(found, dict(found))


class Disk:
    """What calls leave of a folder when the power fails."""

    def __init__(self, root: Path, *, at_once: Collection[str]) -> None:
        """`at_once`: where names reach the disk before a sync, in the `top` folder, in folders `inside` it, or both."""
        self.root, self.at_once = root, at_once
        self.top = Folder.of(root)
        self.open: dict[int, Any] = {}

    def call(self, name: str, args: tuple[Any, ...], result: Any) -> None:
        if name == "open":
            folder, base = self._place(args[0])
            if base and args[1] & os.O_CREAT:
                folder.names[base] = File()
            self.open[result] = folder.names[base] if base else folder
        elif name == "mkdir":
            folder, base = self._place(args[0])
            folder.names[base] = Folder()
        elif name in ("rename", "replace"):
            (old, a), (new, b) = self._place(args[0]), self._place(args[1])
            new.names[b] = old.names.pop(a)
        elif name == "write" and args[0] in self.open:
            self.open[args[0]].written += bytes(args[1])[:result]
        elif name == "remove":
            folder, base = self._place(args[0])
            gone = folder.names.pop(base, None)
            if isinstance(gone, Folder):
                gone.names.clear()
        elif name == "fsync":
            self._sync(self.open[args[0]])

    def _place(self, path: Path) -> tuple[Folder, str]:
        parts = Path(path).relative_to(self.root).parts
        folder = self.top
        for part in parts[:-1]:
            folder = folder.names[part]
        return folder, parts[-1] if parts else ""

    @staticmethod
    def _sync(found: Any) -> None:
        if isinstance(found, File):
            found.on_disk = found.written
        else:
            found.on_disk = dict(found.names)

    def leave(self, out: Path, folder: Folder | None = None) -> None:
        place = "top" if folder is None else "inside"
        folder = folder or self.top
        out.mkdir()
        for name, found in (folder.names if place in self.at_once else folder.on_disk).items():
            if isinstance(found, Folder):
                self.leave(out / name, found)
            else:
                (out / name).write_bytes(found.on_disk)


class RecordingOs:
    def __init__(self) -> None:
        self.calls: list[tuple[str, tuple[Any, ...], Any]] = []

    def __getattr__(self, name: str) -> Any:
        real = getattr(os, name)
        if name not in ("open", "write", "fsync", "mkdir", "rename", "replace"):
            return real

        def call(*args: Any) -> Any:
            result = real(*args)
            kept = tuple(bytes(a) if isinstance(a, memoryview) else a for a in args)
            self.calls.append((name, kept, result))
            return result

        return call


@pytest.mark.parametrize("at_once", [(), ("inside",), ("top", "inside")])
@pytest.mark.parametrize("tag", ["other", "first"])
def test_a_whole_checkpoint_is_left_at_every_call(
    tag: str, at_once: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saves = tmp_path / "saves"
    save(saves, "first", threads=1)
    disk = Disk(saves, at_once=at_once)
    recording, remove = RecordingOs(), files.remove

    def recorded_remove(path: Path, **last: Any) -> None:
        recording.calls.append(("remove", (path,), None))
        remove(path, **last)

    with monkeypatch.context() as patch:
        patch.setattr(files, "os", recording)
        patch.setattr(files, "remove", recorded_remove)
        save(saves, tag, threads=1)
    assert len(recording.calls) > 40
    for number, (name, args, result) in enumerate(recording.calls):
        disk.call(name, args, result)
        out = tmp_path / str(number)
        disk.leave(out)
        latest = (out / manifest.LATEST).read_text()
        open_folder(manifest.folder_of(out, latest), progress=False)
        for folder in out.iterdir():
            if manifest.is_checkpoint(folder) and manifest.WRITING not in folder.name:
                open_folder(folder, progress=False)
        whole = {"first"} | ({tag} if manifest.is_checkpoint(out / tag) else set())
        save(out, "after")  # goes on from what the power left, and clears it
        names = {path.name for path in out.iterdir() if not path.name.startswith(manifest.REPLACED)}
        assert names - {"first"} == {"after", "latest"} | whole - {"first"}
    assert latest == tag and {"first", tag} <= names
