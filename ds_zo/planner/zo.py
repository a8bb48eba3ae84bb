"""ZO on paper: the same units, buffers and schedule that the engine makes, on a model without memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from ds_zo.config.optimizers import ZOParams
from ds_zo.config.section import StreamConfig
from ds_zo.ops.segments import chunk_numel
from ds_zo.planner import pricing
from ds_zo.planner.choices import FOLD_DRAWS, INTERVALS, MOST_RECORDED_FLOPS, WIRE, best_interval, lags
from ds_zo.planner.estimate import PROCESS_NBYTES, WORKSPACE_NBYTES, Estimate, Limits, base_config, parts
from ds_zo.planner.models import Model
from ds_zo.planner.rates import Rates
from ds_zo.streaming.budget import device_bytes, most_resident, zo_sizes
from ds_zo.streaming.fold_schedule import turn
from ds_zo.streaming.placement import Placement, evenly_spaced, plan_units
from ds_zo.streaming.schedule import Action, Kind
from ds_zo.streaming.units import Unit

_VISIT_LAUNCH_S = 2e-4
"""Host time of a block's hooks, switches and kernels."""
_REPLAY_LAUNCH_S = 5e-5
"""Host time of such a replay and its copies."""
_CHUNK_ROW_NBYTES = 32
"""A kernel's table has one row for each chunk of a parameter."""


@dataclass(frozen=True)
class ZOBufferSizes:
    """What the engine shares between blocks, as a function of how many stay on the device."""

    stream: StreamConfig
    num_passes: int
    interval: int
    num_blocks: int
    in_pairs: bool
    """Both signs' copies are made at once though every block streams: stored in fewer bytes than copies take, or slower
    to compute than to bring."""

    def sizes(self, num_resident: int) -> dict[str, Any]:
        return zo_sizes(
            self.stream,
            num_blocks=self.num_blocks,
            num_resident=num_resident,
            num_passes=self.num_passes,
            interval=self.interval,
            in_pairs=self.in_pairs,
        )


def estimate_zo(
    model: Model,
    limits: Limits,
    *,
    stream: StreamConfig | None = None,
    params: ZOParams | None = None,
    offload: bool | None = None,
) -> Estimate:
    """`offload` None: only where the model does not fit the device as a whole."""
    stream, params = stream or StreamConfig(), params or ZOParams()
    if offload is None:
        whole = _estimate(model, limits, stream, params, offload=False)
        return whole if whole.fits_device else _estimate(model, limits, stream, params, offload=True)
    return _estimate(model, limits, stream, params, offload=offload)


def _estimate(model: Model, limits: Limits, stream: StreamConfig, params: ZOParams, *, offload: bool) -> Estimate:
    placement = plan_units(
        model.module,
        [{"params": list(model.module.parameters())}],
        block_paths=stream.blocks,
        wire=WIRE[stream.wire_dtype],
        split=stream.master == "split",
    )
    trace = model.forward_trace()
    num_blocks, num_passes = len(placement.blocks), 2 * params.num_directions
    second_copy = placement.pair_scratch_nbytes - placement.scratch_nbytes
    streams = offload and (stream.resident_blocks or 0) < num_blocks
    fixed = (stream.writeback_interval or (None if streams else 1)) if stream.fuse_update else 1
    buffers = ZOBufferSizes(stream, num_passes, fixed or INTERVALS[-1], num_blocks, placement.narrow)
    recordings = 2 * trace.boundary * _is_recorded(model, placement, num_passes, pairs=True)
    beside = trace.peak.total + (num_passes - 1) * trace.paused + WORKSPACE_NBYTES + _table_nbytes(placement)
    beside += recordings
    num_resident = _num_resident(placement, limits, stream, buffers.sizes, beside=beside) if offload else num_blocks
    stays = evenly_spaced(num_blocks, num_resident)
    streamed = [i for i in range(num_blocks) if i not in stays]
    if fixed is None:
        buffers = replace(buffers, interval=_best_interval(model, placement, streamed, buffers, params))
        least = device_bytes(placement, num_resident=num_resident, **buffers.sizes(num_resident)).total + beside
        has_room = limits.device_nbytes is None or least + second_copy <= limits.device_nbytes
        if has_room and streamed and _computing_sets_pace(model, placement, streamed, buffers, params):
            buffers = replace(buffers, in_pairs=True)
    sizes = buffers.sizes(num_resident)
    there = device_bytes(placement, num_resident=num_resident, **sizes)
    store = sum(placement.blocks[i].nbytes for i in streamed)
    low_store = sum(u.low_nbytes for u in placement.blocks) if streamed else 0
    whole_store = sum(u.nbytes + u.low_nbytes for u in placement.blocks)
    up_nbytes, down_nbytes = _traffic(placement, streamed, buffers.interval)
    step_s = _step_s(model, placement, streamed, buffers, params)
    interval = buffers.interval
    config = base_config(batch=model.batch, dtype=model.dtype)
    config["optimizer"] = {"type": "ZO", "params": _written(params)}
    config["zero_optimization"] = {"stage": 0}
    section = stream.model_dump(exclude_unset=True)
    if offload:
        config["zero_optimization"]["offload_param"] = {"device": "cpu", "pin_memory": True}
        if limits.device_nbytes is not None and stream.resident_blocks is None:
            section["device_memory_gb"] = limits.device_nbytes / 1e9
    if section:
        config["ds_zo"] = {"stream": section}
    return Estimate(
        contender="zo",
        setting=(
            f"{len(streamed)} of {num_blocks} blocks streamed, master {stream.master}, folded every {interval}"
            if streamed
            else f"all on the device, master {stream.master}"
        ),
        device=parts(
            weights=there.non_blocks + there.blocks,
            slots=there.slots + there.low_slots,
            scratch=placement.scratch_nbytes,
            second_copy=second_copy if sizes["pairs"] else 0,
            activations=trace.peak.activations + (num_passes - 1) * trace.paused,
            graphs=recordings * sizes["pairs"],
            logits=trace.peak.logits,
            workspace=WORKSPACE_NBYTES + _table_nbytes(placement),
        ),
        host=parts(weights=store, low_plane=low_store, process=PROCESS_NBYTES),
        filling_nbytes=whole_store - store - low_store if offload and stream.resident_blocks is None else 0,
        step_s=step_s,
        up_nbytes=int(up_nbytes),
        down_nbytes=int(down_nbytes),
        reduced_nbytes=4 * params.num_directions,
        config=config,
        limits=limits,
    )


