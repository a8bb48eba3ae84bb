"""Each check of `ds-zo report`, on simulated machines: files of the kernel, limits, disks and versions."""

from __future__ import annotations

import os
import resource
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from ds_zo import versions
from ds_zo.bench import host_checks, machine
from ds_zo.bench.host_checks import Check
from ds_zo.cli import main

GB = 10**9
HOST = {
    "proc/version": "Linux version 6.8.0-generic",
    "proc/meminfo": "MemTotal: 64000000 kB\nMemAvailable: 60000000 kB\nSwapTotal: 8000000 kB\nSwapFree: 8000000 kB\n",
    "proc/cpuinfo": "processor : 0\nflags : fpu avx2 f16c avx512f avx512_bf16\n",
    "proc/mounts": "/dev/a / ext4 rw 0 0\ntmpfs {root}/memory tmpfs rw 0 0\n",
    "sys/fs/cgroup/memory.max": "max\n",
    "sys/fs/cgroup/cpu.max": "max 100000\n",
    "sys/kernel/mm/transparent_hugepage/enabled": "always [madvise] never\n",
}
Machine = Callable[..., None]


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    """A machine of 64 GB and 8 cores without problems. Arguments are files of the kernel that differ."""
    monkeypatch.setattr(host_checks, "_ROOT", tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(total=32 * GB, free=30 * GB))
    monkeypatch.setattr(resource, "getrlimit", lambda _: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    monkeypatch.setattr(host_checks.tempfile, "gettempdir", lambda: str(tmp_path / "disk"))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    for folder in ("memory", "disk", "dev/shm"):
        (tmp_path / folder).mkdir(parents=True)

    def write(files: dict[str, str] | None = None) -> None:
        for name, text in {**HOST, **(files or {})}.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text.format(root=tmp_path))

    write()
    return write


def warns(check: Check, found: str, remedy: str) -> None:
    assert (check.status, found in check.found, remedy in check.remedy) == ("warn", True, True), check


@pytest.mark.usefixtures("host")
def test_a_good_machine_has_no_warning(tmp_path: Path) -> None:
    checks = [
        host_checks.system(),
        host_checks.container(),
        host_checks.locked_memory(),
        host_checks.shared_memory(),
        host_checks.swap(),
        host_checks.checkpoint_disk(tmp_path / "disk" / "to" / "be" / "made"),
        host_checks.temporary_disk(),
        host_checks.huge_pages(),
        host_checks.cores(),
        host_checks.cpu(),
    ]
    assert [check for check in checks if (check.status, check.remedy) != ("ok", "")] == []
    assert host_checks.cpu().found == "AVX-512, AVX2, BF16"
    assert f"{tmp_path}/disk: 30.0 GB free, ext4" in checks[5].found


@pytest.mark.parametrize(
    ("files", "check", "found", "remedy"),
    [
        ({"proc/version": "Linux 5.15-Microsoft-standard-WSL2"}, host_checks.system, "WSL", ".wslconfig"),
        ({"sys/fs/cgroup/memory.max": "8000000000"}, host_checks.container, "8.0 GB of the machine's 65.5", "--memory"),
        (
            {"sys/fs/cgroup/memory/memory.limit_in_bytes": "4000000000", ".dockerenv": ""},
            host_checks.container,
            "container, 4.0 GB",
            "ds-zo plan",
        ),
        (
            {"proc/meminfo": "SwapTotal: 8000000 kB\nSwapFree: 1000000 kB\n"},
            host_checks.swap,
            "7.2 GB used",
            "end other",
        ),
        (
            {"sys/kernel/mm/transparent_hugepage/enabled": "always madvise [never]"},
            host_checks.huge_pages,
            "never",
            "echo",
        ),
        ({"sys/fs/cgroup/cpu.max": "250000 100000"}, host_checks.cores, "time of 2.5", "OMP_NUM_THREADS=2"),
        ({"proc/cpuinfo": "flags : fpu sse2"}, host_checks.cpu, "no known", "another machine"),
    ],
)
def test_a_file_of_the_kernel_shows_the_problem(
    host: Machine, files: dict[str, str], check: Callable[[], Check], found: str, remedy: str
) -> None:
    host(files)
    warns(check(), found, remedy)


