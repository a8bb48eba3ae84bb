"""A ZO run as a list of numbers: the model it started from, and each step's coefficients.

One line that names the format, one line of JSON (the header), then records of fixed sizes, each ending in its CRC-32.
`S` is a step: the row of the replay log as it was applied. `H` is the hash of all stored weights at a step, recorded
when a checkpoint was completed. Appended and fsynced one at a time; a record that a crash tore is the last one, and is
dropped.
"""

from __future__ import annotations

import json
import os
import struct
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ds_zo.checkpoint import files
from ds_zo.checkpoint.errors import CheckpointError

FILE = "trajectory.bin"
_MAGIC = b"ds_zo trajectory 1\n"
_STEP, _HASH = b"S", b"H"


@dataclass
class Trajectory:
    """What a file holds."""

    header: dict[str, Any]
    rows: torch.Tensor
    """A row a step, from `first_step` on."""
    hashes: dict[int, str] = field(default_factory=dict)
    """Of the weights stored when that many steps had been made."""
    nbytes: int = 0
    """Up to the end of the last whole record."""

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


def read_trajectory(path: Path) -> Trajectory:
    """All whole records. A step that is missing in the middle is damage; a torn end is not."""
    data = path.read_bytes()
    start = data.find(b"\n", len(_MAGIC))
    if not data.startswith(_MAGIC) or start < 0:
        kind = "is not a trajectory that this ds_zo reads" if not data.startswith(_MAGIC) else "has no header"
        raise CheckpointError(f"{path} {kind} (trajectory)")
    try:
        header = json.loads(data[len(_MAGIC) : start])
        width = int(header["width"])
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path} has a damaged header ({error}) (trajectory)") from None
    sizes = {_STEP: 4 * width, _HASH: 36}
    rows: list[np.ndarray] = []
    hashes: dict[int, str] = {}
    at = start + 1
    while at < len(data):
        size = sizes.get(data[at : at + 1])
        end = at + 1 + (size or 0) + 4
        if (
            size is None
            or end > len(data)
            or zlib.crc32(data[at : end - 4]) != int.from_bytes(data[end - 4 : end], "little")
        ):
            break
        body = data[at + 1 : end - 4]
        if data[at : at + 1] == _STEP:
            rows.append(np.frombuffer(body, dtype=np.float32))
        else:
            hashes[int.from_bytes(body[:4], "little")] = body[4:].hex()
        at = end
    table = np.stack(rows) if rows else np.zeros((0, width), dtype=np.float32)
    found = Trajectory(header, torch.from_numpy(table.copy()), hashes, nbytes=at)
    steps = table[:, 0].copy().view(np.int32)
    if not np.array_equal(steps, np.arange(found.first_step, found.end_step)):
        raise CheckpointError(f"{path} is damaged: its steps do not follow one another (trajectory)")
    return found


class TrajectoryFile:
    """A file that is open for appending; each record is on disk when its call returns."""

    def __init__(self, path: Path, *, header: Mapping[str, Any] | None = None, keep_nbytes: int | None = None) -> None:
        """A new file with `header`, or an existing one cut to its `keep_nbytes` whole records."""
        self.path = path
        if header is not None:
            # The whole beginning appears at once: a reader never meets half a header.
            temporary = path.with_name(f".{path.name}-{os.getpid()}")
            files.remove(temporary)
            files.write_bytes(temporary, _MAGIC + json.dumps(header).encode() + b"\n")
            files.rename(temporary, path)
        self._fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
        if keep_nbytes is not None:
            os.ftruncate(self._fd, keep_nbytes)
        self._nbytes = os.lseek(self._fd, 0, os.SEEK_END)

    def append(self, *rows: torch.Tensor) -> None:
        self._write(b"".join(_record(_STEP, row.numpy().tobytes()) for row in rows))

    def mark(self, step: int, sha256: str) -> None:
        self._write(_record(_HASH, struct.pack("<I", step) + bytes.fromhex(sha256)))

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
