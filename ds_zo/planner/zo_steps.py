"""Seconds of ZO's steps, from the schedule that its backend executes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ds_zo.backends.zo.buffers import ZOBuffers
from ds_zo.backends.zo.cuda_graphs import MOST_RECORDED_FLOPS
from ds_zo.backends.zo.fold_interval import FOLD_DRAWS, lags
from ds_zo.planner import pricing
from ds_zo.planner.models import Model
from ds_zo.streaming.fold_schedule import turn
from ds_zo.streaming.schedule import Action, Kind
from ds_zo.streaming.units import Unit

_VISIT_LAUNCH_S = 2e-4
"""Host time of one block in one step: its hooks, the switches between passes, and the launches of noise kernels."""
_REPLAY_LAUNCH_S = 5e-5
"""Host time of one replay of a block's CUDA graph, copies of its inputs and outputs included."""


def is_recorded(model: Model, buffers: ZOBuffers, *, pairs: bool) -> bool:
    """Whether the backend replays blocks as CUDA graphs. The graphs then need input and output buffers of their own,
    which blocks of one shape share."""
    if not pairs or buffers.num_passes != 2:
        return False
    largest = max((unit.numel for unit in buffers.placement.blocks), default=0)
    return 2 * model.num_tokens * largest < MOST_RECORDED_FLOPS