def _written(params: ZOParams) -> dict[str, Any]:
    return {"lr": params.lr, "zo_eps": params.zo_eps, **params.model_dump(exclude_unset=True)}


def _num_resident(
    placement: Placement,
    limits: Limits,
    stream: StreamConfig,
    sizes: Callable[[int], dict[str, Any]],
    *,
    beside: int,
) -> int:
    if stream.resident_blocks is not None:
        return min(stream.resident_blocks, len(placement.blocks))
    if limits.device_nbytes is None:
        return 0
    found = most_resident(placement, budget_nbytes=limits.device_nbytes, activations_nbytes=beside, sizes=sizes)
    return max(0, found)


def _best_interval(
    model: Model, placement: Placement, streamed: list[int], buffers: ZOBufferSizes, params: ZOParams
) -> int:
    """The engine measures what is priced here."""
    if not streamed:
        return 1
    return best_interval(lambda k: _step_s(model, placement, streamed, replace(buffers, interval=k), params))


def _is_recorded(model: Model, placement: Placement, num_passes: int, *, pairs: bool) -> bool:
    """Recordings read and write in places of their own, shared by blocks of one shape."""
    if not pairs or num_passes != 2:
        return False
    largest = max((sum(p.numel for p in unit.placed) for unit in placement.blocks), default=0)
    return 2 * model.num_tokens * largest < MOST_RECORDED_FLOPS


