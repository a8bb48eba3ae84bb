"""The trajectory file of a ZO run: the hash of the weights it started from, and the coefficients of each step.

The first line names the format. The second line, the header, is JSON and holds its own hash. Then come records of fixed
sizes, each ending in its CRC-32. A record `S` is a step: the row of the replay log as it was applied. A record `H` is
the hash of all stored weights at a step, recorded when a checkpoint was completed. Records are appended and fsynced one
at a time.

[Note: who owns a log] A run writes only to files that it has created itself. A run that has loaded a checkpoint records
its steps beside that checkpoint, in a file named `trajectory.unsaved-*.bin`. When the run saves, this log becomes
`trajectory.bin` of the folder saved to, and the folder loaded from has the same files as before. A run that is killed
before it saves leaves the unsaved file, and the next run that loads the checkpoint replays these steps.
"""

from __future__ import annotations

import fcntl
import json
import os
import struct
import zlib
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ds_zo.checkpoint import files
from ds_zo.checkpoint.errors import CheckpointError
from ds_zo.config.json_text import parse_json

FILE = "trajectory.bin"
UNSAVED = "trajectory.unsaved-"
"""Beginning of the names of unsaved logs: see [Note: who owns a log]."""
VERSION = 2
_MAGIC = b"ds_zo trajectory "
_STEP, _HASH = b"S", b"H"
_HEADER_TYPES = {
    dict: ("base", "facts", "aliases"),
    int: ("capacity", "width"),
    list: ("units", "buffers"),
    str: ("id",),
}


@dataclass(frozen=True)
class CheckpointRef:
    """A checkpoint, as a trajectory refers to it."""

    step: int
    sha256: str
    """Hash of the stored weights."""
    manifest_sha256: str
    log_id: str | None
    """Id of the log of the run that saved it; None if that run recorded no trajectory."""
    has_all_weights: bool = True


@dataclass
class Trajectory:
    """The content of a trajectory file."""

    path: Path
    version: int
    header: dict[str, Any]
    rows: torch.Tensor
    """One row of coefficients for each step, from `first_step` on."""
    hashes: dict[int, str] = field(default_factory=dict)
    """Hash of the stored weights, by the number of steps made."""
    damage: str | None = None
    """A description of the bytes that are not records in sequence; None if every byte was read."""

    @property
    def id(self) -> str:
        return str(self.header["id"])

    @property
    def first_step(self) -> int:
        return int(self.header["base"]["step"])

    @property
    def end_step(self) -> int:
        """Number of steps made when the last step was recorded."""
        return self.first_step + self.rows.shape[0]

    @property
    def earlier(self) -> dict[str, int]:
        """Ids of logs that this one continues, each with the step up to which both hold the same steps."""
        found: dict[str, int] = self.header.get("earlier", {})
        return found

    def warnings(self) -> list[str]:
        """Sentences about damage and missing checks, to be logged when the file is used."""
        found = [] if self.damage is None else [f"{self.path} is damaged: {self.damage}; the file is kept"]
        if self.version == 1:
            found.append(f"{self.path} was recorded by an older ds_zo, whose headers have no checksum")
        return found

    def continues(self, point: CheckpointRef) -> bool:
        """Whether the log's steps from `point.step` on were made from the weights of that checkpoint."""
        if not self.first_step <= point.step <= self.end_step:
            return False
        if point.has_all_weights and self.hashes.get(point.step, point.sha256) != point.sha256:
            return False
        if point.log_id is not None and point.step <= {**self.earlier, self.id: self.end_step}.get(point.log_id, -1):
            return True
        base = {"step": point.step, "sha256": point.sha256, "manifest_sha256": point.manifest_sha256}
        if self.version == 1:  # that format does not hold the manifest's hash
            del base["manifest_sha256"]
        return bool(self.header["base"] == base)

    def is_part_of(self, other: Trajectory, *, since: int) -> bool:
        """Whether `other` has every step of this log from step `since` on, bit for bit."""
        if since < max(self.first_step, other.first_step):
            return False
        mine = self.rows[since - self.first_step :]
        theirs = other.rows[since - other.first_step :][: mine.shape[0]]
        return torch.equal(mine.view(torch.int32), theirs.view(torch.int32))


def read_trajectory(path: Path) -> Trajectory:
    return parse_trajectory(path, path.read_bytes())


def parse_trajectory(path: Path, data: bytes) -> Trajectory:
    """Reads all steps in sequence from the first on. Raises where the header is damaged."""
    version_end = data.find(b"\n", len(_MAGIC))
    start = data.find(b"\n", version_end + 1) + 1
    version = data[len(_MAGIC) : version_end]
    if not data.startswith(_MAGIC) or not version.isdigit() or len(version) > 4:
        raise CheckpointError(
            f"a trajectory begins with {_MAGIC.decode()!r} and a format number, got another file: name a "
            f"{FILE} ({path})"
        )
    if not 1 <= int(version) <= VERSION:
        raise CheckpointError(
            f"this ds_zo reads trajectory formats 1 to {VERSION}, got {int(version)}: use the ds_zo that wrote it "
            f"({path})"
        )
    if not start:
        raise CheckpointError(f"a trajectory has a header in its second line, got none: use another copy ({path})")
    try:
        header = _header(data[version_end + 1 : start - 1], checked=int(version) > 1)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"a trajectory has a whole header, got a damaged header ({error}): use another copy ({path})"
        ) from None
    found = Trajectory(path, int(version), header, torch.zeros(0, header["width"]))
    _read_records(found, data, start)
    return found


