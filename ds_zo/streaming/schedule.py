"""A schedule is data: a list of copies and computations of blocks, with their slots, in issue order.

Pure functions make and price schedules without a GPU; `runtime` executes them as they stand. For example, `0H0 1H1 0C0
0D0 2H0` uploads (H) block 0 to slot 0 and block 1 to slot 1. It then computes (C) block 0, downloads (D) it, and
uploads block 2 to the slot that became free. A download stands where the last kernel that writes to the block ends.

[Note: low planes are uploaded ahead] A fold applies a block's pending updates to its stored weights. It needs the
block's low plane, whether the block is streamed or resident. Low planes are uploaded (L) in the order of the folds,
each as soon as a low slot is free. A low slot becomes free with the download after its fold. So a low plane may be
uploaded up to a whole fold interval of blocks before its fold. Low planes have an upload stream of their own: an upload
of a block may wait for its slot, and would hold up the low plane that the compute stream needs first.

[Note: one order of gathers] Where ranks store the blocks together, each rank uploads its own shard of a block, and an
all-gather completes the block on each device. In a collective pass every upload is such a gather (G, and g for a low
plane). All ranks must gather the same blocks in the same order, whatever their forwards do. So the schedule follows
from the model and the step alone, and every rank executes all of it: also the gathers of blocks that its forward skips,
and those of the first blocks of the next pass. A low plane is gathered with its block. What a rank uses besides, it
reads by itself.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

NUM_CHUNKS = 4
"""Slots are copied in so many chunks: an upload to a slot starts when the download out of it has copied one chunk."""
NO_SLOT = -1
"""The slot of a block that is on the device."""


class Kind(Enum):
    UPLOAD = "H"
    LOW_UPLOAD = "L"
    GATHER = "G"
    LOW_GATHER = "g"
    COMPUTE = "C"
    DOWNLOAD = "D"

    @property
    def is_low(self) -> bool:
        """A copy to a low slot."""
        return self in (Kind.LOW_UPLOAD, Kind.LOW_GATHER)

    @property
    def engine(self) -> Kind:
        """Actions with one engine are made one at a time."""
        return {Kind.GATHER: Kind.UPLOAD, Kind.LOW_GATHER: Kind.LOW_UPLOAD}.get(self, self)


class Action(NamedTuple):
    block: int
    kind: Kind
    slot: int = NO_SLOT
    """A low slot where `kind.is_low`."""
    low_slot: int = NO_SLOT
    """Of a computation that folds the block, and of the download after it."""

    def __str__(self) -> str:
        slots = f"{self.slot if self.slot != NO_SLOT else ''}{f'+{self.low_slot}' if self.low_slot != NO_SLOT else ''}"
        return f"{self.block}{self.kind.value}{slots}"


def sweep(
    order: Sequence[int],
    *,
    streamed: Collection[int],
    num_slots: int,
    downloads: Collection[int] = (),
    loaded: Mapping[int, int] | None = None,
    then: Sequence[int] = (),
    lows: Sequence[int] = (),
    low_slots: Iterable[int] = (),
    loaded_lows: Mapping[int, int] | None = None,
    gathers: bool = False,
) -> list[Action]:
    """The schedule of one pass over `order`, a list of block numbers that may have gaps and repeats.

    `loaded` maps blocks that are in slots already to their slots. `then` are the first blocks of the next pass: they
    are uploaded as slots become free, while the rest of the model computes. One slot gives the schedule without
    overlap. Blocks of `downloads` are changed, and copied back at their last use.

    `lows`: blocks whose low planes folds need, in the order of the folds, those of the next pass last. `low_slots`: the
    free low slots. `loaded_lows` maps blocks whose low planes are in low slots already to these slots.

    `gathers`: the pass is collective.
    """
    planner = _Sweep(
        [block for block in order if block in streamed],
        [block for block in then if block in streamed][:num_slots],
        num_slots=num_slots,
        loaded=loaded or {},
        gathers=gathers,
        lows=_LowPlanes(lows, low_slots, loaded_lows or {}),
    )
    last_use = {block: i for i, block in enumerate(order) if block in downloads}
    for i, block in enumerate(order):
        planner.feed()
        planner.use(block, download=last_use.get(block) == i)
    planner.feed()
    return planner.actions


class _LowPlanes:
    """The low slots during a sweep."""

    def __init__(self, needed: Sequence[int], free: Iterable[int], loaded: Mapping[int, int]) -> None:
        self._slot_of = dict(loaded)
        self._free = deque(free)
        self._needed = deque(needed)
        """Blocks whose low planes are still to be copied, in the order of their folds."""
        for block in loaded:
            if block in self._needed:
                self._needed.remove(block)

    def take_next(self) -> tuple[int, int] | None:
        """The block whose low plane is copied next, and its slot. None: no slot is free for it. A block that folds
        twice has its second copy after its first fold."""
        if not self._needed or not self._free or self._needed[0] in self._slot_of:
            return None
        return self.take(self._needed[0])

    def take(self, block: int) -> tuple[int, int] | None:
        """The block and a low slot for it. None: its low plane is not needed, or on the device."""
        if block not in self._needed or block in self._slot_of:
            return None
        self._needed.remove(block)
        self._slot_of[block] = self._free.popleft()
        return block, self._slot_of[block]

    def give_back(self, block: int) -> int:
        """Frees the low slot of a block whose fold is done, and returns it. NO_SLOT: the block has none."""
        slot = self._slot_of.pop(block, NO_SLOT)
        if slot != NO_SLOT:
            self._free.append(slot)
        return slot


class _Sweep:
    """The actions of a pass as they are listed, and the slots at that point."""

    def __init__(
        self,
        order: Sequence[int],
        then: Sequence[int],
        *,
        num_slots: int,
        loaded: Mapping[int, int],
        gathers: bool,
        lows: _LowPlanes,
    ) -> None:
        self.actions: list[Action] = []
        self._uses = [*order, *then]
        self._num_of_pass = len(order)
        if self._uses and num_slots < 1:
            raise ValueError(f"a sweep over streamed blocks needs at least one slot, got {num_slots}")
        soon = set(self._uses[:num_slots])
        self._slot_of = {block: slot for block, slot in loaded.items() if block in soon}
        taken = set(self._slot_of.values())
        self._free = deque(slot for slot in range(num_slots) if slot not in taken)
        self._claimed: set[int] = set()
        self._next = 0
        """Index of the next use that has no slot yet."""
        self._gathers, self._lows = gathers, lows
        for block in self._slot_of if gathers else ():
            self._gather_low(block)

    def feed(self) -> None:
        """Lists the copies for which there are slots."""
        while self._next < len(self._uses):
            block, is_of_pass = self._uses[self._next], self._next < self._num_of_pass
            if block not in self._slot_of:
                if not self._free:
                    break
                self._slot_of[block] = self._free.popleft()
                self._list_upload(block, is_of_pass=is_of_pass)
            elif block in self._claimed and is_of_pass:
                break  # a repeat: the slot stays in use until the block's earlier use is over
            self._claimed.add(block)
            self._next += 1
        self._feed_lows()

    def _feed_lows(self) -> None:
        while not self._gathers and (taken := self._lows.take_next()) is not None:
            self.actions.append(Action(taken[0], Kind.LOW_UPLOAD, taken[1]))

    def _list_upload(self, block: int, *, is_of_pass: bool) -> None:
        self.actions.append(Action(block, Kind.GATHER if self._gathers else Kind.UPLOAD, self._slot_of[block]))
        if self._gathers and is_of_pass:
            self._gather_low(block)

    def _gather_low(self, block: int) -> None:
        if (taken := self._lows.take(block)) is not None:
            self.actions.append(Action(taken[0], Kind.LOW_GATHER, taken[1]))

    def use(self, block: int, *, download: bool) -> None:
        """Lists a block's computation, and its download. Its slot is free afterwards."""
        slot = self._slot_of.pop(block, NO_SLOT)
        low_slot = self._lows.give_back(block) if download else NO_SLOT
        self.actions.append(Action(block, Kind.COMPUTE, slot, low_slot))
        if download:
            self.actions.append(Action(block, Kind.DOWNLOAD, slot, low_slot))
            self._feed_lows()
        if slot != NO_SLOT:
            self._free.append(slot)
            self._claimed.discard(block)


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
    """Simulates the schedule. Uploads of blocks, uploads of low planes, computations and downloads each run one at a
    time, in issue order, with the waits that `runtime` issues. A computation waits for its uploads. A download waits
    for its computation; with a low plane it waits only for the fold, which is the first kernel and is not priced. An
    upload waits for the slot's last computation, and follows the slot's last download by one chunk."""
    overlaps = any(action.slot > 0 and not action.kind.is_low for action in actions)
    num_chunks = NUM_CHUNKS if overlaps else 1
    engine_free = dict.fromkeys(Kind, 0.0)
    busy = dict.fromkeys(Kind, 0.0)
    places: dict[tuple[str, int], _Place] = defaultdict(_Place)
    spans = []
    for action in actions:
        kind, slot = action.kind, action.slot
        if seconds_of is not None:
            duration = seconds_of[action.block, kind]
        else:
            assert seconds is not None
            duration = seconds[kind]
        name = ("low slot", slot) if kind.is_low else ("block", action.block) if slot == NO_SLOT else ("slot", slot)
        used, folds = [places[name]], action.low_slot != NO_SLOT
        if folds:
            used.append(places["low slot", action.low_slot])
        first = used[-1:] if kind is Kind.DOWNLOAD else used
        start = max(engine_free[kind.engine], *(place.ready(kind, num_chunks) for place in first))
        end = start + duration
        for place in used:
            if kind is Kind.COMPUTE:
                place.drained = start if folds and place is used[-1] else end
            elif kind is Kind.DOWNLOAD:
                place.saving_from, place.saved = start, end
            else:
                end = max(end, place.saved + duration / num_chunks)
                place.filled, place.saving_from, place.saved = end, 0.0, 0.0
        engine_free[kind.engine] = end
        busy[kind] += duration
        spans.append((action, start, end))
    return Timeline(tuple(spans), max((end for _, _, end in spans), default=0.0), busy)


@dataclass
class _Place:
    """A slot, or a block on the device: when it was last filled, used and copied back."""

    filled: float = 0.0
    drained: float = 0.0
    saving_from: float = 0.0
    saved: float = 0.0

    def ready(self, kind: Kind, num_chunks: int) -> float:
        """When the action may start."""
        if kind is Kind.COMPUTE:
            return self.filled
        if kind is Kind.DOWNLOAD:
            return self.drained
        return max(self.drained, self.saving_from + (self.saved - self.saving_from) / num_chunks)
