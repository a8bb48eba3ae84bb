"""Seconds of a pass with streamed blocks, from the list of actions that the runtime executes.

The list is that of `streaming.schedule.sweep`. Added are the computations without a slot: blocks that stay on the
device, and all code outside the blocks. Uploads of low-bits buffers are not in the list. They are issued ahead on a
stream of their own, so that they delay a step only by their share of the link.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import partial

from ds_zo.planner.rates import Rates
from ds_zo.streaming.schedule import Action, Kind, price, sweep
from ds_zo.streaming.units import Unit

NON_BLOCKS = -1
"""The block number of all computation outside the blocks."""


def with_residents(actions: Sequence[Action], order: Sequence[int], *, streamed: Collection[int]) -> list[Action]:
    """Adds the computations of blocks that stay on the device, each before the computation of the next streamed
    block."""
    merged: list[Action] = []
    waiting = iter(order)
    for action in actions:
        if action.kind is Kind.COMPUTE:
            for block in waiting:
                if block == action.block:
                    break
                merged.append(_slotless(block))
        merged.append(action)
    return [*merged, *(_slotless(block) for block in waiting if block not in streamed)]


def pass_over(
    order: Sequence[int],
    *,
    streamed: Collection[int],
    num_slots: int,
    downloads: Collection[int] = (),
    loaded: Mapping[int, int] | None = None,
    then: Sequence[int] = (),
) -> tuple[list[Action], dict[int, int]]:
    """The actions of one pass, and the slots of those blocks that the next pass finds on the device (block to slot).

    `downloads` are sent back, `loaded` are in slots when the pass begins, `then` is the order of the next pass."""
    moving = [block for block in order if block in streamed]
    if not moving:
        return [_slotless(block) for block in order], {}
    ahead = [block for block in then if block in streamed][:num_slots]
    actions = sweep(moving, num_slots=num_slots, downloads=downloads, loaded=loaded, then=ahead)
    holds: dict[int, int] = {slot: block for block, slot in (loaded or {}).items()}
    for action in actions:
        holds[action.slot] = action.block
    left = {block: slot for slot, block in holds.items() if block in ahead}
    return with_residents(actions, order, streamed=streamed), left


def forward_and_backward(
    num_blocks: int,
    *,
    streamed: Collection[int],
    num_slots: int,
    forward_downloads: Collection[int] = (),
    backward_downloads: Collection[int] = (),
) -> list[Action]:
    """The actions of a step whose backward pass uses the blocks again, in reverse order. There, block i has the number
    num_blocks + i, because it has times of its own. A pass finds the blocks that the last pass has left in slots."""
    order, one_pass = range(num_blocks), partial(pass_over, streamed=streamed, num_slots=num_slots)
    forward: list[Action] = []
    backward: list[Action] = []
    for _ in range(2):  # the second step is like all that follow
        forward, _ = one_pass(order, downloads=forward_downloads, loaded=_left(backward))
        backward, _ = one_pass(order[::-1], downloads=backward_downloads, loaded=_left(forward))
    later = [Action(action.block + num_blocks, action.kind, action.slot) for action in backward]
    return [*forward, non_blocks(), *later]


def _left(actions: Sequence[Action]) -> dict[int, int]:
    """The blocks that a pass leaves in slots, and these slots."""
    last = {a.slot: a.block for a in actions if a.kind is Kind.COMPUTE and a.slot >= 0}
    return {block: slot for slot, block in last.items()}


def non_blocks() -> Action:
    """The computation of everything outside the blocks."""
    return _slotless(NON_BLOCKS)


def decode_s(unit: Unit, rates: Rates) -> float:
    """Seconds in which a unit's weights are decoded: encoded bytes are read, and weights are written."""
    moved = sum(part.nbytes + part.numel * part.dtype.itemsize for part in unit.parts if not part.direct)
    return moved / (rates.device_memory_gbps * 1e9)


def seconds(actions: Sequence[Action], seconds_of: Mapping[tuple[int, Kind], float]) -> float:
    return price(actions, seconds_of=seconds_of).total_s


def _slotless(block: int) -> Action:
    """A computation that waits for no upload. Its slot number is negative, and no other action has it."""
    return Action(block, Kind.COMPUTE, -2 - block)
