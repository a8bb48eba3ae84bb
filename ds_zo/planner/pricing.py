"""Seconds of a pass with streamed blocks, from the list of actions that the runtime executes.

The list is that of `streaming.schedule.sweep`. Added is the computation of all code outside the blocks. Low planes are
uploaded on a stream of their own, so the seconds of an upload contain their share of the link.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import partial

from ds_zo.planner.rates import Rates
from ds_zo.streaming.schedule import NO_SLOT, Action, Kind, price, sweep
from ds_zo.streaming.units import Unit

NON_BLOCKS = -1
"""The block number of all computation outside the blocks."""


def pass_over(
    order: Sequence[int],
    *,
    streamed: Collection[int],
    num_slots: int,
    downloads: Collection[int] = (),
    loaded: Mapping[int, int] | None = None,
    then: Sequence[int] = (),
    lows: Sequence[int] = (),
    num_low_slots: int = 0,
    loaded_lows: Mapping[int, int] | None = None,
) -> tuple[list[Action], dict[int, int], dict[int, int]]:
    """The actions of one pass, and what the next pass finds on the device: slots by block, and low slots by block.

    `downloads` are sent back, `loaded` are in slots when the pass begins, `then` is the order of the next pass. `lows`
    and `loaded_lows` are those of `sweep`."""
    loaded, loaded_lows = loaded or {}, loaded_lows or {}
    actions = sweep(
        order,
        streamed=streamed,
        num_slots=num_slots,
        downloads=downloads,
        loaded=loaded,
        then=then,
        lows=lows,
        low_slots=[slot for slot in range(num_low_slots) if slot not in loaded_lows.values()],
        loaded_lows=loaded_lows,
    )
    holds, holds_low = ({slot: block for block, slot in there.items()} for there in (loaded, loaded_lows))
    for action in actions:
        if action.kind.is_low:
            holds_low[action.slot] = action.block
        elif action.slot != NO_SLOT:
            holds[action.slot] = action.block
        if action.kind is Kind.DOWNLOAD:
            holds_low.pop(action.low_slot, None)
    ahead = [block for block in then if block in streamed][:num_slots]
    left = {block: slot for slot, block in holds.items() if block in ahead}
    return actions, left, {block: slot for slot, block in holds_low.items()}


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
        forward, *_ = one_pass(order, downloads=forward_downloads, loaded=_left(backward))
        backward, *_ = one_pass(order[::-1], downloads=backward_downloads, loaded=_left(forward))
    later = [action._replace(block=action.block + num_blocks) for action in backward]
    return [*forward, non_blocks(), *later]


def _left(actions: Sequence[Action]) -> dict[int, int]:
    """The blocks that a pass leaves in slots, and these slots."""
    last = {a.slot: a.block for a in actions if a.kind is Kind.COMPUTE and a.slot != NO_SLOT}
    return {block: slot for slot, block in last.items()}


def non_blocks() -> Action:
    """The computation of everything outside the blocks."""
    return Action(NON_BLOCKS, Kind.COMPUTE)


def decode_s(unit: Unit, rates: Rates) -> float:
    """Seconds in which a unit's weights are decoded: encoded bytes are read, and weights are written."""
    moved = sum(part.nbytes + part.numel * part.dtype.itemsize for part in unit.parts if not part.direct)
    return moved / (rates.device_memory_gbps * 1e9)


def seconds(actions: Sequence[Action], seconds_of: Mapping[tuple[int, Kind], float]) -> float:
    return price(actions, seconds_of=seconds_of).total_s
