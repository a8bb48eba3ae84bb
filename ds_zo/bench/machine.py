"""`ds-zo report`: checks what ds_zo needs of this machine, measures its speeds, and names a remedy for each problem.

`ds_report` lists DeepSpeed's operators; this report has none of them. It builds nothing. The measurements on the GPU
take a second or two.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ds_zo.bench import host_checks
from ds_zo.bench.host_checks import Check
from ds_zo.bench.machine_rates import deepspeed_adam_gparams_per_s, device_rates, host_rates
from ds_zo.bench.profile_layers import LayerTimes, profile_layers
from ds_zo.planner.models import load_config, load_model
from ds_zo.planner.table import grid
from ds_zo.records.environment import environment, extensions_folder, host_total_bytes
from ds_zo.versions import SUPPORTED


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
            lines += ["", "What fails or is slow, and the remedy:", *remedies]
        if self.rates:
            shown = [[name, f"{value:.4g}"] for name, value in self.rates.items() if name != "name"]
            lines += ["", *grid(["rate, for ds-zo plan --rates", "measured"], shown)]
        if self.layers is not None:
            lines += ["", self.layers.render()]
        return "\n".join(lines)


def inspect_machine(
    *,
    model: str | None = None,
    folder: Path = Path(),
    layers: str | None = None,
    batch: int = 1,
    seq: int = 2048,
) -> Machine:
    """Checks and measures the machine.

    `model` names a model whose size is compared with memory and disk. `folder` is where checkpoints go. `layers` names
    a model whose layers are timed.
    """
    if batch < 1 or seq < 2:
        raise ValueError(f"batch must be >= 1 and seq >= 2, got {batch} and {seq} (--batch, --seq)")
    for name in (layers, model):
        if name:
            load_config(name, seq=seq)  # a wrong name is an error before anything is measured
    model_nbytes = load_model(model, batch=1, seq=seq).weights_nbytes if model else None
    rates: dict[str, Any] = {}
    found = Machine([], rates, environment())
    on_gpu: dict[str, Callable[[], Check]] = {"pinning": _pinning, "link": lambda: _link(rates)}
    checks: dict[str, Callable[[], Check]] = {
        "system": host_checks.system,
        "GPU": _cuda,
        "driver": _driver,
        "Triton": _triton,
        **{name: partial(host_checks.package, name) for name in SUPPORTED},
        "locked memory": host_checks.locked_memory,
        **on_gpu,
        "container": host_checks.container,
        "host memory": host_checks.host_memory,
        **({"model": partial(_model, str(model), model_nbytes)} if model_nbytes else {}),
        "swap": host_checks.swap,
        "/dev/shm": host_checks.shared_memory,
        "checkpoint disk": partial(host_checks.checkpoint_disk, folder, model_nbytes=model_nbytes),
        "TMPDIR": host_checks.temporary_disk,
        "huge pages": host_checks.huge_pages,
        "cores": host_checks.cores,
        "CPU": host_checks.cpu,
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
    listed = _nvidia_smi()
    words = host_checks.kernel_file("proc/driver/nvidia/version").partition("\n")[0].split()  # WSL does not have it
    version = next((word for word in words if word[:1].isdigit() and "." in word), "")
    version = version or _matched(r"Driver Version: *([\d.]+)", listed)
    if not version:
        return Check("driver", "none", "warn", "where there is an NVIDIA GPU, install its driver")
    cuda = _matched(r"CUDA Version: *([\d.]+)", listed)
    found = f"{version}, CUDA up to {cuda or 'unknown'}; torch's CUDA {torch.version.cuda}"
    if cuda and torch.version.cuda and int(torch.version.cuda.split(".")[0]) > int(cuda.split(".")[0]):
        remedy = f"torch needs a driver for CUDA {torch.version.cuda}: update the driver, or take torch for CUDA {cuda}"
        return Check("driver", found, "warn", remedy)
    return Check("driver", found)


def _nvidia_smi() -> str:
    """The table that nvidia-smi prints; empty where it fails."""
    try:
        return subprocess.run(["nvidia-smi"], capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return ""


def _matched(pattern: str, text: str) -> str:
    found = re.search(pattern, text)
    return found[1] if found else ""


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
    remedy = "the card may sit in a narrow or old slot, or behind a virtualised IOMMU: see nvidia-smi -q -d PCIE"
    return Check.of("link", text, warn=min(up, down) < 10, remedy=remedy)


# The host


def _model(name: str, nbytes: int) -> Check:
    """Whether the host, or the container's limit, holds the weights."""
    total = host_total_bytes()
    found = f"{name}: {nbytes / 1e9:.1f} GB of weights in bf16, {total / 1e9:.1f} GB of host memory"
    remedy = (
        "streamed weights do not fit host memory or the container's limit: raise it, or store them in fewer bits: "
        f"frozen_dtype nf4 under LoRA, {nbytes * 0.5625 / 2e9:.1f} GB (ds-zo convert --to adapter), or ZO's wire_dtype"
    )
    return Check.of("model", found, warn=nbytes > total, remedy=remedy)


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
        remedy = "the first run of stock offload waits one to three minutes for the build; no backend of ds_zo uses it"
        return Check("CPU Adam", f"DeepSpeed's is not built yet; {torchs}", "warn", remedy)
    speed = deepspeed_adam_gparams_per_s(timeout_s=90)
    if speed is None:
        remedy = f"remove the build folder {folder.name} under TORCH_EXTENSIONS_DIR and have it built anew"
        return Check("CPU Adam", f"DeepSpeed's is built and does not load; {torchs}", "warn", remedy)
    rates["cpu_adam_gparams"] = speed
    return Check("CPU Adam", f"DeepSpeed's: {speed:.2f} G parameters/s; {torchs}")
