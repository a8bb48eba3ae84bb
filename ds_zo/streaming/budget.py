"""How much device memory a placement takes, and how many blocks can be resident."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass

import torch

from ds_zo.records.environment import host_free_bytes
from ds_zo.streaming.placement import Placement
from ds_zo.streaming.units import PlacedParameter

MARGIN_NBYTES = 256 * 2**20
"""Device memory left free for the allocator's rounding and for libraries' workspaces."""


GROUP_NBYTES = 256 * 2**20
"""Device memory for the decoded weights of a group of experts. A group has one expert at least."""


def fits(needed_nbytes: int, *, budget_nbytes: int | None) -> bool:
    """Whether so many bytes fit the budget and leave `MARGIN_NBYTES` of it free. None: no limit. Plans and runs make
    every choice that depends on device memory by this function."""
    return budget_nbytes is None or needed_nbytes + MARGIN_NBYTES <= budget_nbytes


def decodes_by_matrix(placement: Placement, *, budget_nbytes: int | None) -> bool:
    """Whether a pass decodes the matrices of a block one at a time: their format allows it, and those of a whole block
    would take more than a fifth of the device memory. The backward pass then decodes each matrix once more. Stacks of
    experts that are not decoded in groups are decoded as a whole, because a layer reads them one expert at a time.
    None: no limit."""
    whole = max((unit.scratch_nbytes for unit in placement.blocks), default=0)
    encoded = [part for unit in placement.blocks for part in unit.parts if part.is_copied]
    are_matrices = all(part.decodes_parameters and len(p.shape) == 2 for part in encoded for p in part.placed)
    return budget_nbytes is not None and 5 * whole > budget_nbytes and are_matrices


def decoding_nbytes(placement: Placement, *, by_matrix: bool) -> int:
    """Bytes of the memory into which the weights of blocks are decoded, except experts in groups."""
    sizes = (unit.largest_matrix_nbytes if by_matrix else unit.scratch_nbytes for unit in placement.blocks)
    return max(sizes, default=0)


def num_in_group(stack: PlacedParameter) -> int:
    """Number of experts of a stack that are decoded at a time: in groups of nearly equal size, of one expert at
    least."""
    num_experts = stack.shape[0]
    expert_nbytes = stack.numel // num_experts * stack.parameter.element_size()
    num_groups = -(-num_experts // max(1, GROUP_NBYTES // expert_nbytes))
    return -(-num_experts // num_groups)


def groups_nbytes(placement: Placement) -> int:
    """Bytes of the memory into which a group of experts is decoded. 0: no block has experts in groups."""
    stacks = (p for unit in placement.blocks for part in unit.parts if part.in_groups for p in part.placed)
    sizes = (num_in_group(p) * (p.numel // p.shape[0]) * p.parameter.element_size() for p in stacks)
    return max(sizes, default=0)


@dataclass(frozen=True)
class DeviceBytes:
    """Bytes of device memory besides activations: weights outside the blocks, working copies (scratch), slots, low
    slots, resident blocks."""

    non_blocks: int
    scratch: int
    slots: int
    low_slots: int
    blocks: int

    @property
    def total(self) -> int:
        return self.non_blocks + self.scratch + self.slots + self.low_slots + self.blocks


Needed = Callable[[int], DeviceBytes]
"""The sizes with a number of resident blocks."""


def device_bytes(
    placement: Placement, *, num_resident: int, num_slots: int, num_low_slots: int = 0, low_stays: bool = False
) -> DeviceBytes:
    """Computes the sizes before anything is allocated, without working copies. `low_stays`: a resident block's low
    plane is on the device too."""
    largest = max((u.nbytes for u in placement.blocks), default=0)
    largest_low = max((u.low_nbytes for u in placement.blocks), default=0)
    all_stay = num_resident == len(placement.blocks)
    low_too = all_stay or low_stays
    sizes = sorted((u.nbytes + (u.low_nbytes if low_too else 0) for u in placement.blocks), reverse=True)
    return DeviceBytes(
        non_blocks=sum(u.nbytes + u.low_nbytes for u in (*placement.leaf_units, *placement.pass_long)),
        scratch=0,
        slots=0 if all_stay else num_slots * largest,
        low_slots=0 if all_stay else num_low_slots * largest_low,
        blocks=sum(sizes[:num_resident]),
    )


def check_fits(needed: DeviceBytes, *, budget_gb: float | None, remedy: str) -> None:
    """Raises before any allocation if the model cannot run within `device_memory_gb`. Without a budget (None) it never
    raises."""
    if budget_gb is not None and needed.total > budget_gb * 1e9:
        raise ValueError(
            f"this model needs at least {needed.total / 1e9:.3g} GB on the device besides activations (outside blocks "
            f"{needed.non_blocks / 1e9:.3g}, slots {(needed.slots + needed.low_slots) / 1e9:.3g}, scratch "
            f"{needed.scratch / 1e9:.3g}, resident blocks {needed.blocks / 1e9:.3g}), got {budget_gb:g}: {remedy} "
            "(ds_zo.stream.device_memory_gb)"
        )


def budget_nbytes(device: torch.device, *, budget_gb: float | None) -> int | None:
    """The user's budget, or else the memory of the device. None: on a CPU, which has no limit."""
    if budget_gb is not None:
        return int(budget_gb * 1e9)
    return torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else None


