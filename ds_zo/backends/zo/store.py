"""Stores a ZO model's weights: places them once, within a memory budget, and later moves blocks to the device where
memory is left."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from ds_zo import ops
from ds_zo.backends.common.frozen_format import plan_frozen_format
from ds_zo.backends.common.startup import StartupSummary, formats_of, summary_of_blocks
from ds_zo.backends.zo.buffers import ZOBuffers
from ds_zo.backends.zo.clean_copies import CleanCopies
from ds_zo.backends.zo.materialise import Materialiser, Perturbation
from ds_zo.backends.zo.member_forwards import MemberForwards
from ds_zo.backends.zo.ranks import Ranks
from ds_zo.backends.zo.replay_log import CAPACITY, ReplayLog
from ds_zo.backends.zo.step_time import (
    TIMED_NUM_UPDATES,
    StepTimeModel,
    TimedForward,
    compute_and_draw_s,
    measure_draw,
    measure_link,
)
from ds_zo.config import ConfigError, Resolved, ZOParams
from ds_zo.config.optimizers import MOST_PENDING_MEMBERS
from ds_zo.logs import show
from ds_zo.streaming.block_store import BlockStore, OwnBuffers
from ds_zo.streaming.budget import fits, free_nbytes, peak_nbytes, reset_peak_memory, usable_nbytes
from ds_zo.streaming.claims import Claims
from ds_zo.streaming.host_store import HostStore
from ds_zo.streaming.placement import WIRE, Placement, adapter_ids
from ds_zo.streaming.units import Unit

_STREAMED_INTERVAL = {"wire": 8, "split": 16}
"""`writeback_interval`, by master, where the user left it out and blocks stream. It holds until measurements choose
another, and for the whole run where nothing can be measured. A fold of split storage also uploads the low plane."""


class ZOStore(OwnBuffers):
    """The blocks of a ZO model and what replays their updates: log, interval of folds, claims of checkpoints, and the
    materialiser with its working copies."""

    def __init__(
        self,
        module: nn.Module,
        config: Resolved,
        *,
        param_groups: list[dict[str, Any]],
        device: torch.device,
        ranks: Ranks,
    ):
        settings, stream = config.optimizer, config.section.stream
        self._stream = stream
        assert isinstance(settings, ZOParams)
        has_members = settings.noise == "rank1"
        self._all_members = settings.num_members
        self._num_passes = 1 if has_members else 2 * ranks.num_own_directions
        self._first_direction = ranks.first_direction
        rounding = config.section.rounding
        assert rounding != "kahan"
        distribution: ops.Distribution = "rank1" if has_members else settings.distribution
        self.perturbation = Perturbation(settings.seed, settings.zo_eps, distribution, rounding)
        placement = plan_frozen_format(
            module,
            param_groups,
            config,
            wire=WIRE[stream.wire_dtype],
            split=stream.master == "split",
            outside_blocks={id(p) for p in module.parameters() if not p.requires_grad} & adapter_ids(module),
        )
        _check_dtypes(placement)
        self.members: MemberForwards | None = None
        """Adds the noise of members outside the weights; None for noise in the weights."""
        if has_members:
            self.members = MemberForwards(
                module,
                placement,
                num_members=ranks.num_own_directions,
                device=device,
                at=config.params_at,
            )
        num_blocks = len(placement.blocks)
        num_resident = min(num_blocks, stream.resident_blocks or 0) if config.stream else num_blocks
        automatic = _STREAMED_INTERVAL[stream.master] if num_resident < num_blocks else 1
        if has_members and settings.num_members > MOST_PENDING_MEMBERS:
            automatic = 1
        self.interval = stream.writeback_interval or automatic
        self.step_time: str | None = None
        """The expected step time and the measured rates that led to the interval, as text; None if nothing was
        measured."""
        self._timed_forwards: list[TimedForward] = []
        self._is_compute_bound = False
        self._activations_nbytes = 0
        """Device memory of the first step besides weights and buffers; 0 until it is known."""
        self.base = {
            p.name
            for part in (part for unit in placement.units for part in unit.parts)
            for p in part.placed
            if part.frozen and p.parameter.is_meta and placement.decodes_frozen
        }
        """Names of frozen parameters that hold what the model's files hold. Checkpoints leave them out."""
        self.blocks = BlockStore(
            module,
            config,
            placement=placement,
            num_resident=num_resident,
            needed=lambda num_resident: self._buffers().device_bytes(num_resident),
            device=device,
            process_group=ranks.process_group,
            remedy="raise it, keep fewer blocks resident, or take a narrower wire_dtype or master: wire",
            own=self,
        )
        self.must_choose_interval = (
            config.stream
            and device.type == "cuda"
            and num_resident < num_blocks
            and stream.writeback_interval is None
            and not has_members
            and self.blocks.store.num_sharers == 1
        )
        """Whether the interval is still to be chosen from measurements (`choose_interval`)."""
        is_own = self.blocks.store.num_sharers == 1
        spare_store = self.blocks.store if is_own else HostStore(device, pin=False)
        self.claims = Claims(spare_store, streams=self.blocks.streams, swaps=is_own)
        self.before_overwrite = self.claims.before_overwrite
        self.log = ReplayLog(num_groups=len(param_groups), num_directions=settings.all_directions, device=device)
        self.blocks.make_buffers()
        if self.blocks.may_fill_device or self.must_choose_interval:
            reset_peak_memory(device)

    def _buffers(self, *, interval: int | None = None, in_pairs: bool | None = None) -> ZOBuffers:
        """The sizes of slots and working copies. `interval`, `in_pairs`: None: the present ones."""
        interval = self.interval if interval is None else interval
        members = self.members
        return ZOBuffers(
            stream=self._stream,
            placement=self.blocks.placement,
            num_passes=self._num_passes,
            interval=interval,
            in_pairs=self.blocks.placement.narrow or (self._is_compute_bound if in_pairs is None else in_pairs),
            shared=self.blocks.store.num_sharers > 1,
            factors_nbytes=0
            if members is None
            else members.nbytes + members.replay_nbytes(interval * self._all_members),
        )

    def _device_nbytes(self, interval: int, *, in_pairs: bool = False) -> int:
        """The peak of device memory in a step with this interval, and with both copies at once if `in_pairs`."""
        buffers = self._buffers(interval=interval, in_pairs=in_pairs)
        return buffers.device_bytes(self.blocks.num_resident).total + self._activations_nbytes

    @property
    def version(self) -> tuple[int, int]:
        """The step, and the number of other writes to weights. Equal if no weight changed between."""
        return self.log.length, self.blocks.num_rewrites

    @property
    def num_low_slots(self) -> int:
        return self._buffers().num_low_slots

    def make(self) -> None:
        """Makes the materialiser, with scratch for the present placement and interval."""
        self.materialiser = Materialiser(
            self.blocks.placement,
            self.blocks.runtime,
            self.log,
            perturbation=self.perturbation,
            interval=self.interval,
            num_passes=self._num_passes,
            pairs=self._buffers().pairs(self.blocks.num_resident),
            device=self.blocks.device,
            copies=CleanCopies(self.blocks.device, free_nbytes=self._free_nbytes),
            first_direction=self._first_direction,
            fill_factors=self._fill_factors,
        )

    def _fill_factors(self, unit: Unit) -> None:
        """Fills the factors that this rank's members add to the outputs of the unit's modules."""
        if self.members is not None:
            noise = self.perturbation.noise(step=self.log.length, direction=self._first_direction)
            self.members.fill(unit, noise)

    def free(self) -> None:
        self.materialiser.close()

    def settle(self) -> None:
        """Checkpoints that are being written have read the stored bytes afterwards."""
        self.claims.wait()
        self.materialiser.copies.drop()

    def _free_nbytes(self) -> int:
        """Device memory beside the steps' peak. It is not known before the first step has shown that peak."""
        if self.blocks.may_fill_device or self.must_choose_interval:
            return 0
        claimed = self._buffers().device_bytes(self.blocks.num_resident).total
        return free_nbytes(self.blocks.device, budget_gb=self._stream.device_memory_gb, claimed_nbytes=claimed)

    def time_forwards(self, forward: Callable[[], object]) -> None:
        """Times forwards as training will make them, before the first update. Their blocks replay updates that change
        nothing, from a log of their own."""
        if self.log.length:
            return
        log = self.log.of_no_changes()
        try:
            for num_updates in TIMED_NUM_UPDATES:
                self.materialiser.timed_forward = timed_forward = TimedForward(num_updates, self.blocks.device, log=log)
                with timed_forward.running():
                    forward()
                self._timed_forwards.append(timed_forward)
        finally:
            self.materialiser.timed_forward = None
            self.blocks.runtime.invalidate_slots()

    def forget_times(self) -> None:
        """Forgets the timed forwards: training will run other ones."""
        self._timed_forwards = []

    @torch.no_grad()
    def choose_interval(self, *, num_uploads: int, agree: Callable[[int], int]) -> None:
        """Chooses the interval after the first step, when it is known which blocks stay on the device and none has
        folded yet. `num_uploads`: how often a step uploads each block. `agree` returns the first rank's value on every
        rank."""
        blocks = self.blocks.placement.blocks
        streamed = [u for u in blocks if u.streamed]
        if not self._timed_forwards or not streamed:
            self.set_interval(agree(self.interval if streamed else 1))
            return
        compute_s, draw_s = compute_and_draw_s(self._timed_forwards)
        self._timed_forwards = []
        link = measure_link(self.blocks.runtime, streamed[0], streamed[-1])
        # If a step waits for the host, say, timed forwards do not show the cost of a replay: it is measured alone too.
        replay = partial(self.materialiser.time_replay, streamed[0], self.blocks.runtime.slots[0])
        blocks_numel = sum(unit.numel for unit in blocks)
        draw_s = max(draw_s, blocks_numel / max(streamed[0].numel, 1) * measure_draw(replay, self.blocks.device))
        outer_numel = self.blocks.placement.numel - blocks_numel
        compute_s += draw_s * outer_numel / max(blocks_numel, 1)  # outer units fold each step
        model = StepTimeModel(*link, compute_s, draw_s)
        sizes = {
            "streamed_nbytes": sum(u.nbytes for u in streamed),
            "low_nbytes": sum(u.low_nbytes for u in blocks if u.low_streamed),
            "num_uploads": num_uploads,
        }
        budget_nbytes = usable_nbytes(self.blocks.device, budget_gb=self._stream.device_memory_gb)
        interval = agree(model.best_interval(device_nbytes=self._device_nbytes, budget_nbytes=budget_nbytes, **sizes))
        has_room = fits(self._device_nbytes(interval, in_pairs=True), budget_nbytes=budget_nbytes)
        self._is_compute_bound = has_room and model.busy_s(interval) > model.link_s(interval, **sizes)
        self.set_interval(interval)
        self.step_time = f"{model.step_s(self.interval, **sizes) * 1e3:.0f} ms a step expected ({model})"
        show(
            f"ds_zo: from now on blocks are written back every {self.interval} steps, {self.step_time}; set "
            "ds_zo.stream.writeback_interval to use the same interval in every run"
        )

    def set_interval(self, interval: int) -> None:
        """Sets the interval, and makes the slots and the scratch anew: their number and size depend on it."""
        self.must_choose_interval = False
        self.interval = interval
        self.blocks.remake_buffers()

    def fill_device(self) -> None:
        if self.must_choose_interval:
            self._activations_nbytes = max(0, peak_nbytes(self.blocks.device) - self._device_nbytes(self.interval))
        self.blocks.fill_device()

    def describe(self) -> str:
        """Lines for the log: placement, memory, storage formats and the bound on rounding."""
        gib = 2**30
        store = self.blocks
        blocks, units = store.placement.blocks, store.placement.units
        lines = [
            f"ds_zo: {store.placement.numel:,} parameters in {len(blocks)} blocks and {len(units) - len(blocks)} "
            f"modules outside them; {len(blocks) - store.num_resident} blocks stream, {store.num_resident} stay on the "
            "device",
            f"ds_zo: device: weights {store.resident_nbytes / gib:.2f} GiB, {len(store.runtime.slots)} slots "
            f"{store.slots_nbytes / gib:.2f} GiB, scratch {self.materialiser.scratch.numel() / gib:.2f} GiB; host: "
            f"{store.store.nbytes / gib:.2f} GiB, {store.store.pinned_nbytes / gib:.2f} GiB of it pinned",
            f"ds_zo: blocks stored as {formats_of(blocks) or 'n/a'}, master {self._stream.master}, written back "
            f"every {self.interval} steps (at most {CAPACITY} behind)",
        ]
        if store.store.num_sharers > 1:
            lines.append(
                f"ds_zo: the {store.store.num_sharers} ranks of this machine share one host store of the streamed "
                "blocks: the host memory above is the part of one rank, which that rank uploads"
            )
        if bound := self.rounding_bound(1000):
            lines.append(
                "ds_zo: without a low plane every fold rounds: stochastic rounding moves a weight by a relative "
                f"standard deviation of at most {bound:.2g} in 1,000 steps, which grows with the square root of the "
                "number of steps; master: split keeps the bits that rounding drops (ds_zo.stream.master)"
            )
        return "\n".join(lines)

    def startup_summary(self) -> StartupSummary:
        """Placement, memory and write-back interval for the start-up table."""
        blocks, formats = self.blocks.placement.blocks, formats_of(self.blocks.placement.blocks)
        stored_as = f", blocks stored as {formats}" if formats else ""
        if any(u.low_nbytes for u in blocks):
            stored_as += " with separate low bits"
        elif any(part.loses_bits for unit in blocks for part in unit.parts):
            stored_as += " without low bits"
        found = summary_of_blocks(self.blocks, stored_as=stored_as, scratch_nbytes=self.materialiser.scratch.numel())
        return replace(found, added_by_steps="activations", write_back=self._interval_and_reason())

    def _interval_and_reason(self) -> str:
        every = "every step" if self.interval == 1 else f"every {self.interval} steps"
        if self._stream.writeback_interval is not None:
            return f"{every}, as ds_zo.stream.writeback_interval says"
        if not any(unit.streamed for unit in self.blocks.placement.blocks):
            return f"{every}, because no block streams"
        if self.must_choose_interval:
            return f"{every} at first; measured times of the first step choose the interval"
        return f"{every}, the default of streamed blocks with master {self._stream.master}"

    def rounding_bound(self, num_steps: int) -> float:
        """Largest relative standard deviation that stochastic rounding adds to a block's weight in `num_steps`
        steps."""
        lossy = [part.wire for unit in self.blocks.placement.blocks for part in unit.parts if part.loses_bits]
        per_fold = max((ops.rounding_std(wire) for wire in lossy), default=0.0)
        return per_fold * math.sqrt(num_steps / self.interval)


def _check_dtypes(placement: Placement) -> None:
    """Raises if a trained parameter has a dtype that ZO cannot train. Where the JSON names no dtype, a model has the
    dtype of its checkpoint."""
    for part in (part for unit in placement.units for part in unit.parts):
        if not part.direct and part.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            raise ConfigError(
                f"ZO trains float32, bfloat16 and float16, got parameter {part.placed[0].name} in {part.dtype}: "
                f"{'call model.float(), or ' * part.dtype.is_floating_point}freeze it before deepspeed.initialize",
                at="bf16.enabled",
            )