@dataclass(frozen=True)
class ZOSteps:
    """The steps of one run."""

    model: Model
    buffers: ZOBuffers
    streamed: Sequence[int]
    """Indices of the blocks that stream."""

    @property
    def blocks(self) -> Sequence[Unit]:
        return self.buffers.placement.blocks

    @property
    def traffic(self) -> tuple[float, float]:
        """Bytes that cross the link in an average step: (host to device, device to host)."""
        moving, interval = [self.blocks[i] for i in self.streamed], self.buffers.interval
        store, written_back = sum(u.nbytes for u in moving), sum(u.nbytes for u in moving if u.trainable)
        low = sum(u.low_nbytes for u in self.blocks) if moving else 0
        return store + low / interval, (written_back + low) / interval

    @property
    def _link_rates(self) -> tuple[float, float]:
        """Bytes per second (host to device, device to host) while both directions are in use. Less than the rate of one
        direction alone where the sum exceeds what the link carries."""
        rates, (up, down) = self.model.rates, self.traffic
        alone_s = max(up / rates.link_up_gbps, down / rates.link_down_gbps)
        slower = max(1.0, (up + down) / rates.link_both_gbps / alone_s) if alone_s else 1.0
        return rates.link_up_gbps * 1e9 / slower, rates.link_down_gbps * 1e9 / slower

    @property
    def _link_s(self) -> float:
        return max(nbytes / rate for nbytes, rate in zip(self.traffic, self._link_rates, strict=True))

    @property
    def compute_s(self) -> float:
        """Seconds of the computation of an average step."""
        return sum(s for (_, kind), s in self._seconds().items() if kind is Kind.COMPUTE)

    @property
    def is_compute_bound(self) -> bool:
        return self.compute_s > self._link_s

    @property
    def step_s(self) -> float:
        """Seconds of an average step, over as many steps as it takes for every block to fold once.

        In the list of actions that is priced, the blocks of each step have numbers of their own. The number of updates
        that a block has to replay differs from step to step."""
        interval, num_blocks = self.buffers.interval, len(self.blocks)
        seconds: dict[tuple[int, Kind], float] = {}
        actions: list[Action] = []
        num_steps, order = max(2, interval), range(num_blocks)
        loaded: dict[int, int] = {}
        loaded_lows: dict[int, int] = {}
        for step in range(-1, num_steps):
            found, loaded, loaded_lows = pricing.pass_over(
                order,
                streamed=set(self.streamed),
                num_slots=self.buffers.stream.device_slots,
                downloads=self._folding(step),
                loaded=loaded,
                then=order,
                lows=[i for i in (*self._folding(step), *self._folding(step + 1)) if self.blocks[i].low_nbytes],
                num_low_slots=self.buffers.num_low_slots,
                loaded_lows=loaded_lows,
            )
            if step < 0:  # it leaves in slots what a step finds there
                continue
            first, of_step = step * num_blocks, self._seconds(step=step)
            seconds |= {(b if b == pricing.NON_BLOCKS else first + b, kind): s for (b, kind), s in of_step.items()}
            actions += [action._replace(block=first + action.block) for action in found] + [pricing.non_blocks()]
        return max(pricing.seconds(actions, seconds) / num_steps, self._link_s)

    def _folding(self, step: int) -> list[int]:
        """The blocks whose fold changes bytes on the host."""
        if not self.streamed:
            return []
        interval, streamed = self.buffers.interval, set(self.streamed)
        changed = [i for i, u in enumerate(self.blocks) if u.trainable and (i in streamed or u.low_nbytes)]
        return [i for i in changed if (step + turn(i, interval)) % interval == 0]

    def _seconds(self, *, step: int | None = None) -> dict[tuple[int, Kind], float]:
        """Seconds of each block's upload, computation and download in step number `step`. None: in an average step."""
        trace, interval = self.model.forward_trace(), self.buffers.interval
        placement, num_passes = self.buffers.placement, self.buffers.num_passes
        pairs = self.buffers.pairs(len(self.blocks) - len(self.streamed))
        recorded = is_recorded(self.model, self.buffers, pairs=pairs)
        up, down = self._link_rates
        streamed = set(self.streamed)
        seconds: dict[tuple[int, Kind], float] = {}
        for i, unit in enumerate(self.blocks):
            behind = lags(interval)
            lag = sum(behind) / interval if step is None else behind[(step + turn(i, interval) - 1) % interval]
            folds = 1 / interval if step is None else float(lag == interval)
            noise = self._noise_s(unit, pending=lag, folds=folds, pairs=pairs)
            cost = trace.block[i] if i < len(trace.block) else trace.block[-1]
            on_host = num_passes * (_REPLAY_LAUNCH_S if recorded else cost.launch_s) + _VISIT_LAUNCH_S
            if not unit.trainable:  # each matrix has an adapter of two modules
                on_host += 2 * sum(len(placed.shape) == 2 for placed in unit.placed) * _VISIT_LAUNCH_S
            seconds[i, Kind.COMPUTE] = max(noise + num_passes * cost.kernel_s, on_host)
            seconds[i, Kind.UPLOAD] = (unit.nbytes + unit.low_nbytes * folds) / up
            seconds[i, Kind.LOW_UPLOAD] = unit.low_nbytes / up
            seconds[i, Kind.DOWNLOAD] = (unit.low_nbytes + (unit.nbytes if i in streamed else 0)) / down
        outside = [u for units in placement.entered_by.values() for u in units] + placement.pass_long
        noise = sum(self._noise_s(u, pending=1, folds=1) for u in outside)
        on_host = num_passes * trace.non_blocks.launch_s + len(outside) * _VISIT_LAUNCH_S
        seconds[pricing.NON_BLOCKS, Kind.COMPUTE] = max(noise + num_passes * trace.non_blocks.kernel_s, on_host)
        return seconds

    def _noise_s(self, unit: Unit, *, pending: float, folds: float, pairs: bool = False) -> float:
        """Seconds of a unit's noise kernels in one step.

        The first launch replays the pending updates and makes the first perturbed copy; later launches make the copies
        of the other passes. With `pairs` one launch makes the copies of both signs from one draw. With `pairs` and one
        direction, weights are stored only where the unit folds. `folds` is the share of steps in which it does."""
        rates, num_passes = self.model.rates, self.buffers.num_passes
        if not unit.trainable:  # decoded once a step
            return pricing.decode_s(unit, rates)
        numel = sum(p.numel for p in unit.placed if p.trainable)
        num_launches = num_passes // 2 if pairs else num_passes
        draws = num_passes // 2 * pending + num_launches + FOLD_DRAWS * folds
        stored = unit.nbytes * (num_launches + (folds if num_launches == 1 else 1))
        moved = stored + num_passes * unit.scratch_nbytes + 2 * folds * unit.low_nbytes
        return numel * draws / (rates.noise_gdraws * 1e9) + moved / (rates.device_memory_gbps * 1e9)
