"""Files that survive a crash: written whole and fsynced under another name, then renamed.

Only this module writes, so the order of what reaches the disk can be read, and broken by tests, in one place.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import threading
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ds_zo.checkpoint.workers import in_threads

_CHUNK_NBYTES = 32 * 2**20
"""Between two of them a thread needs Python, which training needs too."""
_READ_NBYTES = 4 * 2**20
"""Several threads have one each beside a model that fills the host."""
_PROCESS = uuid.uuid4().hex
"""Hosts and containers have processes of equal ids."""

SAFETENSORS_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e8m0fnu: "F8_E8M0",
    torch.complex64: "C64",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
TORCH_DTYPES = {name: dtype for dtype, name in SAFETENSORS_DTYPES.items()}


@dataclass(frozen=True)
class Written:
    """What a manifest says of a file."""

    nbytes: int
    sha256: str


class _Output:
    """An unbuffered file that knows its hash; fsynced when it is closed well."""

    def __init__(self, path: Path, progress: Callable[[int], None]) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        self._hash = hashlib.sha256()
        self._nbytes = 0
        self._progress = progress

    def write(self, data: Any) -> None:
        view = memoryview(data).cast("B")
        for start in range(0, len(view), _CHUNK_NBYTES):
            chunk = view[start : start + _CHUNK_NBYTES]
            self._hash.update(chunk)
            done = 0
            while done < len(chunk):  # a signal or a full disk may cut a write short
                done += os.write(self._fd, chunk[done:])
            self._nbytes += len(chunk)
            self._progress(len(chunk))

    def finish(self) -> Written:
        os.fsync(self._fd)
        return Written(self._nbytes, self._hash.hexdigest())

    def close(self) -> None:
        os.close(self._fd)


def _ignore(nbytes: int) -> None:
    pass


def write_bytes(path: Path, data: bytes) -> Written:
    """A new file, on disk when this returns."""
    output = _Output(path, _ignore)
    try:
        output.write(data)
        return output.finish()
    finally:
        output.close()


def write_json(path: Path, value: Any) -> Written:
    return write_bytes(path, json.dumps(value, indent=1, allow_nan=False).encode() + b"\n")


def write_tensors(
    path: Path, tensors: Mapping[str, torch.Tensor], *, progress: Callable[[int], None] = _ignore
) -> Written:
    """A new safetensors file, straight from the tensors' memory: no second copy of them is made."""
    output = _Output(path, progress)
    try:
        for data in _safetensors(tensors):
            output.write(data)
        return output.finish()
    finally:
        output.close()


def hash_tensors(tensors: Mapping[str, torch.Tensor]) -> str:
    """The hash of the file that `write_tensors` would write."""
    found = hashlib.sha256()
    for data in _safetensors(tensors):
        found.update(data)
    return found.hexdigest()


def hash_json(value: Any) -> str:
    """Whatever the order of its keys."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def bytes_of(tensor: torch.Tensor) -> Any:
    """A tensor's memory as a buffer."""
    return tensor.detach().resolve_conj().contiguous().reshape(-1).view(torch.uint8).numpy()


def _safetensors(tensors: Mapping[str, torch.Tensor]) -> Iterator[Any]:
    """The file's bytes, in buffers."""
    header, offsets = _header({name: (value.dtype, tuple(value.shape)) for name, value in tensors.items()})
    yield header
    for name in offsets:
        if tensors[name].numel():
            yield bytes_of(tensors[name])


def _header(
    specs: Mapping[str, tuple[torch.dtype, tuple[int, ...]]], metadata: Mapping[str, str] | None = None
) -> tuple[bytes, dict[str, int]]:
    """The beginning of a safetensors file, and where each tensor's bytes start, in their order."""
    entries: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    offsets: dict[str, int] = {}
    at = 0
    # Wide types first, as readers view the bytes in place and need each tensor aligned to its type.
    for name in sorted(specs, key=lambda name: (-specs[name][0].itemsize, name)):
        dtype, shape = specs[name]
        nbytes = dtype.itemsize * torch.Size(shape).numel()
        entries[name] = {
            "dtype": SAFETENSORS_DTYPES[dtype],
            "shape": list(shape),
            "data_offsets": [at, at + nbytes],
        }
        offsets[name] = at
        at += nbytes
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    header = len(text).to_bytes(8, "little") + text
    return header, {name: offset + len(header) for name, offset in offsets.items()}


