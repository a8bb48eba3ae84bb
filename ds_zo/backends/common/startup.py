"""`StartupSummary`: a backend's part of the table that the engine logs when it is made."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import nn

from ds_zo.streaming.block_store import BlockStore
from ds_zo.streaming.units import Unit


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

    ring_bytes: int = 0
    """Bytes of the pinned ring through which blocks are uploaded from pageable memory; 0 without one."""

    host_note: str = ""
    """A remark on `host_bytes`, or an empty string."""

    write_back: str | None = None
    """ZO's write-back interval and the reason for it. None: updates are written to the weights at once."""

    ranks: str | None = None
    """How ranks share the work. None: each rank has its own batch, and gradients are averaged."""


def resident_summary(module: nn.Module, device: torch.device) -> StartupSummary:
    """The summary of a backend whose module is on the device."""
    tensors = {id(t): t for t in (*module.parameters(), *module.buffers())}.values()
    return StartupSummary(
        weights="all on the GPU" if device.type == "cuda" else f"all on the device ({device.type})",
        device_bytes={"weights": sum(t.nbytes for t in tensors)},
    )


def summary_of_blocks(
    store: BlockStore, *, stored_as: str = "", scratch_nbytes: int = 0, fills_after: str = "the first step"
) -> StartupSummary:
    """The summary of a backend whose blocks may stream. `stored_as`: formats and tiles of blocks, after a comma.
    `fills_after`: when `fill_device` moves blocks to the device, in words."""
    num_blocks = len(store.placement.blocks)
    num_streamed = num_blocks - store.num_resident
    shown = f"all {num_blocks}" if num_streamed == num_blocks else f"{num_streamed} of {num_blocks}"
    place, shards, host = "stream from the host", 0, store.store.nbytes
    if store.shards is not None:
        place = f"are sharded over the devices of {store.shards.partition.size} ranks"
        shards, host = host, 0
    weights = f"{shown} blocks {place}, the other weights are on the device"
    if num_streamed == 0:
        weights = f"all {num_blocks} blocks and the other modules on the device"
    slots = (*store.runtime.slots, *store.runtime.low_slots)
    on_device = {
        "weights": store.resident_nbytes,
        "this rank's shards": shards,
        "slots": sum(slot.buffer.numel() for slot in slots),
        "scratch": scratch_nbytes,
    }
    return StartupSummary(
        weights=weights
        + stored_as
        + (f"; blocks that fit move to the GPU after {fills_after}" if store.may_fill_device else ""),
        device_bytes=nonzero(on_device),
        host_bytes=nonzero({"weights": host}),
        pinned_bytes=store.store.pinned_nbytes,
        ring_bytes=store.store.ring_nbytes,
        host_note="" if store.store.num_sharers == 1 else f"the part of one of {store.store.num_sharers} ranks",
    )


def formats_of(blocks: Iterable[Unit]) -> str:
    """The formats in which blocks are stored, such as "bfloat16/nf4". An empty string without blocks."""
    return "/".join(sorted({part.stored_as for unit in blocks for part in unit.parts}))


def nonzero(sizes: Mapping[str, int]) -> dict[str, int]:
    return {name: nbytes for name, nbytes in sizes.items() if nbytes}
