"""Checks of `ds-zo report` on the host: system, memory, disks, cores and versions. They build and allocate nothing."""

from __future__ import annotations

import os
import platform
import resource
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from ds_zo import versions
from ds_zo.records.environment import host_free_bytes, host_total_bytes, may_lock_memory

Status = Literal["ok", "warn"]

_ROOT = Path("/")
"""Folder below which files of the kernel are read; tests replace it."""
_LITTLE_MEMORY = 16e9
_LITTLE_LOCKED = 1e9
_LITTLE_SHARED = 1e9
_MUCH_SWAPPED = 1e9
_CHECKPOINT_NBYTES = 13.5e9
"""A checkpoint of a 7B model in 16 bits."""
_TEMPORARY_NBYTES = 1e9
_FEATURES = {
    "amx_bf16": "AMX",
    "avx512f": "AVX-512",
    "avx2": "AVX2",
    "asimd": "NEON",
    "sve": "SVE",
    "avx512_fp16": "FP16",
    "asimdhp": "FP16",
    "avx512_bf16": "BF16",
    "bf16": "BF16",
}
"""Names of CPU features, by the kernel's names of them."""
_VECTORS = ("AVX-512", "AVX2", "NEON")


@dataclass(frozen=True)
class Check:
    """The result of one check."""

    name: str
    found: str
    status: Status = "ok"
    remedy: str = ""

    @classmethod
    def of(cls, name: str, found: str, *, warn: bool, remedy: str) -> Check:
        """The result of a check with two outcomes. A check that does not warn has no remedy."""
        return cls(name, found, "warn", remedy) if warn else cls(name, found)