def _table_nbytes(placement: Placement) -> int:
    return sum(
        -(-placed.numel // chunk_numel(sum(p.numel for p in part.placed))) * _CHUNK_ROW_NBYTES
        for unit in placement.units
        for part in unit.parts
        for placed in part.placed
    )


def _seconds(
    model: Model,
    placement: Placement,
    streamed: list[int],
    buffers: ZOBufferSizes,
    params: ZOParams,
    *,
    step: int | None = None,
) -> dict[tuple[int, Kind], float]:
    """Of each block's copies and computing in a step, or in an average one."""
    rates, trace, interval = model.rates, model.forward_trace(), buffers.interval
    num_passes, num_blocks = buffers.num_passes, len(placement.blocks)
    pairs = buffers.sizes(num_blocks - len(streamed))["pairs"]
    recorded = _is_recorded(model, placement, num_passes, pairs=pairs)
    up, down = _rates_together(rates, placement, streamed, interval)
    seconds: dict[tuple[int, Kind], float] = {}
    for i, unit in enumerate(placement.blocks):
        behind = lags(interval)
        lag = sum(behind) / interval if step is None else behind[(step + turn(i, interval) - 1) % interval]
        folds = 1 / interval if step is None else float(lag == interval)
        noise = _noise_s(unit, rates, pending=lag, folds=folds, num_passes=num_passes, pairs=pairs, params=params)
        cost = trace.block[i] if i < len(trace.block) else trace.block[-1]
        on_host = num_passes * (_REPLAY_LAUNCH_S if recorded else cost.launch_s) + _VISIT_LAUNCH_S
        seconds[i, Kind.COMPUTE] = max(noise + num_passes * cost.kernel_s, on_host)
        seconds[i, Kind.UPLOAD] = (unit.nbytes + unit.low_nbytes * folds) / up
        seconds[i, Kind.DOWNLOAD] = (unit.nbytes + unit.low_nbytes) / down
    visits = [u for units in placement.entered_by.values() for u in units] + placement.ambient
    noise = sum(_noise_s(u, rates, pending=1, folds=1, num_passes=num_passes, params=params) for u in visits)
    on_host = num_passes * trace.edge.launch_s + len(visits) * _VISIT_LAUNCH_S
    seconds[pricing.EDGE, Kind.COMPUTE] = max(noise + num_passes * trace.edge.kernel_s, on_host)
    return seconds


def _computing_sets_pace(
    model: Model, placement: Placement, streamed: list[int], buffers: ZOBufferSizes, params: ZOParams
) -> bool:
    seconds = _seconds(model, placement, streamed, buffers, params)
    busy_s = sum(s for (_, kind), s in seconds.items() if kind is Kind.COMPUTE)
    return busy_s > _link_s(model.rates, placement, streamed, buffers.interval)


def _step_s(model: Model, placement: Placement, streamed: list[int], buffers: ZOBufferSizes, params: ZOParams) -> float:
    """An average step: as many as it takes for every block to fold once. In the list that is priced, each step's blocks
    have numbers of their own, for they lag differently in each."""
    interval, num_blocks = buffers.interval, len(placement.blocks)
    sizes = buffers.sizes(num_blocks - len(streamed))
    seconds: dict[tuple[int, Kind], float] = {}
    actions: list[Action] = []
    loaded: dict[int, int] = {}
    num_steps = max(2, interval)
    order = range(num_blocks)
    for step in range(num_steps):
        first = step * num_blocks
        turns = {i for i in order if (step + turn(i, interval)) % interval == 0}
        found, loaded = pricing.pass_over(
            order,
            streamed=set(streamed),
            num_slots=sizes["num_slots"],
            downloads=turns & set(streamed),
            loaded=loaded,
            then=order,
        )
        of_step = _seconds(model, placement, streamed, buffers, params, step=step)
        seconds |= {(b if b == pricing.EDGE else first + b, kind): s for (b, kind), s in of_step.items()}
        actions += [replace(action, block=first + action.block) for action in found] + [pricing.edge()]
    link_s = _link_s(model.rates, placement, streamed, interval)
    return max(pricing.seconds(actions, seconds) / num_steps, link_s)


def _link_s(rates: Rates, placement: Placement, streamed: list[int], interval: int) -> float:
    both_ways = _traffic(placement, streamed, interval), _rates_together(rates, placement, streamed, interval)
    return max(nbytes / rate for nbytes, rate in zip(*both_ways, strict=True))


def _traffic(placement: Placement, streamed: list[int], interval: int) -> tuple[float, float]:
    """Bytes up and down in an average step."""
    store = sum(placement.blocks[i].nbytes for i in streamed)
    low = sum(u.low_nbytes for u in placement.blocks) if streamed else 0
    return store + low / interval, (store + low) / interval


def _rates_together(rates: Rates, placement: Placement, streamed: list[int], interval: int) -> tuple[float, float]:
    """Bytes a second up and down: less than either alone where both together are more than the link carries."""
    up, down = _traffic(placement, streamed, interval)
    alone_s = max(up / rates.link_up_gbps, down / rates.link_down_gbps)
    slower = max(1.0, (up + down) / rates.link_both_gbps / alone_s) if alone_s else 1.0
    return rates.link_up_gbps * 1e9 / slower, rates.link_down_gbps * 1e9 / slower


def _noise_s(
    unit: Unit, rates: Rates, *, pending: float, folds: float, num_passes: int, params: ZOParams, pairs: bool = False
) -> float:
    """Kernels of a visit: replay and first copy in one, then the other passes' copies. In `pairs` a launch makes those
    of both signs from one draw, and where there is one direction, nothing is stored but folds."""
    numel = sum(p.numel for p in unit.placed if p.trainable)
    num_launches = num_passes // 2 if pairs else num_passes
    draws = params.num_directions * pending + num_launches + FOLD_DRAWS * folds
    stored = unit.nbytes * (num_launches + (folds if num_launches == 1 else 1))
    moved = stored + num_passes * unit.scratch_nbytes + 2 * folds * unit.low_nbytes
    return numel * draws / (rates.noise_gdraws * 1e9) + moved / (rates.device_memory_gbps * 1e9)
