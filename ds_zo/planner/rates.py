"""The rates of a machine, which turn bytes and operations into seconds."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from ds_zo.config.json_text import parse_json


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


@dataclass(frozen=True)
class Card:
    """A GPU by its data sheet: GB of memory, GB/s of PCIe in one direction and of memory, and TFLOP/s of dense 16-bit
    matrix products and of float32."""

    memory_gb: float
    link: float
    memory: float
    matmul: float
    fp32: float
    has_bf16: bool = True


CARDS = {
    "T4": Card(16, 15.8, 320, 65, 8.1, has_bf16=False),
    "L4": Card(24, 31.5, 300, 121, 30.3),
    "A10": Card(24, 31.5, 600, 125, 31.2),
    "RTX3090": Card(24, 31.5, 936, 71, 35.6),
    "RTX4090": Card(24, 31.5, 1008, 165, 82.6),
    "RTX5090": Card(32, 63.0, 1792, 209, 104.8),
    "A100": Card(80, 31.5, 1935, 312, 19.5),
    "H100": Card(80, 63.0, 3350, 989, 67.0),
    "H200": Card(141, 63.0, 4800, 989, 67.0),
}
"""Common cards. Only the H200 is measured."""


def card_rates(name: str) -> Rates:
    """The rates of a card: those measured on the H200, scaled by the ratio of the two data sheets."""
    card, measured, known = CARDS[name], Rates(), CARDS["H200"]
    if card is known:
        return measured
    link = card.link / known.link
    return replace(
        measured,
        name=f"{name}, from its data sheet",
        link_up_gbps=measured.link_up_gbps * link,
        link_down_gbps=measured.link_down_gbps * link,
        link_both_gbps=measured.link_both_gbps * link,
        matmul_tflops=measured.matmul_tflops * card.matmul / known.matmul,
        device_memory_gbps=measured.device_memory_gbps * card.memory / known.memory,
        noise_gdraws=measured.noise_gdraws * card.fp32 / known.fp32,
        interconnect_gbps=measured.link_up_gbps * link,
    )


def with_link(rates: Rates, gbps: float) -> Rates:
    """The rates with a link of so many GB/s from host to device, and in proportion in the other direction and both.
    Devices that have no faster way to each other use it too."""
    if not 0 < gbps < math.inf:
        raise ValueError(f"the speed of the link must be > 0 GB/s, got {gbps:g} (--link-gb-s)")
    share = gbps / rates.link_up_gbps
    return replace(
        rates,
        name=f"{rates.name}, link of {gbps:g} GB/s",
        link_up_gbps=gbps,
        link_down_gbps=rates.link_down_gbps * share,
        link_both_gbps=rates.link_both_gbps * share,
        interconnect_gbps=gbps if rates.interconnect_gbps == rates.link_up_gbps else rates.interconnect_gbps,
    )


def load_rates(path: str | Path) -> Rates:
    """Reads rates from a JSON file: any fields of `Rates`, at the top level or under `rates`, as `ds-zo report --json`
    writes them. A field that is not in the file keeps its default."""
    text = Path(path).read_text()
    try:
        found = parse_json(text[max(0, text.find("{")) :])  # redirected output may start with log lines of DeepSpeed
    except ValueError as error:
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