def kernel_file(path: str) -> str:
    """The text of a file of the kernel; empty where there is none."""
    try:
        return (_ROOT / path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _gb(nbytes: float) -> str:
    return f"{nbytes / 1e9:.1f} GB"


def system() -> Check:
    version = kernel_file("proc/version")
    found = f"{platform.system()} {platform.release()}, {platform.machine()}"
    if "microsoft" not in version.lower():
        return Check("system", found)
    remedy = "Linux gets half of the machine's memory, and CUDA may pin a part of it only: raise memory= in .wslconfig"
    return Check("system", f"{found}, WSL", "warn", remedy)


def container() -> Check:
    """The memory limit of the container or control group that this process runs in."""
    limits = []
    for path in ("sys/fs/cgroup/memory.max", "sys/fs/cgroup/memory/memory.limit_in_bytes"):
        text = kernel_file(path).strip()
        limits += [int(text)] if text.isdigit() else []  # "max": no limit
    total = _meminfo("MemTotal")
    limit = min(limits, default=total)
    is_container = (_ROOT / ".dockerenv").exists() or (_ROOT / "run" / ".containerenv").exists()
    where = "container" if is_container else "control group" if limit < total else "none"
    if limit >= total:
        return Check("container", f"{where}, no memory limit" if is_container else where)
    found = f"{where}, {_gb(limit)} of the machine's {_gb(total)}"
    remedy = (
        "streamed weights count against the limit, and a process above it is killed: raise it above the host memory of "
        "ds-zo plan (docker run --memory)"
    )
    return Check.of("container", found, warn=limit < _LITTLE_MEMORY, remedy=remedy)


def host_memory() -> Check:
    free = host_free_bytes()
    found = f"{_gb(free)} free of {_gb(host_total_bytes())}"
    remedy = "streamed weights live here: plan with --host-memory-gb before training"
    return Check.of("host memory", found, warn=free < _LITTLE_MEMORY, remedy=remedy)


def locked_memory() -> Check:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft == resource.RLIM_INFINITY:
        return Check("locked memory", "unlimited")
    found = f"limit {soft / 1e9:.3g} GB (ulimit -l)"
    # CUDA pins through its driver, which most kernels do not count against the limit: the check `pinning` decides.
    remedy = (
        "copies are several times slower where memory is not pinned (see the check pinning): ulimit -l unlimited, "
        "docker run --ulimit memlock=-1, or LimitMEMLOCK=infinity of a service"
    )
    return Check.of("locked memory", found, warn=soft < _LITTLE_LOCKED and not may_lock_memory(), remedy=remedy)


def shared_memory() -> Check:
    folder = _ROOT / "dev" / "shm"
    total = shutil.disk_usage(folder).total if folder.exists() else 0
    if total < _LITTLE_SHARED:
        remedy = "workers of a DataLoader and NCCL pass data through it: docker run --ipc=host, or --shm-size=16g"
        return Check("/dev/shm", f"{total / 1e9:.3g} GB", "warn", remedy)
    return Check("/dev/shm", _gb(total))


def swap() -> Check:
    total, used = _meminfo("SwapTotal"), _meminfo("SwapTotal") - _meminfo("SwapFree")
    if not total:
        return Check("swap", "none")
    found = f"{_gb(used)} used of {_gb(total)}"
    remedy = "host memory is short, and weights that are not pinned may be moved to disk: end other processes"
    return Check.of("swap", found, warn=used > _MUCH_SWAPPED, remedy=remedy)


def checkpoint_disk(folder: Path, *, model_nbytes: int | None = None) -> Check:
    """The disk of checkpoints. `model_nbytes` is the size of one; None: that of a 7B model."""
    remedy = "a checkpoint there takes host memory, which streamed weights need, and a restart deletes it: name a disk"
    needed = model_nbytes or _CHECKPOINT_NBYTES
    size = f"one checkpoint of {'the' if model_nbytes else 'a 7B'} model takes {_gb(needed)}: name a larger disk"
    return _disk("checkpoint disk", folder, needed=needed, if_small=size, if_memory=remedy)


def temporary_disk() -> Check:
    remedy = "temporary files there take host memory, which streamed weights need: set TMPDIR to a folder on a disk"
    size = "builds of extensions may fail: set TMPDIR to a folder on a larger disk"
    return _disk("TMPDIR", Path(tempfile.gettempdir()), needed=_TEMPORARY_NBYTES, if_small=size, if_memory=remedy)


def _disk(name: str, folder: Path, *, needed: float, if_small: str, if_memory: str) -> Check:
    folder = folder.absolute()
    while not folder.exists():
        folder = folder.parent
    free, kind = shutil.disk_usage(folder).free, _file_system(folder.resolve())
    found = f"{folder}: {_gb(free)} free, {kind or 'unknown file system'}"
    remedies = [if_memory] * (kind in ("tmpfs", "ramfs")) + [if_small] * (free < needed)
    return Check(name, found, "warn" if remedies else "ok", "; ".join(remedies))


def _file_system(folder: Path) -> str:
    """The kind of file system that a folder is on: that of its nearest mount point."""
    mounts = [line.split()[1:3] for line in kernel_file("proc/mounts").splitlines() if len(line.split()) > 2]
    holding = [(len(point), i, kind) for i, (point, kind) in enumerate(mounts) if folder.is_relative_to(point)]
    return max(holding, default=(0, 0, ""))[2]  # of two mounts at one place, the later one counts


def huge_pages() -> Check:
    path = "sys/kernel/mm/transparent_hugepage/enabled"
    chosen = kernel_file(path).partition("[")[2].partition("]")[0]
    if chosen in ("always", "madvise"):
        return Check("huge pages", chosen)
    remedy = f"pinning is faster with them: echo madvise > /{path}"
    return Check("huge pages", chosen or "not offered by this kernel", "warn", remedy if chosen else "")


def cores() -> Check:
    num_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    found = f"{num_cores}, torch uses {torch.get_num_threads()}"
    quota, _, period = kernel_file("sys/fs/cgroup/cpu.max").partition(" ")
    if quota.isdigit() and int(quota) < num_cores * int(period):
        allowed = int(quota) / int(period)
        remedy = (
            f"more threads than that wait for each other: set OMP_NUM_THREADS={max(1, int(allowed))}, or raise --cpus"
        )
        return Check("cores", f"{found}, limited to the time of {allowed:g}", "warn", remedy)
    if num_cores == 1:
        remedy = "Adam on the CPU, data loading and saving share it: give the process or container more (--cpus)"
        return Check("cores", found, "warn", remedy)
    limit = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()  # further numbers are for nested regions
    if limit.isdigit() and int(limit) < num_cores // 2:
        remedy = f"CPU Adam gets {limit} of {num_cores} cores: raise or unset OMP_NUM_THREADS"
        return Check("cores", f"{found}, OMP_NUM_THREADS={limit}", "warn", remedy)
    return Check("cores", found)


def cpu() -> Check:
    lines = kernel_file("proc/cpuinfo").lower().splitlines()
    flags = next((line.partition(":")[2].split() for line in lines if line.startswith(("flags", "features"))), [])
    names = list(dict.fromkeys(name for flag, name in _FEATURES.items() if flag in flags))
    found = ", ".join(names) or "no known vector instructions"
    if not any(name in names for name in _VECTORS):
        return Check(
            "CPU", found, "warn", "Adam on the CPU runs at a fraction of its planned speed: take another machine"
        )
    if "BF16" not in names and not torch.cuda.is_available():
        remedy = "training in bf16 on this CPU takes a hundred times as long as in float32: set bf16.enabled to false"
        return Check("CPU", f"{found}; no BF16", "warn", remedy)
    return Check("CPU", found)


def package(name: str) -> Check:
    """The installed version of a package of `versions.SUPPORTED`, and whether it is in the range there."""
    version, supported = versions.installed(name), versions.SUPPORTED[name]
    if version is None:
        return Check(name, "not installed")
    remedy = f"ds_zo is not tested with it: {versions.remedy(name)}"
    return Check.of(name, f"{version}, tested: {supported}", warn=not supported.contains(version), remedy=remedy)


def _meminfo(key: str) -> int:
    """Bytes of one line of /proc/meminfo; 0 where it has none."""
    lines = kernel_file("proc/meminfo").splitlines()
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{key}:")), 0)