@pytest.mark.usefixtures("host")
def test_limits_of_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (64 * 1024, 64 * 1024))
    monkeypatch.setattr(host_checks, "may_lock_memory", lambda: False)
    warns(host_checks.locked_memory(), "6.55e-05 GB", "--ulimit memlock=-1")
    monkeypatch.setattr(host_checks, "may_lock_memory", lambda: True)  # a capability exempts from the limit
    assert host_checks.locked_memory().status == "ok"
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    warns(host_checks.cores(), "OMP_NUM_THREADS=2", "2 of 8 cores")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0}, raising=False)
    warns(host_checks.cores(), "1, torch", "--cpus")
    monkeypatch.setattr(host_checks, "host_free_bytes", lambda: 2 * GB)
    warns(host_checks.host_memory(), "2.0 GB free", "--host-memory-gb")


@pytest.mark.usefixtures("host")
def test_disks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    warns(host_checks.checkpoint_disk(tmp_path / "memory"), "tmpfs", "takes host memory")
    warns(host_checks.checkpoint_disk(tmp_path / "disk", model_nbytes=40 * GB), "30.0 GB free", "takes 40.0 GB")
    monkeypatch.setattr(host_checks.tempfile, "gettempdir", lambda: str(tmp_path / "memory"))
    warns(host_checks.temporary_disk(), "tmpfs", "set TMPDIR")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(total=64e6, free=64e6))
    warns(host_checks.shared_memory(), "0.064 GB", "--ipc=host")
    warns(host_checks.checkpoint_disk(tmp_path / "disk"), "0.1 GB free", "a 7B model takes 13.5 GB")


def test_a_cpu_alone_computes_bf16_slowly(host: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    host({"proc/cpuinfo": "Features : fp asimd asimdhp"})
    assert host_checks.cpu().found == "NEON, FP16" and host_checks.cpu().status == "ok"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    warns(host_checks.cpu(), "NEON, FP16; no BF16", "bf16.enabled to false")


def test_versions_are_compared_with_the_tested_range(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "installed", {"torch": "2.13.0+cpu", "peft": "0.7.0"}.get)
    supported = versions.SUPPORTED
    assert host_checks.package("torch") == Check("torch", f"2.13.0+cpu, tested: {supported['torch']}")
    assert host_checks.package("accelerate") == Check("accelerate", "not installed")
    found = f"0.7.0, tested: {supported['peft']}"
    warns(host_checks.package("peft"), found, f"pip install 'peft=={supported['peft'].newest}.*'")


def test_the_driver_is_compared_with_torch(host: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    listed = "| NVIDIA-SMI 550.54 Driver Version: 550.54 CUDA Version: 12.4 |"
    monkeypatch.setattr(machine, "_nvidia_smi", lambda: listed)
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    assert machine._driver() == Check("driver", "550.54, CUDA up to 12.4; torch's CUDA 12.8")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    warns(machine._driver(), "CUDA up to 12.4; torch's CUDA 13.0", "update the driver")
    monkeypatch.setattr(machine, "_nvidia_smi", lambda: "")
    warns(machine._driver(), "none", "install its driver")
    host({"proc/driver/nvidia/version": "NVRM version: NVIDIA UNIX Open Kernel Module  580.95.05  Release\nGCC 13"})
    assert machine._driver().found == "580.95.05, CUDA up to unknown; torch's CUDA 13.0"


def test_help_has_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["report", "--help"])
    assert "ds-zo report --json > rates.json" in capsys.readouterr().out


def test_a_model_larger_than_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "host_total_bytes", lambda: 8 * GB)
    warns(machine._model("big", 14 * GB), "14.0 GB of weights", "wire_dtype")
    assert machine._model("small", 4 * GB).status == "ok"


def test_an_extension_that_is_not_built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.setattr(machine, "host_rates", lambda: {"cpu_adam_gparams": 1.0})
    warns(machine._cpu_adam({}), "not built yet", "one to three minutes")
    (tmp_path / "cpu_adam").mkdir()
    (tmp_path / "cpu_adam" / "lock").touch()
    warns(machine._cpu_adam({}), "locked", "remove cpu_adam/lock")