def _header(text: bytes, *, checked: bool) -> dict[str, Any]:
    header: dict[str, Any] = parse_json(text)
    if checked and header.pop("sha256") != files.hash_json(header):
        raise ValueError("it does not match its own hash")
    for kind, names in _HEADER_TYPES.items():
        for name in names:
            if not isinstance(header[name], kind):
                raise ValueError(f"{name} is not a {kind.__name__}")
    base = header["base"]
    if not isinstance(base["step"], int) or not isinstance(base["sha256"], str) or header["width"] < 1:
        raise ValueError("its base has no step and sha256, or its width is less than 1")
    return header


def _read_records(found: Trajectory, data: bytes, at: int) -> None:
    """Reads records into `found`, from byte `at` on. Skips damaged hashes, and stops at a damaged step: the steps after
    it were made from weights that can't be rebuilt."""
    sizes = {_STEP: 4 * found.header["width"], _HASH: 36}
    rows: list[np.ndarray] = []
    damage: list[str] = []
    while at < len(data):
        record = _record_at(data, at, sizes)
        if record is None:
            following = next((i for i in range(at + 1, len(data)) if _record_at(data, i, sizes) is not None), None)
            if following is None:
                damage.append(f"its last {len(data) - at} bytes, from byte {at} on, are not a whole record")
                break
            damage.append(f"the record at byte {at}, of step {found.first_step + len(rows)}, is not as it was written")
            at = following
            continue
        body = record[1:-4]
        if record[:1] == _HASH:
            found.hashes[int.from_bytes(body[:4], "little")] = body[4:].hex()
        elif int.from_bytes(body[:4], "little") == found.first_step + len(rows):
            rows.append(np.frombuffer(body, dtype=np.float32))
        else:
            damage.append(
                f"step {int.from_bytes(body[:4], 'little')} at byte {at} does not follow step "
                f"{found.first_step + len(rows) - 1}, and neither it nor the records after it are used"
            )
            break
        at += len(record)
    if rows:
        found.rows = torch.from_numpy(np.stack(rows))
    found.damage = "; ".join(damage) or None


def _record_at(data: bytes, at: int, sizes: Mapping[bytes, int]) -> bytes | None:
    """The whole record that begins at byte `at`; None if none does."""
    size = sizes.get(data[at : at + 1])
    if size is None or at + 1 + size + 4 > len(data):
        return None
    record = data[at : at + 1 + size + 4]
    return record if zlib.crc32(record[:-4]) == int.from_bytes(record[-4:], "little") else None


def content_of(header: Mapping[str, Any], rows: Iterable[torch.Tensor], hashes: Mapping[int, str]) -> bytes:
    """The bytes of a new trajectory file."""
    text = json.dumps({**header, "sha256": files.hash_json(header)})
    records = [_record(_STEP, row.numpy().tobytes()) for row in rows]
    records += [_record_of_hash(step, sha256) for step, sha256 in hashes.items()]
    return b"".join([_MAGIC, b"%d\n" % VERSION, text.encode(), b"\n", *records])


def is_being_written(path: Path) -> bool:
    """Whether another process that is running writes the file. False on file systems without locks."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.lockf(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        return True
    except OSError:
        return False
    finally:
        os.close(fd)
    return False


class TrajectoryFile:
    """A trajectory file that this process appends to. Each record is on disk when the call that adds it returns."""

    def __init__(self, path: Path, content: bytes) -> None:
        """Creates the file with `content` and then renames it to `path`, so that no reader sees half a header."""
        self.path = path
        temporary = path.with_name(f".{path.name}-{os.getpid()}")
        files.remove(temporary)
        self._fd = -1
        try:
            files.write_bytes(temporary, content)
            self._fd = os.open(temporary, os.O_RDWR | os.O_CLOEXEC)
            with suppress(OSError):
                fcntl.lockf(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)  # read by `is_being_written` in other processes
            files.rename(temporary, path)
        except BaseException:
            self.close()
            files.remove(temporary)
            raise
        self._nbytes = os.lseek(self._fd, 0, os.SEEK_END)

    def content(self) -> bytes:
        """The file's bytes, read by its open descriptor: the folder may have been deleted, and closing a second
        descriptor would release the lock."""
        return os.pread(self._fd, self._nbytes, 0)

    def rename(self, path: Path) -> None:
        """Renames the file within its folder, replacing a file of that name."""
        files.rename(self.path, path)
        self.path = path

    def append(self, *rows: torch.Tensor) -> None:
        self._write(b"".join(_record(_STEP, row.numpy().tobytes()) for row in rows))

    def add_hash(self, step: int, sha256: str) -> None:
        self._write(_record_of_hash(step, sha256))

    def _write(self, data: bytes) -> None:
        done = 0
        try:
            while done < len(data):
                done += os.write(self._fd, data[done:])
            os.fsync(self._fd)
        except OSError:
            os.ftruncate(self._fd, self._nbytes)  # records after half a record could not be read

            os.lseek(self._fd, self._nbytes, os.SEEK_SET)
            raise
        self._nbytes += len(data)

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def _record(kind: bytes, body: bytes) -> bytes:
    return kind + body + zlib.crc32(kind + body).to_bytes(4, "little")


def _record_of_hash(step: int, sha256: str) -> bytes:
    return _record(_HASH, struct.pack("<I", step) + bytes.fromhex(sha256))
