"""`StartupSummary`: a backend's part of the table that the engine logs when it is made."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import nn


@dataclass(frozen=True)
class StartupSummary:
    """Facts of one engine on one rank, for a user. Bytes are those allocated before the first step."""

    weights: str
    """Where the weights are, and in which form."""

    device_bytes: Mapping[str, int]
    """Bytes on the device, by use."""

    settings: str = ""
    """The method's main settings."""

    added_by_steps: str = "activations and gradients"
    """Uses of device memory that begin with the first step, and that `device_bytes` does not contain."""

    host_bytes: Mapping[str, int] = field(default_factory=dict)
    """Bytes of host memory that the backend keeps, by use. Empty if everything is on the device."""

    pinned_bytes: int = 0
    """Bytes of `host_bytes` that are page-locked."""

    host_note: str = ""
    """A remark on `host_bytes`, or an empty string."""

    write_back: str | None = None
    """ZO's write-back interval and the reason for it. None: updates are written to the weights at once."""

    ranks: str | None = None
    """How ranks share the work. None: each rank has its own batch, and gradients are averaged."""


def resident_summary(module: nn.Module, device: torch.device, *, settings: str = "") -> StartupSummary:
    """The summary of a backend whose module is on the device."""
    tensors = {id(t): t for t in (*module.parameters(), *module.buffers())}.values()
    return StartupSummary(
        weights="all on the GPU" if device.type == "cuda" else f"all on the device ({device.type})",
        device_bytes={"weights": sum(t.nbytes for t in tensors)},
        settings=settings,
    )


def place_of_blocks(num_streamed: int, num_blocks: int, *, verb: str = "stream from the host") -> str:
    """Says how many blocks are streamed. Modules outside the blocks are always on the device."""
    if num_streamed == 0:
        return f"all {num_blocks} blocks and the other modules on the device"
    shown = f"all {num_blocks}" if num_streamed == num_blocks else f"{num_streamed} of {num_blocks}"
    return f"{shown} blocks {verb}, the other weights are on the device"


def nonzero(sizes: Iterable[tuple[str, int]]) -> dict[str, int]:
    return {name: nbytes for name, nbytes in sizes if nbytes}
