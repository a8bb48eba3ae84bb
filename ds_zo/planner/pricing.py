"""Seconds of a streamed sweep: the schedule that the runtime executes, priced before it runs.

The list is `streaming.schedule.sweep`'s, with what stands between the streamed blocks added: blocks that stay on the
device compute without a slot, and so does everything outside the blocks. Their low planes are not in it: they come
ahead, on a stream of their own, and keep nothing waiting but the link.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from ds_zo.streaming.schedule import Action, Kind, price, sweep

EDGE = -1


def with_residents(actions: Sequence[Action], order: Sequence[int], *, streamed: Collection[int]) -> list[Action]:
    """A pass over `order` with the computes of blocks that stay, each right before the next streamed block's."""
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
    """One pass, and which blocks of the next it leaves in which slots."""
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


def edge() -> Action:
    """Everything outside the blocks."""
    return _slotless(EDGE)


def seconds(actions: Sequence[Action], seconds_of: Mapping[tuple[int, Kind], float]) -> float:
    return price(actions, seconds_of=seconds_of).total_s


def _slotless(block: int) -> Action:
    """Negative slots are nobody's: the compute waits for its turn only."""
    return Action(block, Kind.COMPUTE, -2 - block)
