"""Materialises weights for ZO: turns a unit's stored weights into the working copies that a forward reads.

To materialise a unit, the engine brings its stored bytes to the device if they stream. It replays the updates that the
bytes do not include yet, and writes working copies. When a fold of the unit is due, it also stores the updated weights.

[Note: clean weights stay clean] Stored weights are never perturbed in place. Materialising reads them once and writes
perturbed copies to one scratch buffer that all units share. Replayed weights may also be stored: in the slot, in the
replay slot, or at a fold in the store buffer. All passes over the unit start from these stored bits, so the passes
differ by the perturbation and nothing else.

[Note: copies in pairs] Where memory allows a second copy of a block, one launch makes the + and the - copy. This saves
one read and one noise draw. With one direction, nothing is stored except at folds. The copies have the same bits as
copies made one at a time. The second copy lies at the end of the scratch. Large modules outside the blocks (an
embedding, a head) put their copies there too. This is safe, because no pass enters such a module before all passes have
run the blocks before it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import torch

from ds_zo import ops
from ds_zo.backends.zo.cached_views import CachedViews
from ds_zo.backends.zo.clean_copies import CleanCopies
from ds_zo.backends.zo.replay_log import CAPACITY, ReplayLog
from ds_zo.backends.zo.step_time import TimedForward
from ds_zo.streaming.fold_schedule import due
from ds_zo.streaming.interrupts import interrupts
from ds_zo.streaming.placement import Placement
from ds_zo.streaming.runtime import Runtime
from ds_zo.streaming.slot import Slot
from ds_zo.streaming.units import PARTLY_FOLDED, Unit
from ds_zo.streaming.use import Use


@dataclass(frozen=True)
class Perturbation:
    """The parts of the perturbation that stay fixed for a whole run."""

    seed: int
    zo_eps: float
    distribution: ops.Distribution
    rounding: ops.Rounding

    def noise(self, *, step: int, direction: int) -> ops.Noise:
        return ops.Noise(self.seed, step, direction, self.distribution, self.rounding)


class Materialiser:
    """Makes working copies from stored weights, and stores weights whose fold is due.

    Each unit is materialised (`materialise_...`), shown (`show`), read by the forward, and given back (`hide`).
    """

    def __init__(
        self,
        placement: Placement,
        runtime: Runtime,
        log: ReplayLog,
        *,
        perturbation: Perturbation,
        interval: int,
        num_passes: int,
        pairs: bool,
        device: torch.device,
        copies: CleanCopies,
        first_direction: int = 0,
        fill_factors: Callable[[Unit], None] = lambda unit: None,
    ) -> None:
        """`fill_factors` is called when a unit is materialised for passes."""
        self.copies = copies
        self._fill_factors = fill_factors
        self.noise_scale = 0.0 if perturbation.distribution == "rank1" else perturbation.zo_eps
        """Scale of the noise in copies for passes. Members add their noise outside the weights."""
        self.placement = placement
        self._first_direction = first_direction
        """Index of the first noise direction that this rank evaluates."""
        self.runtime = runtime
        self.log = log
        self.perturbation = perturbation
        self.interval = interval
        self.device = device
        scratch_nbytes = placement.pair_scratch_nbytes if pairs else placement.scratch_nbytes
        self.scratch = torch.empty(scratch_nbytes, dtype=torch.uint8, device=device)
        self._pair_at = scratch_nbytes - (placement.second_copy_nbytes if pairs else 0)
        self._pair = self.scratch[self._pair_at :] if pairs else None
        """Scratch for the block's copy with the other sign, or None; see [Note: copies in pairs]."""
        self.in_one_launch = pairs and num_passes == 2
        """Whether one launch makes the copies of a step's two passes, each always at the same address."""
        self.has_fixed_copies = self.in_one_launch or num_passes == 1
        """Whether a block's copies for each pass lie at the same addresses in every step."""
        self._as_stored = num_passes > 1 and not (self.in_one_launch and placement.narrow)
        """Passes start from weights rounded as a slot would store them, so that every device computes the same bits.
        False where one launch makes all copies from narrow storage: then only the copies are rounded."""
        needs_replay_slot = interval > 1 and num_passes > 1 and not self.in_one_launch
        replay_slot_nbytes = (
            max((u.nbytes for u in placement.blocks if not u.streamed), default=0) if needs_replay_slot else 0
        )
        self._replay_slot = Slot(replay_slot_nbytes, runtime.streams)
        """Holds the replayed weights of a resident block between its passes when no fold is due. The block's store
        buffer must keep the weights of its last fold."""
        self._use: Use | None = None
        """The use of the block, or of the unit read without noise, that is materialised now."""
        self._folding: set[int] = set()
        """Blocks that fold in the pass that is running, by `id(unit)`."""
        self.timed_forward: TimedForward | None = None
        """None outside a timed forward. During one, blocks replay its updates instead of the pending ones, and it times
        their waits for uploads."""
        self._cached = CachedViews()
        self._next_pass_is_first = False

    @property
    def free_nbytes(self) -> int:
        """Leading bytes of the scratch that may be written while passes have still to run a block. Second copies of
        blocks lie behind them. None may be written if passes share the decoded frozen parameters of a block."""
        return 0 if self.placement.decodes_frozen else self._pair_at

    def is_in_shared_buffer(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor's storage is the scratch, a slot or a kept copy, which the caller must not change."""
        if tensor.layout is not torch.strided:
            return False
        address = tensor.untyped_storage().data_ptr()
        if address in self.copies.addresses:
            return True
        return address == self.scratch.data_ptr() or any(address == s.buffer.data_ptr() for s in self.runtime.slots)

    def close(self) -> None:
        """Frees the device buffers."""
        self.copies.drop()
        empty = torch.empty(0, dtype=torch.uint8, device=self.device)
        self.scratch, self._replay_slot.buffer, self._pair = empty, empty, None
        self.runtime.free_buffers()
        self._cached.clear()

    # Which units fold

    def pending(self, unit: Unit) -> int:
        """Number of updates that the unit's stored weights do not include yet."""
        check_whole(unit)
        return self.log.length - unit.version if unit.trainable else 0

    def _to_replay(self, unit: Unit) -> tuple[ReplayLog, int]:
        """The log to replay into the unit's copies, and the number of its newest updates. A timed forward has its own
        for blocks."""
        if self.timed_forward is not None and unit.is_block and unit.trainable:
            return self.timed_forward.log, self.timed_forward.num_updates
        return self.log, self.pending(unit)

    def folds(self, unit: Unit, *, step: int) -> bool:
        """Whether the unit folds in `step`. A pure function of step and unit, staggered over blocks, and the same for
        resident and streamed blocks."""
        return due(unit, step=step, interval=self.interval, capacity=CAPACITY)

    def begin_forward(self) -> None:
        """Marks the start of a training forward. Its first pass is the one that all ranks run alike."""
        self.copies.drop()
        self._next_pass_is_first = True

    def begin_pass(self) -> None:
        """Plans a training pass: which blocks fold in it, and which low planes are uploaded for this pass and the
        next."""
        self._abandon_active()
        collective, self._next_pass_is_first = self._next_pass_is_first or None, False
        step = self.log.length
        folding = [u for u in self.placement.blocks if self.pending(u) and self.folds(u, step=step)]
        pass_long = [u for u in self.placement.pass_long if u.is_block and self.folds(u, step=step)]
        self._folding = {id(u) for u in (*folding, *pass_long)}
        again = self.interval == 1
        fold_next = [
            u for u in self.placement.blocks if self.folds(u, step=step + 1) and (again or id(u) not in self._folding)
        ]
        self.runtime.start(
            self.placement.blocks,
            downloads=folding,
            lows=[*folding, *fold_next],
            collective=collective,
            fold=self._fold_skipped,
        )

    def _abandon_active(self) -> None:
        """Gives up the unit of an interrupted pass. Its slot may be filled again after the kernels issued for it."""
        use, self._use = self._use, None
        if use is not None:
            use.abandon()

    def end_pass(self) -> None:
        """Ends the pass, whether it completed or was interrupted."""
        self._abandon_active()
        try:
            self.runtime.finish()
        finally:
            self._folding = set()

    # Training passes

    def materialise_block(self, unit: Unit, *, index: int, last: bool) -> list[torch.Tensor] | None:
        """Makes pass `index`'s copy of a block. Returns one view per parameter, or None where the parameters are views
        of that memory already. `last` says that no later pass reads the block, so its slot is free as soon as this copy
        is made."""
        use = self._use
        first = use is None or use.unit is not unit
        if use is None or first:
            with nullcontext() if self.timed_forward is None else self.timed_forward.waiting():
                use = self._open(unit)
        pair = None if first and last else self._pair
        is_second_of_pair = pair is not None and index % 2 == 1
        if first:
            self._fill_factors(unit)
            self._replay_pending(use, scratch=self.scratch, pair=pair, index=index, last=last)
        elif not is_second_of_pair:
            in_replay_slot = not use.is_in_slot and self._replay_slot.unit is unit
            base = self._replay_slot.buffer if in_replay_slot else use.buffer
            outs = self._cached.outs(unit, self.scratch)
            self._apply(unit, self._cached.planes(unit, base), outs=outs, pair=pair, index=index, decodes=False)
        source = use.buffer
        if (last or (pair is not None and self.in_one_launch)) and not any(part.direct for part in unit.parts):
            use.release_slot()
        if pair is None:
            return self._cached.views(unit, source, self.scratch) if first else None
        return self._cached.views(unit, source, self.scratch, second=pair if is_second_of_pair else None)

    def time_replay(self, unit: Unit, slot: Slot, num_updates: int) -> None:
        """Makes a copy that nothing reads, to measure how long replaying `num_updates` takes. The values in the slot
        and the log do not matter."""
        outs = self._cached.outs(unit, self.scratch)
        planes = self._cached.planes(unit, slot.buffer)
        self._apply(unit, planes, outs=outs, index=0, updates=self.log.newest(num_updates))

    def materialise_outer(self, unit: Unit, *, index: int, scratch: torch.Tensor) -> list[torch.Tensor]:
        """Makes pass `index`'s copy of a resident unit outside the blocks, and returns one view per parameter.
        `scratch` must outlive the step: views of it are cached."""
        self._fill_factors(unit)
        self._replay_pending(Use(unit, self.runtime), scratch=scratch, index=index)
        return self._cached.views(unit, unit.store_buffer, scratch)

    def _fold_skipped(self, unit: Unit, slot: Slot) -> None:
        """Folds a unit that the forward of this rank has skipped."""
        self._replay_pending(Use(unit, self.runtime, slot=slot))

    def _replay_pending(
        self,
        use: Use,
        *,
        scratch: torch.Tensor | None = None,
        pair: torch.Tensor | None = None,
        index: int | None = None,
        last: bool = False,
    ) -> None:
        """Replays the unit's pending updates and stores the result where its passes start from. Makes the first pass's
        copy in `scratch` (and `pair`) in the same launch. If no other pass reads the unit and no fold is due, nothing
        is stored."""
        unit, source = use.unit, use.buffer
        log, pending = self._to_replay(unit)
        outs = None if scratch is None else self._cached.outs(unit, scratch)
        # Only a block gives the replay slot up: an outer unit may run between two passes of the block that is in it.
        if not use.is_in_slot and unit.is_block:
            self._replay_slot.invalidate()
        fold = pending > 0 and (id(unit) in self._folding or not unit.is_block)
        # A pass that runs alone starts from the rounded weights that the passes of the first direction start from.
        is_alone = index is not None and index > 1 and self._as_stored and pending > 0 and not fold
        is_only_reader = index is not None and (self.in_one_launch or last) and not is_alone
        low = self.runtime.acquire_low(unit) if fold and unit.low_nbytes else None
        target = None
        if fold or (pending and not is_only_reader):
            target = source
            use.before_writing(self.log.length)  # `unit.version` follows when the slot is downloaded
            if not use.is_in_slot and not fold:
                self._replay_slot.take(unit)
                target = self._replay_slot.buffer
        planes = self._cached.planes(unit, source, low)
        stored = None if target is None else self._cached.planes(unit, target, low)
        if is_alone:
            assert stored is not None
            self._apply(unit, planes, stored=stored, index=0, updates=log.newest(pending))
            planes, stored, pending = stored, None, 0
        with interrupts.deferred() if fold else nullcontext():  # see [Note: whole steps]
            updates = log.newest(pending)
            try:
                self._apply(unit, planes, stored=stored, outs=outs, pair=pair, index=index, updates=updates, fold=fold)
                if fold:
                    use.commit(self.log.length)
            except BaseException:
                if fold:
                    use.break_off()
                raise

    # Uses of units

    def _open(self, unit: Unit) -> Use:
        """Makes the unit the one that is materialised. Its stored bytes are then on the device."""
        self._use = use = Use(unit, self.runtime)
        use.open()
        return use

    def _use_of(self, unit: Unit) -> Use:
        """The use of a unit. One that needs no slot is the same at any time."""
        use = self._use
        return use if use is not None and use.unit is unit else Use(unit, self.runtime)

    def show(self, unit: Unit, views: Iterable[torch.Tensor]) -> None:
        """Makes the unit's parameters show `views`, in `placed` order, until `hide`."""
        self._use_of(unit).show(views)

    def hide(self, unit: Unit) -> None:
        """Ends the use of a unit: its parameters show the stored weights."""
        use = self._use_of(unit)
        if use is self._use:
            self._use = None
        use.release_slot()
        use.close()

    # Copies without noise, for evaluation and saving. Nothing is stored.

    def materialise_clean(self, unit: Unit, *, scratch: torch.Tensor) -> list[torch.Tensor]:
        """Returns the unit's weights of the current step, one view per parameter, without noise. Views are of the
        stored bytes where these are the current weights, else of a copy in `scratch`, rounded to nearest."""
        if not self.pending(unit) and unit.viewable:
            return unit.views(unit.planes(self._stored_on_device(unit)), [None] * len(unit.parts))
        return self._read(unit, unit.outs(scratch))

    def materialise_for_forward(self, unit: Unit, *, scratch: torch.Tensor) -> list[torch.Tensor]:
        """As `materialise_clean`, for a forward that others may follow: pending updates are replayed once. See
        [Note: kept clean copies]."""
        if not self.pending(unit):
            return self.materialise_clean(unit, scratch=scratch)
        kept = self.copies.find(unit, step=self.log.length)
        if kept is None:
            views = self.materialise_clean(unit, scratch=scratch)
            self.copies.keep(unit, scratch)
            return views
        outs = unit.outs(scratch, second=kept)
        if not any(part.frozen for part in unit.parts):
            return unit.views((), outs)
        planes = unit.planes(self._stored_on_device(unit))
        frozen = [out if part.frozen else None for part, out in zip(unit.parts, outs, strict=True)]
        self._apply(unit, planes, outs=frozen)
        return unit.views(planes, outs)

    def materialise_fp32(self, unit: Unit) -> list[torch.Tensor]:
        """Returns the unit's weights of the current step in float32, and direct ones as they are stored."""
        outs = [None if p.direct else torch.empty(p.numel, dtype=torch.float32, device=self.device) for p in unit.parts]
        return self._read(unit, outs)

    def _read(self, unit: Unit, outs: Sequence[torch.Tensor | None]) -> list[torch.Tensor]:
        """Replays the unit's pending updates into `outs`, without storing them, and returns one view per parameter."""
        source = self._stored_on_device(unit)
        planes = unit.planes(source, self.runtime.acquire_low(unit) if unit.low_nbytes else None)
        self._apply(unit, planes, outs=outs, updates=self.log.newest(self.pending(unit)))
        return unit.views(planes, outs)

    def _stored_on_device(self, unit: Unit) -> torch.Tensor:
        """Returns the unit's stored bytes on the device: its store buffer if it is resident, else the slot it is
        uploaded to."""
        if not unit.streamed:
            return unit.store_buffer
        self._abandon_active()
        return self._open(unit).buffer

    def scratch_for(self, unit: Unit) -> torch.Tensor:
        """Scratch for materialising the unit outside a forward."""
        if unit.scratch_nbytes <= self.scratch.numel():
            return self.scratch
        return torch.empty(unit.scratch_nbytes, dtype=torch.uint8, device=self.device)

    def release_clean(self, unit: Unit) -> None:
        """Releases a unit that a method above has materialised: its copy is read no more."""
        self.copies.check(unit)
        if unit.low_streamed and not unit.streamed:
            self.runtime.release(unit, None)
        self.hide(unit)

    def fold_due(self) -> None:
        """Folds every unit whose fold is due in this step and that no forward has folded, because it was not used. So
        folds depend on the step alone: all ranks make the same ones, and so does a replay of recorded steps."""
        step = self.log.length
        self.fold_now(*(unit for unit in self.placement.units if self.pending(unit) and self.folds(unit, step=step)))

    @torch.no_grad()
    def fold_now(self, *units: Unit) -> None:
        """Folds the units' pending updates at once, before a change that replay cannot express: changed groups, loaded
        weights. Where ranks share a host store, all of them must call it."""
        behind = [unit for unit in units if self.pending(unit)]
        if not any(unit.streamed or unit.low_streamed for unit in behind):
            self._fold_on_device(behind)
            return
        self._abandon_active()
        self._folding = {id(unit) for unit in behind}
        blocks = [unit for unit in behind if unit.is_block]
        try:
            collective = False if any(unit.streamed for unit in blocks) else None
            self.runtime.start(blocks, downloads=blocks, lows=blocks, collective=collective, fold=self._fold_skipped)
            for unit in behind:
                self._replay_pending(self._open(unit))
                self.hide(unit)
        finally:
            self.end_pass()

    def _fold_on_device(self, units: Sequence[Unit]) -> None:
        """Folds units whose bytes are all on the device. Uploads and downloads in flight are not disturbed."""
        before, self._folding = self._folding, {id(unit) for unit in units}
        try:
            for unit in units:
                use = Use(unit, self.runtime)
                self._replay_pending(use)
                use.close()
        finally:
            self._folding = before

    def _apply(
        self,
        unit: Unit,
        source: Sequence[ops.Planes],
        *,
        stored: Sequence[ops.Planes] | None = None,
        outs: Sequence[torch.Tensor | None] | None = None,
        pair: torch.Tensor | None = None,
        index: int | None = None,
        updates: ops.Pending | None = None,
        fold: bool = False,
        decodes: bool = True,
    ) -> None:
        """Launches the replay-and-perturb kernel once per part, and not at all for a part without an output. `index` is
        the pass (two per direction, + then -); None makes a copy without noise. Without `decodes`, frozen parameters
        are in `outs` already: all passes over a block share them."""
        pair_outs = None if pair is None else self._cached.outs(unit, self.scratch, pair)
        direction, sign = (0, 0.0) if index is None else (self._first_direction + index // 2, 1.0 - 2.0 * (index % 2))
        noise = self.perturbation.noise(step=self.log.length, direction=direction)
        updates = self.log.newest(0) if updates is None else updates
        for i, part in enumerate(unit.parts):
            if part.direct:
                continue
            out = None if outs is None else outs[i]
            if part.frozen:
                if out is not None and decodes:
                    part.decode_(out, source[i])
                continue
            store = copies = None
            if stored is not None:
                store = ops.Store(stored[i], fold=fold)
            elif out is None:
                continue
            elif self._as_stored and index is not None and updates.num_entries > 0:
                store = ops.AS_STORED
            if out is not None:
                pair_out = None if pair_outs is None else pair_outs[i]
                copies = ops.Copies(out, pair_out, scale=sign * self.noise_scale)
            table = part.table(self.device)
            ops.replay_perturb(source[i], table=table, noise=noise, pending=updates, store=store, copies=copies)


def check_whole(unit: Unit) -> None:
    """Raises if a fold of the unit in place was broken off: nothing tells which of its weights include the updates."""
    if unit.version == PARTLY_FOLDED:
        raise RuntimeError(
            f"stored weights must include updates as a whole, got a part of the last ones in {unit.name}, because an "
            "error broke off their update: load the last checkpoint"
        )