class TensorFile:
    """A new safetensors file whose tensors are known by type and shape, and come in any order."""

    def __init__(
        self,
        path: Path,
        specs: Mapping[str, tuple[torch.dtype, tuple[int, ...]]],
        *,
        metadata: Mapping[str, str] | None = None,
    ) -> None:
        header, self._offsets = _header(specs, metadata)
        self._specs = specs
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        self._write(header, 0)

    def put(self, name: str, tensor: torch.Tensor) -> str:
        """Writes one tensor; returns the hash of its bytes."""
        assert (tensor.dtype, tuple(tensor.shape)) == self._specs[name], name
        data = bytes_of(tensor)
        self._write(data, self._offsets[name])
        return hashlib.sha256(data).hexdigest()

    def _write(self, data: Any, offset: int) -> None:
        view = memoryview(data).cast("B")
        done = 0
        while done < len(view):
            done += os.pwrite(self._fd, view[done : done + _CHUNK_NBYTES], offset + done)

    def finish(self) -> None:
        os.fsync(self._fd)
        self.close()

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def sha256_of(path: Path, *, progress: Callable[[int], None]) -> str:
    """The hash of a file as it is on disk."""
    found = hashlib.sha256()
    buffer = memoryview(bytearray(_READ_NBYTES))
    with path.open("rb", buffering=0) as file:
        while num := file.readinto(buffer):
            found.update(buffer[:num])
            progress(num)
    return found.hexdigest()


def make_folder(path: Path) -> None:
    os.mkdir(path)


def sync_folder(path: Path) -> None:
    """Makes the names in a folder durable."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def make_save_folder(path: Path) -> None:
    """With its parents, all of which outlive a crash if what is in them does."""
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    path.mkdir(parents=True, exist_ok=True)
    for folder in missing:
        sync_folder(folder.parent)


def rename(old: Path, new: Path) -> None:
    """Durable when it returns; both stand in one folder."""
    os.rename(old, new)
    sync_folder(new.parent)


def replace_text(path: Path, text: str) -> None:
    """A small file changes from its old to its new content, never through anything else."""
    temporary = unshared(path)
    remove(temporary)
    try:
        write_bytes(temporary, text.encode())
        os.replace(temporary, path)
    except BaseException:
        remove(temporary)
        raise
    sync_folder(path.parent)


def writer_id() -> int:
    """A number that no other thread, process or host has, to make names of."""
    text = f"{_PROCESS}-{os.getpid()}-{threading.get_ident()}"
    return int(hashlib.sha256(text.encode()).hexdigest()[:12], 16)


def unshared(path: Path) -> Path:
    """A name beside `path` that no other writer uses."""
    return path.with_name(f".{path.name}-{writer_id()}")


def make_locked(path: Path, data: bytes) -> int | None:
    """A new file that is locked until its descriptor is closed, by the end of the process if by nothing else. None: it
    was removed before the lock was taken. File systems without locks leave it unlocked."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    try:
        os.write(fd, data)
        with contextlib.suppress(OSError):
            fcntl.flock(fd, fcntl.LOCK_EX)
        if os.fstat(fd).st_nlink:
            return fd
    except BaseException:
        os.close(fd)
        raise
    os.close(fd)
    return None


def remove(path: Path, *, last: Collection[str] = ()) -> None:
    """A file or a folder with all that is in it, if it is there. What can't be removed stays: it is only litter. Files
    named in `last` go when the folder's other files are gone."""
    if path.is_dir() and not path.is_symlink():
        with contextlib.suppress(OSError):
            rest = [inside for inside in path.iterdir() if inside.name not in last]
            in_threads(_unlink, rest)  # giving memory or blocks back takes a fifth of writing them
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            os.unlink(path)


def _unlink(path: Path) -> None:
    with contextlib.suppress(OSError):
        path.unlink()
