"""A ZO run as a list of numbers: the model it started from, and each step's coefficients.

One line names the format. One line of JSON, the header, holds its own hash. Then come records of fixed sizes, each
ending in its CRC-32. `S` is a step: the row of the replay log as it was applied. `H` is the hash of all stored weights
at a step, recorded when a checkpoint was completed. Records are appended and fsynced one at a time.

[Note: who owns a log] A run writes into files that the run itself has begun, and never into another run's. A run that
has loaded a checkpoint records its steps beside that checkpoint, in a file named `trajectory.unsaved-*.bin`. When the
run saves, its log goes with the checkpoint: it becomes `trajectory.bin` of the folder saved to, and the folder that was
loaded from has the files that it had before. A run that is killed before it saves leaves the unsaved file: the next one
that loads the checkpoint makes these steps again.
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

FILE = "trajectory.bin"
UNSAVED = "trajectory.unsaved-"
"""See [Note: who owns a log]."""
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
class Point:
    """A checkpoint, as a log refers to it."""

    step: int
    sha256: str
    """Hash of the stored weights."""
    manifest_sha256: str
    recorded_as: str | None
    """Id of the log that the run had when it saved; None: it recorded no trajectory."""
    has_all_weights: bool = True


@dataclass
class Trajectory:
    """The content of a file."""

    path: Path
    version: int
    header: dict[str, Any]
    rows: torch.Tensor
    """A row a step, from `first_step` on."""
    hashes: dict[int, str] = field(default_factory=dict)
    """Of the weights stored when that many steps had been made."""
    damage: str | None = None
    """Which bytes of the file are no records in sequence, in words; None: every byte was used."""

    @property
    def id(self) -> str:
        return str(self.header["id"])

    @property
    def first_step(self) -> int:
        return int(self.header["base"]["step"])

    @property
    def end_step(self) -> int:
        """Steps made when the last one was recorded."""
        return self.first_step + self.rows.shape[0]

    @property
    def earlier(self) -> dict[str, int]:
        """Ids of logs that this one goes on from, each with the step up to which both hold the same steps."""
        found: dict[str, int] = self.header.get("earlier", {})
        return found

    def notes(self) -> list[str]:
        """Sentences for whoever relies on the file."""
        found = [] if self.damage is None else [f"{self.path} is damaged: {self.damage}; the file is kept"]
        if self.version == 1:
            found.append(f"{self.path} was recorded by an older ds_zo, whose headers have no checksum")
        return found

    def leads_from(self, point: Point) -> bool:
        """Whether the log's steps from `point.step` on were made from the weights of that checkpoint."""
        if not self.first_step <= point.step <= self.end_step:
            return False
        if point.has_all_weights and self.hashes.get(point.step, point.sha256) != point.sha256:
            return False
        if point.recorded_as is not None and point.step <= {**self.earlier, self.id: self.end_step}.get(
            point.recorded_as, -1
        ):
            return True
        base = {"step": point.step, "sha256": point.sha256, "manifest_sha256": point.manifest_sha256}
        if self.version == 1:  # does not name the checkpoint itself
            del base["manifest_sha256"]
        return bool(self.header["base"] == base)

    def is_part_of(self, other: Trajectory, *, since: int) -> bool:
        """Whether `other` has all the steps, from `since` on, that this one has, bit for bit."""
        if since < max(self.first_step, other.first_step):
            return False
        mine = self.rows[since - self.first_step :]
        theirs = other.rows[since - other.first_step :][: mine.shape[0]]
        return torch.equal(mine.view(torch.int32), theirs.view(torch.int32))


def read_trajectory(path: Path) -> Trajectory:
    return parse_trajectory(path, path.read_bytes())


def parse_trajectory(path: Path, data: bytes) -> Trajectory:
    """All steps in sequence from the first on. Raises where the header can't be relied upon."""
    version_end = data.find(b"\n", len(_MAGIC))
    start = data.find(b"\n", version_end + 1) + 1
    version = data[len(_MAGIC) : version_end]
    if not data.startswith(_MAGIC) or not version.isdigit() or len(version) > 4:
        raise CheckpointError(f"{path} is not a trajectory that this ds_zo reads (trajectory)")
    if not 1 <= int(version) <= VERSION:
        raise CheckpointError(
            f"{path} has format {int(version)}, this ds_zo reads 1 to {VERSION}: use the ds_zo that wrote it "
            "(trajectory)"
        )
    if not start:
        raise CheckpointError(f"{path} has no header (trajectory)")
    try:
        header = _header(data[version_end + 1 : start - 1], checked=int(version) > 1)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{path} has a damaged header ({error}) (trajectory)") from None
    found = Trajectory(path, int(version), header, torch.zeros(0, header["width"]))
    _read_records(found, data, start)
    return found


