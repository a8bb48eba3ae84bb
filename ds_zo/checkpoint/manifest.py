"""The manifest of a checkpoint. A folder with one is complete, and the hashes in it show damage."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ds_zo.checkpoint.errors import CheckpointError, reading_content
from ds_zo.checkpoint.files import Written, hash_json, sha256_of
from ds_zo.checkpoint.workers import in_threads
from ds_zo.config.json_text import check_file_names, parse_json

FORMAT = "ds_zo checkpoint"
VERSION = 1
FILE = "manifest.json"
LATEST = "latest"
REPLACED = ".replaced-"
"""Prefix of the name of a tag's folder while a new folder of the same tag replaces it."""
WRITING = ".writing-"
"""Stands between the tag and the writer's id in the name of a folder that is being written.

The tag comes first because HF Trainer looks for `global_step*` before it calls us. It then finds the folder, and we can
report it as unfinished."""
REMOVED = ".removed-"
"""Prefix of the name of a folder that is being deleted."""


@dataclass(frozen=True)
class Manifest:
    backend: str
    tag: str
    global_steps: int
    saved_unix_s: float
    ds_zo_version: str
    weights_sha256: str
    """Hash over the hashes of all weights files with a key. It does not depend on the order of files."""
    files: Mapping[str, Written]

    def to_json(self) -> dict[str, Any]:
        body = {"format": FORMAT, "version": VERSION, **asdict(self)}
        return {**body, "sha256": hash_json(body)}


def is_checkpoint(folder: Path) -> bool:
    """Whether the folder is a complete checkpoint. The manifest is written last."""
    return (folder / FILE).is_file()


def read_manifest(folder: Path) -> Manifest:
    """Reads the manifest, and no other file. Raises where it is damaged or of a newer format."""
    path = folder / FILE
    try:
        body = parse_json(path.read_text(encoding="utf-8"))
        found = body.pop("sha256")
        version, kind, computed = body["version"], body["format"], hash_json(body)
    except FileNotFoundError:
        raise CheckpointError(
            f"no checkpoint of ds_zo in {folder}, which has neither {LATEST} nor {FILE}: name a folder that an engine "
            "of ds_zo saved to, or the folder of a tag in it"
        ) from None
    except OSError as error:
        raise CheckpointError(f"checkpoint {folder} can't be read: {error}; make it readable") from None
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise CheckpointError(f"checkpoint {folder} is damaged: {FILE} is not what was written ({error})") from None
    if kind == FORMAT and isinstance(version, int) and version > VERSION:
        raise CheckpointError(
            f"this ds_zo reads checkpoint formats up to {VERSION}, got {version}: load it with ds_zo "
            f"{body.get('ds_zo_version', 'of a later version')} or later ({folder})"
        )
    if kind != FORMAT or found != computed:
        raise CheckpointError(f"checkpoint {folder} is damaged: {FILE} does not match its own hash")
    with reading_content(folder, FILE):
        manifest = Manifest(
            backend=body["backend"],
            tag=body["tag"],
            global_steps=body["global_steps"],
            saved_unix_s=body["saved_unix_s"],
            ds_zo_version=body["ds_zo_version"],
            weights_sha256=body["weights_sha256"],
            files={name: Written(of["nbytes"], of["sha256"]) for name, of in body["files"].items()},
        )
        _check_types(manifest)
    return manifest


def _check_types(manifest: Manifest) -> None:
    texts = (manifest.backend, manifest.tag, manifest.ds_zo_version, manifest.weights_sha256)
    written = manifest.files.values()
    if not all(isinstance(text, str) for text in (*texts, *(one.sha256 for one in written))):
        raise TypeError("a value that should be text is of another type")
    if not all(type(number) is int for number in (manifest.global_steps, *(one.nbytes for one in written))):
        raise TypeError("a value that should be a whole number is of another type")
    if not isinstance(manifest.saved_unix_s, (int, float)):
        raise TypeError("saved_unix_s is not a number")
    check_file_names(manifest.files)


def check_sizes(folder: Path, manifest: Manifest) -> None:
    for name, written in manifest.files.items():
        path = folder / name
        if not path.is_file():
            raise CheckpointError(f"checkpoint {folder} is damaged: {name} is missing")
        if path.stat().st_size != written.nbytes:
            raise CheckpointError(
                f"checkpoint {folder} is damaged: {name} should have {written.nbytes} bytes and has "
                f"{path.stat().st_size}"
            )


