"""The machine that a run used: its GPU, host memory, versions and commit. No function here initialises CUDA."""

from __future__ import annotations

import hashlib
import os
import platform
import resource
import shutil
import subprocess
import sys
from functools import lru_cache
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

_REPO = Path(__file__).resolve().parents[2]
_PACKAGES = ("ds_zo", "deepspeed", "torch", "transformers", "accelerate", "triton")


def environment() -> dict[str, Any]:
    """Describes the machine and the software, without initialising CUDA."""
    machine = {"gpu": gpu_name(), "cpus": os.cpu_count(), "machine": machine_id()}
    return {**machine, "commit": commit(), "versions": versions()}


@lru_cache(maxsize=1)
def machine_id() -> str:
    """A short hash that differs between machines, also of one kind, and does not reveal their names."""
    cards = _output("nvidia-smi", "--query-gpu=uuid", "--format=csv,noheader") or ""
    return hashlib.sha256(f"{platform.node()} {cards}".encode()).hexdigest()[:8]


@lru_cache(maxsize=1)
def gpu_name() -> str | None:
    if torch.cuda.is_initialized():
        return torch.cuda.get_device_name()
    return (_output("nvidia-smi", "--query-gpu=name", "--format=csv,noheader") or "").partition("\n")[0] or None


@lru_cache(maxsize=1)
def gpu_memory_gb() -> float | None:
    """Memory of the first GPU in GB (10**9 bytes); None without a GPU."""
    found = _output("nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits") or ""
    first = found.partition("\n")[0].strip()
    return int(first) * 2**20 / 1e9 if first.isdigit() else None


@lru_cache(maxsize=1)
def commit() -> str | None:
    """The commit of the working tree, marked if files were changed. Without a repository, the value of
    `DS_ZO_COMMIT`. An installed package may lie inside a repository of the user, whose commit is not this package's."""
    in_clone = (_REPO / ".git").exists()
    found = _output("git", "-C", str(_REPO), "describe", "--always", "--dirty") if in_clone else None
    return found or os.environ.get("DS_ZO_COMMIT")


def versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in _PACKAGES:
        loaded = getattr(sys.modules.get(name), "__version__", None)
        try:
            found[name] = str(loaded or metadata.version(name))
        except metadata.PackageNotFoundError:
            continue
    return found


def extensions_folder() -> Path:
    """The folder of torch's built extensions. Torch's own function would create it."""
    if "TORCH_EXTENSIONS_DIR" in os.environ:
        return Path(os.environ["TORCH_EXTENSIONS_DIR"])
    from torch.utils.cpp_extension import get_default_build_root

    cuda = "cpu" if torch.version.cuda is None else f"cu{torch.version.cuda.replace('.', '')}"
    return Path(get_default_build_root()) / f"py{sys.version_info.major}{sys.version_info.minor}{sys.abiflags}_{cuda}"


def host_peak_gb() -> float:
    """Peak of this process's resident memory in GB, pinned pages included (VmHWM). On Linux `ru_maxrss` would report a
    larger parent's."""
    if sys.platform == "darwin":
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e9
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024 / 1e9
    return 0.0


def host_free_bytes() -> int:
    """Bytes that can still be allocated on the host: the kernel's estimate, or less if a container's limit is
    nearer."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    free = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    folder = Path("/sys/fs/cgroup")
    for limit, used in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        try:
            ceiling = int((folder / limit).read_text())
            cached = _file_cache_bytes((folder / limit).parent / "memory.stat")
            free = min(free, ceiling - int((folder / used).read_text()) + cached)
        except (OSError, ValueError):  # absent, or "max"
            continue
    return free


def host_total_bytes() -> int:
    """Bytes of the machine's memory, or of the container's limit if that is less."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for limit in ("memory.max", "memory/memory.limit_in_bytes"):
        try:
            total = min(total, int((Path("/sys/fs/cgroup") / limit).read_text()))
        except (OSError, ValueError):  # absent, or "max"
            continue
    return total


def _file_cache_bytes(stat: Path) -> int:
    """Bytes of file pages that the kernel drops when memory runs short; a container's limit counts them as used."""
    fields = dict(line.split() for line in stat.read_text().splitlines() if len(line.split()) == 2)
    return int(fields.get("total_inactive_file", fields.get("inactive_file", 0)))


def may_lock_memory() -> bool:
    """Whether this process may lock any amount of memory with `mlock`: it has no limit, or a capability to exceed
    it."""
    if resource.getrlimit(resource.RLIMIT_MEMLOCK)[0] == resource.RLIM_INFINITY:
        return True
    cap_ipc_lock = 1 << 14
    status = Path("/proc/self/status").read_text().splitlines()
    return any(int(line.split()[1], 16) & cap_ipc_lock for line in status if line.startswith("CapEff:"))


def _output(*command: str) -> str | None:
    if shutil.which(command[0]) is None:
        return None
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except subprocess.TimeoutExpired:
        return None
    return done.stdout.strip() if done.returncode == 0 else None
