"""A schedule is data: a list of uploads, computations and downloads of blocks, with their slots, in issue order.

Pure functions make and price schedules without a GPU; `runtime` executes them. For example, `0H0 1H1 0C0 0D0
2H0` uploads (H) block 0 to slot 0 and block 1 to slot 1. It then computes (C) block 0, downloads (D) it, and uploads
block 2 to the slot that became free.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

NUM_CHUNKS = 4
"""Slots are copied in so many chunks: an upload to a slot starts when the download out of it has copied one chunk."""


class Kind(Enum):
    UPLOAD = "H"
    COMPUTE = "C"
    DOWNLOAD = "D"


@dataclass(frozen=True)
class Action:
    block: int
    kind: Kind
    slot: int

    def __str__(self) -> str:
        return f"{self.block}{self.kind.value}{self.slot}"


def sweep(
    order: Sequence[int],
    *,
    num_slots: int,
    downloads: Collection[int] = (),
    loaded: Mapping[int, int] | None = None,
    then: Sequence[int] = (),
) -> list[Action]:
    """The schedule of one pass over `order`, a list of block numbers that may have gaps and repeats.

    `loaded` maps blocks that are in slots already to their slots. `then` are the first blocks of the next pass: they
    are uploaded as slots become free, while the rest of the model computes. One slot gives the schedule without
    overlap.
    """
    if num_slots < 1:
        raise ValueError(f"a sweep needs at least one slot, got {num_slots}")
    uses = [*order, *then]
    soon = set(uses[:num_slots])
    slot_of = {block: slot for block, slot in (loaded or {}).items() if block in soon}
    free = deque(slot for slot in range(num_slots) if slot not in slot_of.values())
    actions: list[Action] = []
    claimed: set[int] = set()
    next_upload = 0

    def feed() -> None:
        nonlocal next_upload
        while next_upload < len(uses):
            block = uses[next_upload]
            if block not in slot_of:
                if not free:
                    return
                slot_of[block] = free.popleft()
                actions.append(Action(block, Kind.UPLOAD, slot_of[block]))
            elif block in claimed and next_upload < len(order):
                return  # a repeat: the slot stays in use until the block's earlier use is over
            claimed.add(block)
            next_upload += 1

    for block in order:
        feed()
        actions.append(Action(block, Kind.COMPUTE, slot_of[block]))
        if block in downloads:
            actions.append(Action(block, Kind.DOWNLOAD, slot_of[block]))
        free.append(slot_of.pop(block))
        claimed.discard(block)
    feed()
    return actions


@dataclass(frozen=True)
class Timeline:
    """Start and end of each action of a priced schedule, and how long uploads, compute and downloads are busy. All
    times are in seconds."""

    spans: tuple[tuple[Action, float, float], ...]
    total_s: float
    busy_s: Mapping[Kind, float]


def price(
    actions: Sequence[Action],
    *,
    seconds: Mapping[Kind, float] | None = None,
    seconds_of: Mapping[tuple[int, Kind], float] | None = None,
) -> Timeline:
    """Simulates the schedule. Uploads, computations and downloads each run one at a time, in issue order, with the
    waits that `runtime` issues. A computation waits for its upload. A download waits for its computation; ZO's waits
    only for the first kernel, which is not priced. An upload waits for the slot's last computation, and follows the
    slot's last download by one chunk."""
    num_chunks = NUM_CHUNKS if any(action.slot for action in actions) else 1  # one slot: copies do not overlap
    engine_free = dict.fromkeys(Kind, 0.0)
    filled: dict[int, float] = {}
    drained: dict[int, float] = {}
    saved: dict[int, tuple[float, float]] = {}
    busy = dict.fromkeys(Kind, 0.0)
    spans = []
    for action in actions:
        if seconds_of is not None:
            duration = seconds_of[action.block, action.kind]
        else:
            assert seconds is not None
            duration = seconds[action.kind]
        slot = action.slot
        saving_from, saving_to = saved.get(slot, (0.0, 0.0))
        chunk = (saving_to - saving_from) / num_chunks
        ready = {
            Kind.UPLOAD: max(drained.get(slot, 0.0), saving_from + chunk),
            Kind.COMPUTE: filled.get(slot, 0.0),
            Kind.DOWNLOAD: drained.get(slot, 0.0),
        }[action.kind]
        start = max(engine_free[action.kind], ready)
        end = start + duration
        if action.kind is Kind.UPLOAD:
            end = max(end, saving_to + duration / num_chunks)
            saved.pop(slot, None)
            filled[slot] = end
        elif action.kind is Kind.COMPUTE:
            drained[slot] = end
        else:
            saved[slot] = (start, end)
        engine_free[action.kind] = end
        busy[action.kind] += duration
        spans.append((action, start, end))
    return Timeline(tuple(spans), max((end for _, _, end in spans), default=0.0), busy)