def check_hashes(folder: Path, manifest: Manifest, *, progress: Callable[[int], None]) -> None:
    """Compares the hash of every file with the manifest's, several files at a time."""

    def check(name: str) -> str | None:
        try:
            good = sha256_of(folder / name, progress=progress) == manifest.files[name].sha256
        except OSError as error:
            return f"{name} can't be read ({error})"
        return None if good else f"{name} does not have the hash it was written with"

    wrong = [text for text in in_threads(check, manifest.files) if text is not None]
    if wrong:
        raise CheckpointError(f"checkpoint {folder} is damaged: {'; '.join(wrong)}")


def folder_of(save_dir: Path, tag: str) -> Path:
    """The folder of a tag's checkpoint. If a crash came while it was being replaced, the folder with the old one."""
    folder = save_dir / tag
    if not is_checkpoint(folder) and save_dir.is_dir():
        set_aside = re.compile(re.escape(f"{REPLACED}{tag}-") + r"\d+")  # not tag `a-b` for tag `a`
        for beside in sorted(save_dir.iterdir()):
            if set_aside.fullmatch(beside.name) and is_checkpoint(beside):
                return beside
    return folder


def complete_tags(save_dir: Path) -> list[str]:
    """Tags that have all their files in the right sizes, newest first: by step, because clocks may be wrong."""
    found = []
    if not save_dir.is_dir():
        return []
    for folder in save_dir.iterdir():
        if folder.name.startswith(".") or WRITING in folder.name or not is_checkpoint(folder):
            continue
        try:
            manifest = read_manifest(folder)
            check_sizes(folder, manifest)
        except CheckpointError:
            continue
        found.append((manifest.global_steps, manifest.saved_unix_s, folder.name))
    return [tag for *_, tag in sorted(found, reverse=True)]


def read_latest(save_dir: Path) -> str | None:
    """The tag that the file `latest` names; None where there is no such file."""
    path = save_dir / LATEST
    try:
        return path.read_text(encoding="utf-8").strip()
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(
            f"the file {LATEST} must hold a tag as UTF-8 text, got {error}; {suggest_complete(save_dir, but='')} "
            f"({path})"
        ) from None


def suggest_complete(save_dir: Path, *, but: str) -> str:
    """A sentence for an error message: which complete checkpoint, other than the tag `but`, can be loaded instead."""
    others = [tag for tag in complete_tags(save_dir) if tag != but]
    if others:
        call = f"load_checkpoint({str(save_dir)!r}, tag={others[0]!r})"
        return f"the newest complete one besides it is {others[0]!r}: {call}"
    if _TRAINER_FOLDER.fullmatch(save_dir.name):
        beside = newest_complete(save_dir.parent, but=save_dir.name)
        if beside is not None:
            return f"the newest complete one beside it is {beside}: train(resume_from_checkpoint={beside!r})"
    return f"there is no other complete checkpoint in {save_dir}"


_TRAINER_FOLDER = re.compile(r"checkpoint-(\d+)")
"""Name of a folder that HF Trainer makes: it holds one save of ours, and Trainer's own files."""
_TRAINER_STATE = "trainer_state.json"
"""The file with Trainer's own step count, which it writes last."""


def is_trainers(save_dir: Path) -> bool:
    """Whether HF Trainer made the folder. It continues at the step that its own file names."""
    return (save_dir / _TRAINER_STATE).is_file()


def newest_complete(output_dir: str | Path, *, but: str | None = None) -> str | None:
    """Path of HF Trainer's newest complete `checkpoint-N` in `output_dir`, except for the name `but`; None if none is.

    Pass it to `train(resume_from_checkpoint=...)`. With True, Trainer takes the newest folder, complete or not. With
    None, it starts from the beginning.
    """
    folder = Path(output_dir)
    names = [path.name for path in folder.iterdir() if path.name != but] if folder.is_dir() else []
    numbers = {int(found[1]): name for name in names if (found := _TRAINER_FOLDER.fullmatch(name))}
    for number in sorted(numbers, reverse=True):
        beside = folder / numbers[number]
        try:
            tag = read_latest(beside)
            if tag is None:
                continue
            check_sizes(folder_of(beside, tag), read_manifest(folder_of(beside, tag)))
            parse_json((beside / _TRAINER_STATE).read_text(encoding="utf-8"))
        except (CheckpointError, OSError, ValueError):
            continue
        return str(beside)
    return None


def is_unfinished(save_dir: Path) -> bool:
    """Whether this is a folder of HF Trainer with a save that was begun and not completed. The model files in it are
    not a checkpoint."""
    if not _TRAINER_FOLDER.fullmatch(save_dir.name) or not save_dir.is_dir():
        return False
    names = [path.name for path in save_dir.iterdir()]
    return LATEST not in names and any(WRITING in name for name in names)
