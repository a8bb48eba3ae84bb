"""`ds-zo report`: checks what ds_zo needs of this machine, measures its speeds, and names a remedy for each problem.

`ds_report` lists DeepSpeed's operators; this report has none of them. It builds nothing. The measurements on the GPU
take a second or two.
"""

from __future__ import annotations

import os
import resource
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch

from ds_zo.bench.machine_rates import deepspeed_adam_gparams_per_s, device_rates, host_rates
from ds_zo.bench.profile_layers import LayerTimes, profile_layers
from ds_zo.planner.models import load_config
from ds_zo.planner.table import grid
from ds_zo.records.environment import environment, extensions_folder, host_free_bytes, host_total_bytes

Status = Literal["ok", "warn"]


@dataclass(frozen=True)
class Check:
    """The result of one check."""

    name: str
    found: str
    status: Status = "ok"
    remedy: str = ""


@dataclass
class Machine:
    """The result of `inspect_machine`."""

    checks: list[Check]
    rates: dict[str, Any]
    """The fields of `planner.Rates` that could be measured. `ds-zo plan --rates` reads them and uses its own figures
    for the others."""
    environment: dict[str, Any] = field(default_factory=dict)
    layers: LayerTimes | None = None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def render(self) -> str:
        lines = grid(["check", "status", "found"], [[c.name, c.status, c.found] for c in self.checks])
        remedies = [f"  {c.name}: {c.remedy}" for c in self.checks if c.remedy]
        if remedies:
            lines += ["", "What to do:", *remedies]
        if self.rates:
            shown = [[name, f"{value:.4g}"] for name, value in self.rates.items() if name != "name"]
            lines += ["", *grid(["rate, for ds-zo plan --rates", "measured"], shown)]
        if self.layers is not None:
            lines += ["", self.layers.render()]
        return "\n".join(lines)


def inspect_machine(*, layers: str | None = None, batch: int = 1, seq: int = 2048) -> Machine:
    """Checks and measures the machine. `layers` names a model whose layers are timed too; None: no model."""
    if batch < 1 or seq < 2:
        raise ValueError(f"batch must be >= 1 and seq >= 2, got {batch} and {seq} (--batch, --seq)")
    if layers:
        load_config(layers, seq=seq)  # a wrong name is an error before anything is measured
    rates: dict[str, Any] = {}
    found = Machine([], rates, environment())
    on_gpu: dict[str, Callable[[], Check]] = {"pinning": _pinning, "link": lambda: _link(rates)}
    checks: dict[str, Callable[[], Check]] = {
        "GPU": _cuda,
        "driver": _driver,
        "Triton": _triton,
        "locked memory": _locked_memory,
        **on_gpu,
        "host memory": _host_memory,
        "huge pages": _huge_pages,
        "cores": _cores,
        "compiler": _compiler,
        "CPU Adam": lambda: _cpu_adam(rates),
    }
    for name, check in checks.items():
        if name not in on_gpu or torch.cuda.is_available():
            found.checks.append(_attempt(name, check))
    if layers:
        timed = _attempt("layers", lambda: _layers(found, layers, batch=batch, seq=seq))
        found.checks += [timed] if timed.status == "warn" else []
    return found


def _attempt(name: str, check: Callable[[], Check]) -> Check:
    """Runs one check. An exception becomes a failed check, so that the report continues."""
    try:
        return check()
    except Exception as error:
        return Check(name, f"failed: {str(error).splitlines()[0] if str(error) else type(error).__name__}", "warn")


def _layers(machine: Machine, name: str, *, batch: int, seq: int) -> Check:
    machine.layers = profile_layers(name, batch=batch, seq=seq)
    return Check("layers", name)


# The device


def _cuda() -> Check:
    if torch.cuda.is_available():
        major, minor = torch.cuda.get_device_capability()
        memory = torch.cuda.get_device_properties(0).total_memory / 1e9
        fp8 = "fp8 in hardware" if (major, minor) >= (8, 9) else "fp8 decoded in the kernel"
        return Check(
            "GPU",
            f"{torch.cuda.device_count()} x {torch.cuda.get_device_name(0)}, {memory:.1f} GB, sm_{major}{minor}, "
            f"{fp8}; torch {torch.__version__}",
        )
    if torch.version.cuda is None:
        return Check(
            "GPU",
            f"torch {torch.__version__} is built without CUDA",
            "warn",
            "install torch's CUDA build; everything runs on the CPU until then, for tests only",
        )
    return Check(
        "GPU",
        f"torch {torch.__version__} for CUDA {torch.version.cuda} sees none",
        "warn",
        "check nvidia-smi and CUDA_VISIBLE_DEVICES, and give a container its GPUs (--gpus all)",
    )


