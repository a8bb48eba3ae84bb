"""How fast a machine is: the few numbers that turn bytes and operations into seconds."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Rates:
    """Defaults were measured on one H200 in a 16-core container (PCIe 5 x16). `ds-zo report --json` measures others."""

    name: str = "H200"
    link_up_gbps: float = 55.2
    """Pinned host memory to device, nothing else on the link."""
    link_down_gbps: float = 55.1
    link_both_gbps: float = 90.6
    """Both directions together."""
    matmul_tflops: float = 680.0
    """16-bit matrix products at the sizes of a block; large square ones reach 776."""
    device_memory_gbps: float = 3900.0
    """What element-wise kernels reach."""
    kernel_us: float = 2.5
    """The shortest a kernel takes."""
    launch_us: float = 24.0
    """Host time of one operation of a model's forward, Python included: small models are bound by it."""
    backward_launch_us: float = 14.0
    """The same in the backward pass, of which autograd runs the larger part without Python."""
    noise_gdraws: float = 1140.0
    """Normal numbers a second, in 10**9, inside the fused ZO kernel: what each further update to replay takes."""
    cpu_adam_gparams: float = 4.2
    """Parameters a second, in 10**9, that DeepSpeed's CPU Adam updates on all cores."""
    cpu_gflops: float = 900.0
    """Matrix products on the host, for comparison only: no backend computes layers there."""
    interconnect_gbps: float = 450.0
    """Between the GPUs of a node, one direction."""
    network_gbps: float = 50.0
    """Between nodes, one direction, a node."""

    @property
    def link_duplex_gbps(self) -> float:
        """One direction's share while the other is busy too."""
        return min(self.link_up_gbps, self.link_down_gbps, self.link_both_gbps / 2)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def load_rates(path: str | Path) -> Rates:
    """From a file with any of `Rates`' fields, at the top or under `rates`, as `ds-zo report --json` writes it."""
    text = Path(path).read_text()
    try:
        found = json.loads(text[max(0, text.find("{")) :])  # redirected output may start with a line of DeepSpeed's
    except json.JSONDecodeError as error:
        raise ValueError(f"rates must be JSON, got {error} ({path})") from error
    if isinstance(found, dict) and isinstance(found.get("rates"), dict):
        found = found["rates"]
    if not isinstance(found, dict):
        raise ValueError(f"rates must be a JSON object, got {type(found).__name__} ({path})")
    return with_overrides(Rates(), found, where=str(path))


def with_overrides(rates: Rates, given: Mapping[str, Any], *, where: str) -> Rates:
    known = {field.name for field in fields(Rates)}
    for key, value in given.items():
        if key not in known:
            raise ValueError(f"unknown rate {key!r}; there are {', '.join(sorted(known))} ({where})")
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if key != "name" and not (is_number and value > 0):
            raise ValueError(f"a rate must be a number > 0, got {value!r} ({where}: {key})")
    return replace(rates, **given)
