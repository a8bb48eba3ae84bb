"""The rates of a machine, which turn bytes and operations into seconds."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Rates:
    """Rates of one machine. The defaults were measured on an H200 in a 16-core container (PCIe 5 x16); `ds-zo report
    --json` measures those of another machine. GB are 10**9 bytes."""

    name: str = "H200"
    link_up_gbps: float = 55.2
    """GB/s from pinned host memory to the device, without traffic in the other direction."""
    link_down_gbps: float = 55.1
    """GB/s from the device to pinned host memory, without traffic in the other direction."""
    link_both_gbps: float = 90.6
    """GB/s of both directions together."""
    matmul_tflops: float = 680.0
    """TFLOP/s of 16-bit matrix products at the sizes of a block; large square products reach 776."""
    device_memory_gbps: float = 3900.0
    """GB/s of element-wise kernels."""
    kernel_us: float = 2.5
    """Shortest duration of a kernel."""
    launch_us: float = 24.0
    """Host time of one operation of a model's forward, Python included. It bounds the speed of small models."""
    backward_launch_us: float = 14.0
    """Host time of one operation in the backward pass, most of which runs without Python."""
    noise_gdraws: float = 1140.0
    """Normal numbers that the fused ZO kernel draws per second, in 10**9. Each further pending update takes one draw a
    weight."""
    cpu_adam_gparams: float = 4.2
    """Parameters that DeepSpeed's CPU Adam updates per second on all cores, in 10**9."""
    cpu_gflops: float = 900.0
    """GFLOP/s of matrix products on the host. For comparison only: no backend computes layers on the host."""
    interconnect_gbps: float = 450.0
    """GB/s between the GPUs of a machine, in one direction."""
    network_gbps: float = 50.0
    """GB/s of one machine to the others, in one direction."""

    @property
    def link_duplex_gbps(self) -> float:
        """GB/s of one direction while the other is in use too."""
        return min(self.link_up_gbps, self.link_down_gbps, self.link_both_gbps / 2)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def load_rates(path: str | Path) -> Rates:
    """Reads rates from a JSON file: any fields of `Rates`, at the top level or under `rates`, as `ds-zo report --json`
    writes them. A field that is not in the file keeps its default."""
    text = Path(path).read_text()
    try:
        found = json.loads(text[max(0, text.find("{")) :])  # redirected output may start with log lines of DeepSpeed
    except json.JSONDecodeError as error:
        raise ValueError(f"rates must be JSON, got {error} ({path})") from error
    if isinstance(found, dict) and isinstance(found.get("rates"), dict):
        found = found["rates"]
    if not isinstance(found, dict):
        raise ValueError(f"rates must be a JSON object, got {type(found).__name__} ({path})")
    return with_overrides(Rates(), found, where=str(path))


def with_overrides(rates: Rates, given: Mapping[str, Any], *, where: str) -> Rates:
    """`rates` with the fields of `given` replaced. `where` is the source of `given`, for error messages."""
    known = {field.name for field in fields(Rates)}
    for key, value in given.items():
        if key not in known:
            raise ValueError(f"unknown rate {key!r}; there are {', '.join(sorted(known))} ({where})")
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if key != "name" and not (is_number and value > 0):
            raise ValueError(f"a rate must be a number > 0, got {value!r} ({where}: {key})")
    return replace(rates, **given)
