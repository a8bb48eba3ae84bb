"""Blocks that move to the device for good after the first step, when it is known what its activations leave."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from deepspeed.utils import logger

from ds_zo.logs import show
from ds_zo.streaming.budget import residents_after_a_step
from ds_zo.streaming.host_store import HostStore
from ds_zo.streaming.placement import Placement, evenly_spaced
from ds_zo.streaming.shared_store import SharedStore
from ds_zo.streaming.units import Unit


@dataclass(frozen=True)
class DeviceBuffers:
    """What blocks share on the device."""

    free_buffers: Callable[[], None]
    """Frees them, also those of a `make` that broke off. What they held has come home before."""
    make: Callable[[], None]
    """For the blocks that stream now."""


def fill_device(
    placement: Placement,
    *,
    store: HostStore,
    device: torch.device,
    budget_gb: float | None,
    sizes: Callable[[int], dict[str, Any]],
    buffers: DeviceBuffers,
) -> bool:
    """Keeps on the device what fits beside a step, and says so; False: nothing moved. By all ranks of a shared store.
    `sizes`: see `most_resident`."""
    blocks = placement.blocks
    wanted, figures = residents_after_a_step(placement, device=device, budget_gb=budget_gb, sizes=sizes)
    if isinstance(store, SharedStore):
        wanted = store.node.smallest(wanted)
    if wanted <= 0:
        if blocks:
            show(f"ds_zo: all {len(blocks)} blocks go on streaming: none fits on the device beside a step ({figures})")
        return False
    num_resident = _keep(blocks, wanted, store=store, device=device, buffers=buffers)
    if num_resident < wanted:
        logger.warning(
            f"ds_zo: the device ran out of memory when {wanted} of {len(blocks)} blocks were to stay there "
            f"({figures}), so {num_resident} do, and training goes on: another process may use this device; lower "
            "ds_zo.stream.device_memory_gb, or set ds_zo.stream.resident_blocks"
        )
    else:
        show(f"ds_zo: {num_resident} of {len(blocks)} blocks stay on the device from now on ({figures})")
    return True


def _keep(
    blocks: Sequence[Unit], num_resident: int, *, store: HostStore, device: torch.device, buffers: DeviceBuffers
) -> int:
    """Moves so many, or as many as there turns out to be memory for beside the buffers; how many that is. Host memory
    goes when all of it stands, so that blocks can return to it."""
    while True:
        buffers.free_buffers()
        torch.cuda.empty_cache()  # blocks that stay are not to stand among pieces that activations fitted in
        moved: list[tuple[Unit, torch.Tensor, torch.Tensor | None]] = []
        low = num_resident == len(blocks) or isinstance(store, SharedStore)
        reached = num_resident
        try:
            for index in sorted(evenly_spaced(len(blocks), num_resident)):
                before = (blocks[index], blocks[index].store_buffer, blocks[index].low_buffer)
                _move(blocks[index], store, device, low=low)
                moved.append(before)
            buffers.make()
        except torch.OutOfMemoryError as error:
            if not num_resident:
                raise RuntimeError(
                    "ds_zo: the device no longer holds the buffers that streamed blocks pass through, which it did "
                    "before the first step was over: another process uses its memory; start again from the last "
                    "checkpoint with less (ds_zo.stream.device_memory_gb)"
                ) from error
            reached = min(len(moved), num_resident - max(1, num_resident // 8))
        if reached < num_resident:  # here, where the error no longer holds on to what it met
            _put_back(moved)
            buffers.free_buffers()
        agreed = store.node.smallest(reached) if isinstance(store, SharedStore) else reached
        if agreed == num_resident:
            break
        if reached == num_resident:
            _put_back(moved)
        num_resident = agreed
    for unit, home, low_buffer in moved:
        store.free(home)
        if low_buffer is not None and not unit.low_streamed:
            store.free(low_buffer)
    return num_resident


def _move(unit: Unit, store: HostStore, device: torch.device, *, low: bool) -> None:
    """A unit's home, its low plane too if `low`. Its old ones stay as they are."""
    home, low_buffer = _copy(unit.store_buffer, store, device), unit.low_buffer
    low_moves = low and low_buffer is not None
    if low_buffer is not None and low_moves:
        low_buffer = _copy(low_buffer, store, device)
    unit.assign_buffers(home, low_buffer, streamed=False, low_streamed=not low_moves)
    unit.bind_stored()


def _copy(buffer: torch.Tensor, store: HostStore, device: torch.device) -> torch.Tensor:
    there = torch.empty_like(buffer, device=device)
    if isinstance(store, SharedStore):
        store.copy_whole(there, buffer)
    else:
        there.copy_(buffer)
    return there


def _put_back(moved: Sequence[tuple[Unit, torch.Tensor, torch.Tensor | None]]) -> None:
    for unit, home, low_buffer in moved:
        unit.assign_buffers(home, low_buffer, streamed=True, low_streamed=True)
        unit.bind_stored()
