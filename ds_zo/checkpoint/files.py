"""Writes files so that they survive a crash: whole and fsynced under a temporary name, then renamed.

All writes of checkpoints go through this module. So one place shows the order in which bytes reach the disk, and tests
can interrupt it there.

safetensors' own writer is not used: it takes all tensors of a file at once, and neither hashes nor fsyncs what it has
written.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import re
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
"""Bytes written by one call. Between two calls a thread takes Python's global lock, which training needs too."""
_READ_NBYTES = 4 * 2**20
"""Size of a read buffer. Each of several threads has one, and the model may fill the rest of host memory."""
_PROCESS = uuid.uuid4().hex
"""Identifies this process: processes on several hosts, or in several containers, may have the same process id."""

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
    """Size and hash of a file, for the manifest."""

    nbytes: int
    sha256: str


class _Output:
    """An unbuffered new file that computes its hash. `finish` fsyncs it."""

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
            _write_all(self._fd, chunk)
            self._nbytes += len(chunk)
            self._progress(len(chunk))

    def finish(self) -> Written:
        os.fsync(self._fd)
        return Written(self._nbytes, self._hash.hexdigest())

    def close(self) -> None:
        os.close(self._fd)


def _write_all(fd: int, data: bytes | memoryview) -> None:
    done = 0
    while done < len(data):  # after a signal, or on a full disk, a write may be shorter
        done += os.write(fd, data[done:])


def _ignore(nbytes: int) -> None:
    pass


def write_bytes(path: Path, data: bytes) -> Written:
    """Writes a new file, which is on disk when this returns."""
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
    """Writes a new safetensors file from the tensors' own memory, without a second copy of them."""
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
    """The hash of `value` as JSON. It does not depend on the order of keys."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def bytes_of(tensor: torch.Tensor) -> Any:
    """A tensor's memory as a buffer of bytes."""
    return tensor.detach().resolve_conj().contiguous().reshape(-1).view(torch.uint8).numpy()


def _safetensors(tensors: Mapping[str, torch.Tensor]) -> Iterator[Any]:
    """The bytes of a safetensors file, as a sequence of buffers."""
    header, offsets = _header({name: (value.dtype, tuple(value.shape)) for name, value in tensors.items()})
    yield header
    for name in offsets:
        if tensors[name].numel():
            yield bytes_of(tensors[name])


def _header(
    specs: Mapping[str, tuple[torch.dtype, tuple[int, ...]]], metadata: Mapping[str, str] | None = None
) -> tuple[bytes, dict[str, int]]:
    """The beginning of a safetensors file, and the byte at which each tensor starts, in the order of the file."""
    entries: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    offsets: dict[str, int] = {}
    at = 0
    # Wide dtypes come first: readers view the bytes in place and need each tensor aligned to its dtype.
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
    """A new safetensors file whose dtypes and shapes are known first, and whose tensors are then put in any order."""

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
    """Fsyncs a folder, so that the names in it survive a crash."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def make_save_folder(path: Path) -> None:
    """Makes a folder and its missing parents, and fsyncs them, so that they survive a crash."""
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    path.mkdir(parents=True, exist_ok=True)
    for folder in missing:
        sync_folder(folder.parent)


def rename(old: Path, new: Path) -> None:
    """Renames a file or folder within its folder. The rename is on disk when this returns."""
    os.rename(old, new)
    sync_folder(new.parent)


def replace_text(path: Path, text: str) -> None:
    """Replaces the content of a small file. A reader sees the old content or the new one. The temporary file is locked,
    as `remove_abandoned` expects."""
    temporary = temporary_path(path)
    try:
        lock = None
        while lock is None:
            remove(temporary)
            lock = make_locked(temporary, text.encode())
        try:
            os.fsync(lock)
            os.replace(temporary, path)
        finally:
            os.close(lock)
    except BaseException:
        remove(temporary)
        raise
    sync_folder(path.parent)


def remove_abandoned(path: Path) -> None:
    """Removes the temporary files that `replace_text` has left beside `path` in processes that were killed. A file that
    a process is writing is locked, and stays; so does every file where there are no locks."""
    name = re.compile(re.escape(f".{path.name}-") + r"\d+")
    for beside in path.parent.iterdir():
        if name.fullmatch(beside.name):
            with contextlib.suppress(OSError), beside.open("rb") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                beside.unlink()


def writer_id() -> int:
    """A number for file names that no other thread, process or host has."""
    text = f"{_PROCESS}-{os.getpid()}-{threading.get_ident()}"
    return int(hashlib.sha256(text.encode()).hexdigest()[:12], 16)


def temporary_path(path: Path) -> Path:
    """A path beside `path` that no other writer uses."""
    return path.with_name(f".{path.name}-{writer_id()}")


def make_locked(path: Path, data: bytes) -> int | None:
    """Creates a locked file and returns its descriptor. Closing it, or the end of the process, releases the lock.

    Returns None if another run removed the file before it was locked. On file systems without locks it is not locked.
    """
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    try:
        _write_all(fd, data)
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
    """Removes a file, or a folder with all its content, if it exists. Files that can't be removed stay.

    Files named in `last` are removed after the folder's other files.
    """
    if path.is_dir() and not path.is_symlink():
        with contextlib.suppress(OSError):
            rest = [inside for inside in path.iterdir() if inside.name not in last]
            in_threads(_unlink, rest)  # freeing the blocks of a file takes a fifth of the time of writing them

        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            os.unlink(path)


def _unlink(path: Path) -> None:
    with contextlib.suppress(OSError):
        path.unlink()
