"""After the first step, whose activations show how much device memory is left, moves blocks to the device for good."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from deepspeed.utils import logger

from ds_zo.logs import show
from ds_zo.streaming.budget import Needed, residents_after_a_step
from ds_zo.streaming.host_store import HostStore
from ds_zo.streaming.placement import Placement, evenly_spaced
from ds_zo.streaming.shared_store import SharedStore
from ds_zo.streaming.units import Unit


@dataclass(frozen=True)
class DeviceBuffers:
    """Callbacks for the device buffers that blocks share (slots, scratch)."""

    free_buffers: Callable[[], None]
    """Frees the buffers, also those of an interrupted `make`. The caller has downloaded their contents before."""
    make: Callable[[], None]
    """Allocates the buffers for the blocks that are streamed at the time of the call."""


def fill_device(
    placement: Placement,
    *,
    store: HostStore,
    device: torch.device,
    budget_gb: float | None,
    needed: Needed,
    buffers: DeviceBuffers,
) -> bool:
    """Makes as many blocks resident as fit beside a step, and logs their number. Returns whether any block was moved.
    Collective for a shared store."""
    blocks = placement.blocks
    wanted, figures = residents_after_a_step(placement, device=device, budget_gb=budget_gb, needed=needed)
    if isinstance(store, SharedStore):
        wanted = store.node.smallest(wanted)
    if wanted <= 0:
        if blocks:
            show(f"ds_zo: all {len(blocks)} blocks stay streamed: none fits on the device beside a step ({figures})")
        return False
    num_resident = _keep(blocks, wanted, store=store, device=device, buffers=buffers)
    if num_resident < wanted:
        logger.warning(
            f"ds_zo: the device ran out of memory when {wanted} of {len(blocks)} blocks were moved there ({figures}): "
            f"{num_resident} blocks are resident and training continues; another process may use this device; lower "
            "ds_zo.stream.device_memory_gb, or set ds_zo.stream.resident_blocks"
        )
    else:
        show(f"ds_zo: {num_resident} of {len(blocks)} blocks stay on the device from now on ({figures})")
    return True


def _keep(
    blocks: Sequence[Unit], num_resident: int, *, store: HostStore, device: torch.device, buffers: DeviceBuffers
) -> int:
    """Moves `num_resident` blocks to the device, or fewer if memory runs out; returns how many were moved. Frees the
    blocks' host memory only after everything is allocated, so that blocks can return to it."""
    while True:
        buffers.free_buffers()
        torch.cuda.empty_cache()  # so that resident blocks are not put into cached segments that activations used
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
                    "ds_zo: the device has no memory left for the buffers of streamed blocks, which it held in the "
                    "first step: another process uses its memory; start again from the last checkpoint with a smaller "
                    "budget (ds_zo.stream.device_memory_gb)"
                ) from error
            reached = min(len(moved), num_resident - max(1, num_resident // 8))
        if reached < num_resident:  # outside the except clause: the error's traceback keeps device tensors alive
            _put_back(moved)
            buffers.free_buffers()
        agreed = store.node.smallest(reached) if isinstance(store, SharedStore) else reached
        if agreed == num_resident:
            break
        if reached == num_resident:
            _put_back(moved)
        num_resident = agreed
    for unit, buffer, low_buffer in moved:
        store.free(buffer)
        if low_buffer is not None and not unit.low_streamed:
            store.free(low_buffer)
    return num_resident


def _move(unit: Unit, store: HostStore, device: torch.device, *, low: bool) -> None:
    """Assigns the unit a device copy of its `store_buffer`, and of its `low_buffer` if `low`. The old buffers stay
    unchanged."""
    buffer, low_buffer = _copy(unit.store_buffer, store, device), unit.low_buffer
    low_moves = low and low_buffer is not None
    if low_buffer is not None and low_moves:
        low_buffer = _copy(low_buffer, store, device)
    unit.assign_buffers(buffer, low_buffer, streamed=False, low_streamed=not low_moves)
    unit.bind_stored()


def _copy(buffer: torch.Tensor, store: HostStore, device: torch.device) -> torch.Tensor:
    copy = torch.empty_like(buffer, device=device)
    if isinstance(store, SharedStore):
        store.copy_whole(copy, buffer)
    else:
        copy.copy_(buffer)
    return copy


def _put_back(moved: Sequence[tuple[Unit, torch.Tensor, torch.Tensor | None]]) -> None:
    for unit, buffer, low_buffer in moved:
        unit.assign_buffers(buffer, low_buffer, streamed=True, low_streamed=True)
        unit.bind_stored()