def usable_nbytes(device: torch.device, *, budget_gb: float | None) -> int:
    """Bytes that this process may use on the device: the user's budget, or else the free memory plus the memory that
    PyTorch's allocator has reserved for this process."""
    if budget_gb is not None:
        return int(budget_gb * 1e9)
    return torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device)


def unallocated_nbytes(device: torch.device, *, budget_gb: float | None, claimed_nbytes: int) -> int | None:
    """Bytes that tensors may take on the device beside those that are there. `claimed_nbytes`: those of a CPU. None: on
    a CPU without a budget."""
    if device.type == "cuda":
        return usable_nbytes(device, budget_gb=budget_gb) - torch.cuda.memory_allocated(device)
    return None if budget_gb is None else int(budget_gb * 1e9) - claimed_nbytes


def free_nbytes(device: torch.device, *, budget_gb: float | None, claimed_nbytes: int) -> int:
    """Bytes that are free on the device and within the user's budget. The budget holds what PyTorch has reserved on a
    CUDA device, and `claimed_nbytes` on a CPU."""
    if device.type == "cuda":
        free, used = torch.cuda.mem_get_info(device)[0], torch.cuda.memory_reserved(device)
    else:
        free, used = host_free_bytes() if sys.platform == "linux" else 0, claimed_nbytes
    return free if budget_gb is None else min(free, int(budget_gb * 1e9) - used)


def most_resident(placement: Placement, *, budget_nbytes: int, activations_nbytes: int, needed: Needed) -> int:
    """The largest number of resident blocks within a budget; -1 if the budget does not hold the model even with all
    blocks streamed."""
    for num_resident in range(len(placement.blocks), -1, -1):
        if fits(needed(num_resident).total + activations_nbytes, budget_nbytes=budget_nbytes):
            return num_resident
    return -1


def release_cached_memory(device: torch.device) -> None:
    """Empties the allocator's cache, before long-lived buffers are allocated. A small buffer inside a large cached
    segment would keep the whole segment reserved, and reserved memory counts as memory that a step needs."""
    if device.type == "cuda":
        torch.cuda.empty_cache()


def reset_peak_memory(device: torch.device) -> None:
    """Resets PyTorch's peak memory statistics, so that the first step's peak includes neither loading nor an earlier
    engine. PyTorch has one peak for the whole process."""
    if device.type == "cuda":
        release_cached_memory(device)
        torch.cuda.reset_peak_memory_stats(device)


def peak_nbytes(device: torch.device) -> int:
    """The peak of the steps so far: the memory that the allocator had reserved, which is more than its tensors filled.

    In a budget filled to the last byte of tensors the allocator would free and allocate memory all the time, or run out
    of it.
    """
    return max(torch.cuda.max_memory_allocated(device), torch.cuda.memory_reserved(device))


def residents_after_a_step(
    placement: Placement, *, device: torch.device, budget_gb: float | None, needed: Needed
) -> tuple[int, str]:
    """The number of blocks that may be resident after a first step without resident blocks, and a text with the
    figures."""
    peak = peak_nbytes(device)
    budget = usable_nbytes(device, budget_gb=budget_gb)
    activations = max(0, peak - needed(0).total)
    found = most_resident(placement, budget_nbytes=budget, activations_nbytes=activations, needed=needed)
    return found, f"budget {budget / 1e9:.1f} GB, peak of the first step {peak / 1e9:.2f} GB"
