"""How ZO visits a unit: bring it, replay what is pending, store when its turn to fold has come, and hand out working
copies.

[Note: clean weights stay clean] Stored weights are never perturbed in place. A visit reads them once and writes
perturbed copies to one scratch buffer that all units share. What a visit stores back (its slot, or at a fold the home)
is what every pass of that visit starts from, so the passes differ by the perturbation and nothing else.

[Note: copies in pairs] Where there is room for a second copy of a block, one launch makes those of both signs: one
reading and one draw less, and with one direction nothing to store but folds. The copies have the same bits either way.
The second copy lies at the scratch's end, where large modules outside the blocks (an embedding, a head) have theirs
too: no pass enters one before all have run the blocks that come before it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from ds_zo import ops
from ds_zo.backends.common.interrupts import interrupts
from ds_zo.backends.zo.replay_log import CAPACITY, ReplayLog
from ds_zo.backends.zo.step_time import TimedForward
from ds_zo.checkpoint.replay import due
from ds_zo.streaming.placement import Placement
from ds_zo.streaming.runtime import Runtime
from ds_zo.streaming.sharded import ShardedRuntime
from ds_zo.streaming.slots import Slot
from ds_zo.streaming.units import Planes, Unit

_T = TypeVar("_T")
_MOST_KEPT = 4096


@dataclass(frozen=True)
class Noise:
    """What is fixed about the perturbation for a whole run."""

    seed: int
    zo_eps: float
    distribution: ops.Distribution
    rounding: ops.Rounding


class Materialiser:
    """All traffic between stored weights and working copies."""

    def __init__(
        self,
        placement: Placement,
        runtime: Runtime,
        log: ReplayLog,
        *,
        noise: Noise,
        interval: int,
        num_passes: int,
        pairs: bool,
        device: torch.device,
        first_direction: int = 0,
    ) -> None:
        self.placement = placement
        self._first_direction = first_direction
        """Of those that this rank's passes try."""
        self.runtime = runtime
        self.log = log
        self.noise = noise
        self.interval = interval
        self.device = device
        scratch_nbytes = placement.pair_scratch_nbytes if pairs else placement.scratch_nbytes
        self.scratch = torch.empty(scratch_nbytes, dtype=torch.uint8, device=device)
        self._pair_at = scratch_nbytes - (placement.block_scratch_nbytes if pairs else 0)
        self._pair = self.scratch[self._pair_at :] if pairs else None
        """Copies with the other sign; see [Note: copies in pairs]."""
        self._one_launch = pairs and num_passes == 2
        self._as_stored = not (self._one_launch and placement.narrow)
        """Passes start from weights rounded as a slot would store them, so that they do so on every device. Where
        copies always come in one launch, nothing is rounded but the copies."""
        benched = interval > 1 and not self._one_launch
        replay_slot_nbytes = max((u.nbytes for u in placement.blocks if not u.streamed), default=0) if benched else 0
        self._replay_slot = Slot(replay_slot_nbytes, device)
        """Where a resident block that does not fold puts its replayed weights: its home must keep the last folded
        ones."""
        self._open: tuple[Unit, Slot | None] | None = None
        """The unit that is being visited, and its slot until that may be filled again."""
        self._folding: set[int] = set()
        self.rehearsal: TimedForward | None = None
        """When not None: blocks replay what it says instead of what is pending, and their waits are timed."""
        self._kept_planes: dict[Any, list[Planes]] = {}
        self._kept_outs: dict[Any, list[torch.Tensor | None]] = {}
        self._kept_views: dict[Any, list[torch.Tensor]] = {}
        runtime.wants_low = lambda unit: self.pending(unit) > 0
        if isinstance(runtime, ShardedRuntime):
            runtime.fold_unvisited = self._bring_up_to_date
        self._forward_begins = False

    @property
    def in_one_launch(self) -> bool:
        """Whether the copies of a step's two passes are made together, each always in the same place."""
        return self._one_launch

    @property
    def scratch_nbytes(self) -> int:
        return self.scratch.numel()

    @property
    def free_nbytes(self) -> int:
        """Of the scratch: what may be written while passes have still to run a block. Second copies lie behind it."""
        return self._pair_at

    def lends(self, tensor: torch.Tensor) -> bool:
        """Whether it lies in a buffer that units share."""
        if tensor.layout is not torch.strided:
            return False
        address = tensor.untyped_storage().data_ptr()
        return address == self.scratch.data_ptr() or any(address == s.buffer.data_ptr() for s in self.runtime.slots)

    def close(self) -> None:
        """Lets go of device buffers."""
        empty = torch.empty(0, dtype=torch.uint8, device=self.device)
        self.scratch, self._replay_slot.buffer, self._pair = empty, empty, None
        self.runtime.let_go()
        for kept in (self._kept_planes, self._kept_outs, self._kept_views):
            kept.clear()  # type: ignore[attr-defined]

    # Which units fold

    def pending(self, unit: Unit) -> int:
        """Updates that its stored weights do not include yet."""
        return self.log.length - unit.version if unit.trainable else 0

    def _to_replay(self, unit: Unit) -> int:
        if self.rehearsal is not None and unit.is_block and unit.trainable:
            return self.rehearsal.num_updates
        return self.pending(unit)

    def folds(self, unit: Unit, *, step: int) -> bool:
        """A pure function of step and unit, staggered over blocks, the same for resident and streamed ones."""
        return due(unit, step=step, interval=self.interval, capacity=CAPACITY)

    def begin_forward(self) -> None:
        """A training forward starts. The first of its passes is the one that all ranks make alike."""
        self._forward_begins = True

    def begin(self) -> None:
        """A training pass starts."""
        self._break_off()
        if self._forward_begins:
            self.runtime.join(ahead=True)
            self._forward_begins = False
        step = self.log.length
        folding = [u for u in self.placement.blocks if self.pending(u) and self.folds(u, step=step)]
        kept = [u for u in self.placement.ambient if u.is_block and self.folds(u, step=step)]
        self._folding = {id(u) for u in (*folding, *kept)}
        again = self.interval == 1
        fold_next = [
            u for u in self.placement.blocks if self.folds(u, step=step + 1) and (again or id(u) not in self._folding)
        ]
        self.runtime.start(self.placement.blocks, downloads=folding, lows=[*folding, *fold_next])

    def _break_off(self) -> None:
        """A visit that nobody ended leaves its slot to whatever was issued for it."""
        if self._open is not None and self._open[1] is not None:
            self.runtime.abandon(self._open[1])
        self._open = None

    def end(self) -> None:
        """The pass is over."""
        self._break_off()
        try:
            self.runtime.finish()
        finally:
            self._folding = set()

    # Training visits

    def perturb_block(self, unit: Unit, *, index: int, last: bool) -> list[torch.Tensor] | None:
        """Makes ready pass `index`'s copy of a block. Returns the parameters' views, or None where they are in place
        already. `last`: no further pass of this visit follows, so the slot may go as soon as it has been read."""
        first = self._open is None or self._open[0] is not unit
        if first:
            with nullcontext() if self.rehearsal is None else self.rehearsal.waiting():
                self._open = (unit, self.runtime.arrive(unit) if unit.streamed else None)
        assert self._open is not None
        slot = self._open[1]
        pair = None if first and last else self._pair
        is_mirror = pair is not None and index % 2 == 1
        if first:
            self._bring_up_to_date(unit, slot, scratch=self.scratch, pair=pair, index=index, last=last)
        elif not is_mirror:
            on_replay_slot = slot is None and self._replay_slot.unit is unit
            base = self._replay_slot.buffer if on_replay_slot else unit.store_buffer if slot is None else slot.buffer
            outs = self._outs(unit, self.scratch)
            self._apply(unit, self._planes(unit, base), outs=outs, pair=pair, index=index)
        source = unit.store_buffer if slot is None else slot.buffer
        if (last or (pair is not None and self._one_launch)) and not _has_direct(unit):
            self._release(unit)
        if pair is None:
            return self._views(unit, source, self.scratch) if first else None
        return self._views(unit, source, pair if is_mirror else self.scratch)

    def time_replay(self, unit: Unit, slot: Slot, num_updates: int) -> None:
        """For the clock: makes a copy, of whatever the slot and the log hold, that nobody reads."""
        outs = self._outs(unit, self.scratch)
        self._apply(unit, self._planes(unit, slot.buffer), outs=outs, index=0, pending=num_updates)

    def leave_block(self, unit: Unit) -> None:
        """The last pass has run the block."""
        if self._open is not None and self._open[0] is unit:
            self._depart(unit)
        unit.bind_stored()

    def perturb_edge(self, unit: Unit, *, index: int, scratch: torch.Tensor) -> list[torch.Tensor]:
        """Makes ready pass `index`'s copy of a resident unit outside the blocks. `scratch` outlives the step."""
        self._bring_up_to_date(unit, None, scratch=scratch, index=index)
        return self._views(unit, unit.store_buffer, scratch)

    def _bring_up_to_date(
        self,
        unit: Unit,
        slot: Slot | None,
        *,
        scratch: torch.Tensor | None = None,
        pair: torch.Tensor | None = None,
        index: int | None = None,
        last: bool = False,
    ) -> None:
        """Replays what is pending and stores it where this visit's passes start from; makes the first pass's copy in
        `scratch` on the way. Where no other pass starts from it and no fold is due, nothing is stored."""
        pending = self._to_replay(unit)
        source = unit.store_buffer if slot is None else slot.buffer
        outs = None if scratch is None else self._outs(unit, scratch)
        if slot is None and unit.is_block:  # an edge may come between two passes' visits of the block on the bench
            self._replay_slot.give_up()
        fold = id(unit) in self._folding if unit.is_block else True
        alone = index is not None and (self._one_launch or last)
        if not pending or (alone and not fold):
            self._apply(unit, self._planes(unit, source), outs=outs, pair=pair, index=index, pending=pending)
            return
        step = self.log.length
        low = self.runtime.arrive_low(unit) if fold and unit.low_nbytes else None
        target = source
        if slot is None and not fold:
            self._replay_slot.unit, self._replay_slot.version = unit, step
            target = self._replay_slot.buffer
        if slot is not None:
            self.runtime.before_writing(slot)
            slot.version = step  # the home follows when the slot is sent back
        brought, stored = self._planes(unit, source, low), self._planes(unit, target, low)
        with interrupts.deferred() if fold else nullcontext():  # see [Note: whole steps]
            self._apply(unit, brought, stored=stored, outs=outs, pair=pair, index=index, pending=pending, fold=fold)
            if slot is not None:
                if fold:
                    self.runtime.written(unit, slot)
            elif fold:
                unit.version = step
                if unit.low_streamed:
                    self.runtime.written(unit, None)

    def _release(self, unit: Unit, *, send_back: bool | None = None) -> None:
        """Nothing that is issued from here on reads the slot."""
        assert self._open is not None
        slot = self._open[1]
        self._open = (unit, None)
        if slot is not None:
            self.runtime.depart(unit, slot, send_back=send_back)

    def _depart(self, unit: Unit, *, send_back: bool | None = None) -> None:
        self._release(unit, send_back=send_back)
        self._open = None

    # Materialiser that change nothing: evaluation, saving

    def clean(self, unit: Unit, *, scratch: torch.Tensor) -> list[torch.Tensor]:
        """The weights of the current step, whatever is pending, rounded to nearest into a copy (or the stored bytes
        where they are the weights)."""
        if not self.pending(unit) and all(part.viewable for part in unit.parts):
            return unit.views(unit.planes(self._open_clean(unit)), [None] * len(unit.parts))
        return self._read(unit, unit.outs(scratch))

    def master(self, unit: Unit) -> list[torch.Tensor]:
        """The weights of the current step in float32 (frozen ones as they are stored)."""
        outs = [None if p.direct else torch.empty(p.numel, dtype=torch.float32, device=self.device) for p in unit.parts]
        return self._read(unit, outs)

    def _read(self, unit: Unit, outs: Sequence[torch.Tensor | None]) -> list[torch.Tensor]:
        source = self._open_clean(unit)
        planes = unit.planes(source, self.runtime.arrive_low(unit) if unit.low_nbytes else None)
        self._apply(unit, planes, outs=outs, pending=self.pending(unit))
        return unit.views(planes, outs)

    def _open_clean(self, unit: Unit) -> torch.Tensor:
        if not unit.streamed:
            return unit.store_buffer
        self._break_off()
        slot = self.runtime.arrive(unit)
        self._open = (unit, slot)
        return slot.buffer

    def scratch_for(self, unit: Unit) -> torch.Tensor:
        """Scratch for a visit outside a forward."""
        if unit.scratch_nbytes <= self.scratch.numel():
            return self.scratch
        return torch.empty(unit.scratch_nbytes, dtype=torch.uint8, device=self.device)

    def leave_clean(self, unit: Unit) -> None:
        """The unit's working copy is no longer read."""
        if self._open is not None and self._open[0] is unit:
            self._depart(unit, send_back=False)
        elif unit.low_streamed:
            self.runtime.depart(unit, None, send_back=False)
        unit.bind_stored()

    @torch.no_grad()
    def make_room(self) -> None:
        """Before an update is logged: a unit that no forward visits would miss the oldest entry, which goes."""
        for unit in self.placement.units:
            if self.pending(unit) >= CAPACITY:
                self.fold_now(unit)

    @torch.no_grad()
    def fold_now(self, *units: Unit) -> None:
        """Stores what is pending, out of turn, in one pass: before something that replay could not express (a changed
        group, loaded weights). By all ranks, where they share a host store."""
        behind = [unit for unit in units if self.pending(unit)]
        if not any(unit.streamed or unit.low_streamed for unit in behind):
            self._fold_here(behind)
            return
        self._break_off()
        self._folding = {id(unit) for unit in behind}
        blocks = [unit for unit in behind if unit.is_block]
        if any(unit.streamed for unit in blocks):
            self.runtime.join(ahead=False)
        try:
            self.runtime.start(blocks, downloads=blocks, lows=blocks)
            for unit in behind:
                slot = self.runtime.arrive(unit) if unit.streamed else None
                self._open = (unit, slot)
                self._bring_up_to_date(unit, slot)
                self._depart(unit)
                unit.bind_stored()
        finally:
            self.end()

    def _fold_here(self, units: Sequence[Unit]) -> None:
        """Of units that are on the device whole. Nothing that streams is disturbed."""
        before, self._folding = self._folding, {id(unit) for unit in units}
        try:
            for unit in units:
                self._bring_up_to_date(unit, None)
                unit.bind_stored()
        finally:
            self._folding = before

    # Slices of buffers that live as long as we do. Slicing costs more than launching a small block's kernels.

    def _planes(self, unit: Unit, buffer: torch.Tensor, low: torch.Tensor | None = None) -> list[Planes]:
        key = (id(unit), buffer.data_ptr(), 0 if low is None else low.data_ptr())
        return self._kept(self._kept_planes, key, lambda: unit.planes(buffer, low))

    def _outs(self, unit: Unit, scratch: torch.Tensor) -> list[torch.Tensor | None]:
        return self._kept(self._kept_outs, (id(unit), scratch.data_ptr()), lambda: unit.outs(scratch))

    def _views(self, unit: Unit, source: torch.Tensor, scratch: torch.Tensor) -> list[torch.Tensor]:
        """A tensor a parameter: a working copy, or the stored bytes of a frozen one, which no visit copies."""
        key = (id(unit), source.data_ptr(), scratch.data_ptr())
        return self._kept(
            self._kept_views, key, lambda: unit.views(self._planes(unit, source), self._outs(unit, scratch))
        )

    @staticmethod
    def _kept(kept: dict[Any, _T], key: Any, make: Callable[[], _T]) -> _T:
        if key not in kept:
            if len(kept) >= _MOST_KEPT:  # buffers that come and go: the ablation `reuse_buffers: false`
                kept.clear()
            kept[key] = make()
        return kept[key]

    # The op

    def _apply(
        self,
        unit: Unit,
        source: Sequence[Planes],
        *,
        stored: Sequence[Planes] | None = None,
        outs: Sequence[torch.Tensor | None] | None = None,
        pair: torch.Tensor | None = None,
        index: int | None = None,
        pending: int = 0,
        fold: bool = False,
    ) -> None:
        """One launch a part, none where there is nothing to do. `index` is the pass (2 a direction, + then -); None
        makes a clean copy."""
        mirrors = None if pair is None else self._outs(unit, pair)
        step = self.log.length
        direction, sign = (0, 0.0) if index is None else (self._first_direction + index // 2, 1.0 - 2.0 * (index % 2))
        for i, part in enumerate(unit.parts):
            if part.direct:
                continue
            out = None if outs is None else outs[i]
            dst = None if stored is None else stored[i]
            if out is None and dst is None:
                continue
            ops.replay_perturb(
                source[i].storage,
                table=part.table(self.device),
                log=self.log.rows,
                first_entry=(step - pending) % CAPACITY,
                num_entries=pending,
                num_directions=self.log.num_directions,
                dst=None if dst is None else dst.storage,
                out=out,
                pair=None if mirrors is None else mirrors[i],
                as_stored=self._as_stored and index is not None and dst is None and pending > 0,
                low_in=source[i].low,
                low_out=None if dst is None else dst.low,
                exponents_in=source[i].exponents,
                exponents_out=None if dst is None else dst.exponents,
                seed=self.noise.seed,
                step=step,
                direction=direction,
                scale=sign * self.noise.zo_eps,
                distribution=self.noise.distribution,
                fold=fold,
                rounding=self.noise.rounding,
            )


def _has_direct(unit: Unit) -> bool:
    return any(part.direct for part in unit.parts)
