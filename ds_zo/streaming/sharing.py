"""Makes the host store that the ranks of a machine share. See [Note: shared host memory]."""

from __future__ import annotations

from typing import Any

import torch
from deepspeed.utils import logger

from ds_zo.streaming.node import Node
from ds_zo.streaming.placement import Placement, evenly_spaced
from ds_zo.streaming.shared_store import SharedStore


def share_store(
    placement: Placement, *, num_resident: int, process_group: Any, device: torch.device, pin: bool
) -> SharedStore | None:
    """Makes a shared store for the streamed blocks. Returns None, on every rank of this machine, if the machine has one
    rank or its ranks cannot share memory. Collective."""
    blocks = placement.blocks
    node = Node(process_group, device=device)
    if node.size == 1:
        return None
    stays = evenly_spaced(len(blocks), num_resident)
    sizes = [n for i, unit in enumerate(blocks) if i not in stays for n in (unit.nbytes, unit.low_nbytes)]
    memory = node.map_shared(SharedStore.capacity_nbytes(sizes, num_units=len(blocks), num_ranks=node.size))
    if memory is None:
        logger.warning(
            "ds_zo: the ranks of this machine can't share memory, so each rank stores the whole model: run them in one "
            "container (zero_optimization.stage)"
        )
        return None
    return SharedStore(node, memory, num_units=len(blocks), device=device, pin=pin)