def _driver() -> Check:
    path = Path("/proc/driver/nvidia/version")
    if path.exists():
        words = path.read_text().splitlines()[0].split()
        version = next((word for word in words if word[:1].isdigit() and "." in word), "unknown")
        return Check("driver", f"{version}, torch's CUDA {torch.version.cuda}")
    return Check("driver", "none", "warn", "where there is an NVIDIA GPU, install its driver")


def _triton() -> Check:
    remedy = 'the kernels need it on a GPU: pip install "ds-zo[gpu]"'
    try:
        import triton

        return Check("Triton", triton.__version__)
    except ImportError:
        return Check("Triton", "missing", "warn", remedy)
    except Exception as error:  # Triton looks for a driver and a compiler when it is imported
        return Check("Triton", f"installed and broken: {type(error).__name__}: {error}", "warn", remedy)


def _pinning() -> Check:
    from ds_zo.streaming.host_store import HostStore

    store = HostStore(torch.device("cuda"), pin=True)
    nbytes = 256 * 2**20
    store.take(nbytes)
    pinned = store.pinned_nbytes == nbytes
    store.close()
    if pinned:
        return Check("pinning", "256 MiB of ordinary memory registered with CUDA")
    return Check(
        "pinning", "refused", "warn", "raise the locked-memory limit: ulimit -l unlimited (or --ulimit memlock=-1)"
    )


def _link(rates: dict[str, Any]) -> Check:
    found = device_rates(torch.device("cuda"))
    rates |= found
    up, down, both = (found[f"link_{way}_gbps"] for way in ("up", "down", "both"))
    text = f"{up:.1f} GB/s up, {down:.1f} down, {both:.1f} both ways"
    if min(up, down) < 10:
        remedy = "the card may sit in a narrow or old slot, or behind a virtualised IOMMU: see nvidia-smi -q -d PCIE"
        return Check("link", text, "warn", remedy)
    return Check("link", text)


# The host


def _locked_memory() -> Check:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft == resource.RLIM_INFINITY:
        return Check("locked memory", "unlimited")
    # CUDA pins through its driver, which most kernels do not count against the limit: the check `pinning` decides.
    return Check("locked memory", f"limit {soft / 1e9:.3g} GB (ulimit -l)")


def _host_memory() -> Check:
    free = host_free_bytes()
    text = f"{free / 1e9:.1f} GB free of {host_total_bytes() / 1e9:.1f}"
    if free < 16e9:
        return Check(
            "host memory", text, "warn", "streamed weights live here: plan with --host-memory-gb before training"
        )
    return Check("host memory", text)


def _huge_pages() -> Check:
    path = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    chosen = path.read_text().partition("[")[2].partition("]")[0] if path.exists() else ""
    if chosen in ("always", "madvise"):
        return Check("huge pages", chosen)
    remedy = f"pinning is faster with them: echo madvise > {path}"
    return Check("huge pages", chosen or "not offered by this kernel", "warn", remedy if path.exists() else "")


def _cores() -> Check:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    text = f"{cores}, torch uses {torch.get_num_threads()}"
    limit = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()  # further numbers are for nested regions
    if limit.isdigit() and int(limit) < cores // 2:
        remedy = f"CPU Adam gets {limit} of {cores} cores: raise or unset OMP_NUM_THREADS"
        return Check("cores", f"{text}, OMP_NUM_THREADS={limit}", "warn", remedy)
    return Check("cores", text)


def _compiler() -> Check:
    compiler = next((path for name in ("c++", "g++", "clang++") if (path := shutil.which(name))), None)
    ninja = shutil.which("ninja")
    missing = [name for name, path in (("a C++ compiler", compiler), ("ninja", ninja)) if path is None]
    if missing:
        remedy = "stock ZeRO-Offload builds its CPU Adam with them; ds_zo itself needs neither"
        return Check("compiler", f"without {' and '.join(missing)}", "warn", remedy)
    return Check("compiler", f"{compiler}, ninja")


def _cpu_adam(rates: dict[str, Any]) -> Check:
    rates |= host_rates()
    torchs = f"torch's: {rates['cpu_adam_gparams']:.2f} G parameters/s"
    folder = extensions_folder() / "cpu_adam"
    if (folder / "lock").exists():
        remedy = f"if no build is running, one was killed and the next waits for ever: remove {folder.name}/lock"
        return Check("CPU Adam", f"DeepSpeed's build folder is locked; {torchs}", "warn", remedy)
    if not (folder / "cpu_adam.so").exists():
        return Check("CPU Adam", f"DeepSpeed's is not built yet (one to three minutes at first use); {torchs}")
    speed = deepspeed_adam_gparams_per_s(timeout_s=90)
    if speed is None:
        remedy = f"remove the build folder {folder.name} under TORCH_EXTENSIONS_DIR and have it built anew"
        return Check("CPU Adam", f"DeepSpeed's is built and does not load; {torchs}", "warn", remedy)
    rates["cpu_adam_gparams"] = speed
    return Check("CPU Adam", f"DeepSpeed's: {speed:.2f} G parameters/s; {torchs}")