def _header(text: bytes, *, checked: bool) -> dict[str, Any]:
    header: dict[str, Any] = json.loads(text)
    if checked and header.pop("sha256") != files.hash_json(header):
        raise ValueError("it does not match its own hash")
    for kind, names in _HEADER_TYPES.items():
        for name in names:
            if not isinstance(header[name], kind):
                raise ValueError(f"{name} is not a {kind.__name__}")
    base = header["base"]
    if not isinstance(base["step"], int) or not isinstance(base["sha256"], str) or header["width"] < 1:
        raise ValueError("its base or width is not one that a run has")
    return header


def _read_records(found: Trajectory, data: bytes, at: int) -> None:
    """A damaged hash is passed over. A damaged step ends what can be used: later steps belong to other weights."""
    sizes = {_STEP: 4 * found.header["width"], _HASH: 36}
    rows: list[np.ndarray] = []
    damage: list[str] = []
    while at < len(data):
        record = _record_at(data, at, sizes)
        if record is None:
            following = next((i for i in range(at + 1, len(data)) if _record_at(data, i, sizes) is not None), None)
            if following is None:
                damage.append(f"its last {len(data) - at} bytes, from byte {at} on, are no whole record")
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
                f"{found.first_step + len(rows) - 1}, and neither it nor what is recorded after it is used"
            )
            break
        at += len(record)
    if rows:
        found.rows = torch.from_numpy(np.stack(rows))
    found.damage = "; ".join(damage) or None


def _record_at(data: bytes, at: int, sizes: Mapping[bytes, int]) -> bytes | None:
    """The whole record that begins there; None where there is none."""
    size = sizes.get(data[at : at + 1])
    if size is None or at + 1 + size + 4 > len(data):
        return None
    record = data[at : at + 1 + size + 4]
    return record if zlib.crc32(record[:-4]) == int.from_bytes(record[-4:], "little") else None


def content_of(header: Mapping[str, Any], rows: Iterable[torch.Tensor], hashes: Mapping[int, str]) -> bytes:
    """The bytes of a file."""
    text = json.dumps({**header, "sha256": files.hash_json(header)})
    records = [_record(_STEP, row.numpy().tobytes()) for row in rows]
    records += [_record_of_hash(step, sha256) for step, sha256 in hashes.items()]
    return b"".join([_MAGIC, b"%d\n" % VERSION, text.encode(), b"\n", *records])


def is_being_written(path: Path) -> bool:
    """By another process that is alive; unknown counts as no, on file systems without locks."""
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
    """A file of this process, open for appending; each record is on disk when its call returns."""

    def __init__(self, path: Path, content: bytes) -> None:
        """The whole content appears at once: a reader never meets half a header."""
        self.path = path
        temporary = path.with_name(f".{path.name}-{os.getpid()}")
        files.remove(temporary)
        self._fd = -1
        try:
            files.write_bytes(temporary, content)
            self._fd = os.open(temporary, os.O_RDWR | os.O_CLOEXEC)
            with suppress(OSError):
                fcntl.lockf(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)  # `is_being_written` until this process ends
            files.rename(temporary, path)
        except BaseException:
            self.close()
            files.remove(temporary)
            raise
        self._nbytes = os.lseek(self._fd, 0, os.SEEK_END)

    def content(self) -> bytes:
        """Read from the open file: its folder may be deleted, and closing a second descriptor would drop the lock."""
        return os.pread(self._fd, self._nbytes, 0)

    def rename(self, path: Path) -> None:
        """Within its folder. A file of that name is replaced."""
        files.rename(self.path, path)
        self.path = path

    def append(self, *rows: torch.Tensor) -> None:
        self._write(b"".join(_record(_STEP, row.numpy().tobytes()) for row in rows))

    def mark(self, step: int, sha256: str) -> None:
        self._write(_record_of_hash(step, sha256))

    def _write(self, data: bytes) -> None:
        done = 0
        try:
            while done < len(data):
                done += os.write(self._fd, data[done:])
            os.fsync(self._fd)
        except OSError:
            os.ftruncate(self._fd, self._nbytes)  # half a record would hide the ones after it
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
