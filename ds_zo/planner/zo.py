"""The estimate of ZO, from the same units, buffers and schedule that its backend makes, on a model without memory."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from ds_zo.backends.zo.buffers import ZOBuffers
from ds_zo.backends.zo.cuda_graphs import MOST_RECORDED_FLOPS
from ds_zo.backends.zo.fold_interval import FOLD_DRAWS, INTERVALS, best_interval, lags
from ds_zo.config.optimizers import ZOParams
from ds_zo.config.section import StreamConfig
from ds_zo.ops import PACKED
from ds_zo.ops.segments import chunk_numel
from ds_zo.planner import pricing
from ds_zo.planner.estimate import (
    PROCESS_NBYTES,
    WORKSPACE_NBYTES,
    Estimate,
    Limits,
    base_config,
    parts,
    streaming_where_needed,
)
from ds_zo.planner.models import LOW_RANK, Model
from ds_zo.planner.rates import Rates
from ds_zo.planner.units import num_resident, section_of, units_of
from ds_zo.streaming.budget import fits
from ds_zo.streaming.fold_schedule import turn
from ds_zo.streaming.placement import Placement, evenly_spaced
from ds_zo.streaming.schedule import Action, Kind
from ds_zo.streaming.units import Unit

_VISIT_LAUNCH_S = 2e-4
"""Host time of one block in one step: its hooks, the switches between passes, and the launches of noise kernels."""
_REPLAY_LAUNCH_S = 5e-5
"""Host time of one replay of a block's CUDA graph, copies of its inputs and outputs included."""
_CHUNK_ROW_NBYTES = 32
"""Device memory of one row of a kernel's table. A table has one row for each chunk of a parameter."""


def estimate_zo(
    model: Model,
    limits: Limits,
    *,
    stream: StreamConfig | None = None,
    params: ZOParams | None = None,
    offload: bool | None = None,
    checkpointing: bool = True,
) -> Estimate:
    """Estimates ZO. `offload` None: blocks stream only where the whole model does not fit the device. With
    `stream.frozen_dtype`, LoRA adapters of rank LOW_RANK on all matrices of the blocks are trained, and nothing else.
    `checkpointing` changes nothing: ZO keeps no activations."""
    stream, params = stream or StreamConfig(), params or ZOParams()
    return streaming_where_needed(partial(_estimate, model, limits, stream, params), offload)


def _estimate(model: Model, limits: Limits, stream: StreamConfig, params: ZOParams, offload: bool) -> Estimate:
    has_adapters = stream.frozen_dtype != "auto"
    placement = units_of(
        model, stream, trains_base=not has_adapters, wire=stream.wire_dtype, split=stream.master == "split"
    )
    trace = model.forward_trace()
    num_blocks, num_passes = len(placement.blocks), 2 * params.num_directions
    second_copy = placement.pair_scratch_nbytes - placement.scratch_nbytes
    streams = offload and (stream.resident_blocks or 0) < num_blocks
    fixed = (stream.writeback_interval or (None if streams else 1)) if stream.fuse_update else 1
    buffers = ZOBuffers(stream, placement, num_passes, fixed or INTERVALS[-1], placement.narrow)
    recordings = 2 * trace.block_input_nbytes * _is_recorded(model, placement, num_passes, pairs=True)
    other_nbytes = (
        trace.peak.total + (num_passes - 1) * trace.paused_nbytes + WORKSPACE_NBYTES + _table_nbytes(placement)
    )
    splits = stream.master == "split" and model.itemsize < 4
    adapters_nbytes = model.adapters_numel * (model.itemsize + 2 * splits) if has_adapters else 0
    other_nbytes += recordings + adapters_nbytes
    stay = num_blocks
    if offload:
        stay = num_resident(placement, limits, stream, buffers.device_bytes, other_nbytes=other_nbytes)
    stays = evenly_spaced(num_blocks, stay)
    streamed = [i for i in range(num_blocks) if i not in stays]
    if fixed is None:

        def device_nbytes(chosen: ZOBuffers) -> int:
            return chosen.device_bytes(stay).total + other_nbytes

        budget_nbytes = limits.device_nbytes
        interval = best_interval(
            lambda k: _step_s(model, placement, streamed, replace(buffers, interval=k), params),
            device_nbytes=lambda k: device_nbytes(replace(buffers, interval=k)),
            budget_nbytes=budget_nbytes,
        )
        buffers = replace(buffers, interval=interval if streamed else 1)
        paired = replace(buffers, in_pairs=True)
        has_room = fits(device_nbytes(paired), budget_nbytes=budget_nbytes)
        if has_room and streamed and _is_compute_bound(model, placement, streamed, buffers, params):
            buffers = paired
    pairs = buffers.pairs(stay)
    there = buffers.device_bytes(stay)
    store = sum(placement.blocks[i].nbytes for i in streamed)
    low_store = sum(u.low_nbytes for u in placement.blocks) if streamed else 0
    whole_store = sum(u.nbytes + u.low_nbytes for u in placement.blocks)
    up_nbytes, down_nbytes = _traffic(placement, streamed, buffers.interval)
    step_s = _step_s(model, placement, streamed, buffers, params)
    interval = buffers.interval
    written = {"lr": params.lr, "zo_eps": params.zo_eps, **params.model_dump(exclude_unset=True)}
    return Estimate(
        contender="zo",
        setting=_setting(stream, num_streamed=len(streamed), num_blocks=num_blocks, interval=interval),
        device=parts(
            weights=there.non_blocks + there.blocks,
            adapters=adapters_nbytes,
            slots=there.slots + there.low_slots,
            scratch=placement.scratch_nbytes,
            second_copy=second_copy if pairs else 0,
            activations=trace.peak.activations + (num_passes - 1) * trace.paused_nbytes,
            graphs=recordings * pairs,
            logits=trace.peak.logits,
            workspace=WORKSPACE_NBYTES + _table_nbytes(placement),
        ),
        host=parts(weights=store, low_plane=low_store, process=PROCESS_NBYTES),
        shared=frozenset({"weights", "low_plane"}),
        filling_nbytes=whole_store - store - low_store if offload and stream.resident_blocks is None else 0,
        step_s=step_s,
        up_nbytes=int(up_nbytes),
        down_nbytes=int(down_nbytes),
        reduced_nbytes=4 * params.num_directions,
        config=base_config(batch=model.batch, dtype=model.dtype)
        | {"optimizer": {"type": "ZO", "params": written}}
        | section_of(limits, stream, offload=offload),
        limits=limits,
    )


def _setting(stream: StreamConfig, *, num_streamed: int, num_blocks: int, interval: int) -> str:
    where = f"{num_streamed} of {num_blocks} blocks streamed" if num_streamed else "all on the device"
    if stream.frozen_dtype != "auto":
        return f"{where}, base in {stream.frozen_dtype}, LoRA of rank {LOW_RANK} trained"
    return f"{where}, master {stream.master}" + (f", written back every {interval} steps" if num_streamed else "")


def _is_recorded(model: Model, placement: Placement, num_passes: int, *, pairs: bool) -> bool:
    """Whether the backend replays blocks as CUDA graphs. The graphs then need input and output buffers of their own,
    which blocks of one shape share."""
    if not pairs or num_passes != 2:
        return False
    largest = max((sum(p.numel for p in unit.placed) for unit in placement.blocks), default=0)
    return 2 * model.num_tokens * largest < MOST_RECORDED_FLOPS


def _table_nbytes(placement: Placement) -> int:
    return sum(
        -(-placed.numel // chunk_numel(sum(p.numel for p in part.placed))) * _CHUNK_ROW_NBYTES
        for unit in placement.units
        for part in unit.parts
        if not part.direct and part.wire not in PACKED
        for placed in part.placed
    )


def _seconds(
    model: Model,
    placement: Placement,
    streamed: list[int],
    buffers: ZOBuffers,
    params: ZOParams,
    *,
    step: int | None = None,
) -> dict[tuple[int, Kind], float]:
    """Seconds of each block's upload, computation and download in step number `step`. None: in an average step."""
    rates, trace, interval = model.rates, model.forward_trace(), buffers.interval
    num_passes, num_blocks = buffers.num_passes, len(placement.blocks)
    pairs = buffers.pairs(num_blocks - len(streamed))
    recorded = _is_recorded(model, placement, num_passes, pairs=pairs)
    up, down = _concurrent_link_rates(rates, placement, streamed, interval)
    seconds: dict[tuple[int, Kind], float] = {}
    for i, unit in enumerate(placement.blocks):
        behind = lags(interval)
        lag = sum(behind) / interval if step is None else behind[(step + turn(i, interval) - 1) % interval]
        folds = 1 / interval if step is None else float(lag == interval)
        noise = _noise_s(unit, rates, pending=lag, folds=folds, num_passes=num_passes, pairs=pairs, params=params)
        cost = trace.block[i] if i < len(trace.block) else trace.block[-1]
        on_host = num_passes * (_REPLAY_LAUNCH_S if recorded else cost.launch_s) + _VISIT_LAUNCH_S
        if not unit.trainable:  # each matrix has an adapter of two modules
            on_host += 2 * sum(len(placed.shape) == 2 for placed in unit.placed) * _VISIT_LAUNCH_S
        seconds[i, Kind.COMPUTE] = max(noise + num_passes * cost.kernel_s, on_host)
        seconds[i, Kind.UPLOAD] = (unit.nbytes + unit.low_nbytes * folds) / up
        seconds[i, Kind.DOWNLOAD] = (unit.nbytes + unit.low_nbytes) / down
    outside = [u for units in placement.entered_by.values() for u in units] + placement.pass_long
    noise = sum(_noise_s(u, rates, pending=1, folds=1, num_passes=num_passes, params=params) for u in outside)
    on_host = num_passes * trace.non_blocks.launch_s + len(outside) * _VISIT_LAUNCH_S
    seconds[pricing.NON_BLOCKS, Kind.COMPUTE] = max(noise + num_passes * trace.non_blocks.kernel_s, on_host)
    return seconds


def _is_compute_bound(
    model: Model, placement: Placement, streamed: list[int], buffers: ZOBuffers, params: ZOParams
) -> bool:
    seconds = _seconds(model, placement, streamed, buffers, params)
    busy_s = sum(s for (_, kind), s in seconds.items() if kind is Kind.COMPUTE)
    return busy_s > _link_s(model.rates, placement, streamed, buffers.interval)


def _step_s(model: Model, placement: Placement, streamed: list[int], buffers: ZOBuffers, params: ZOParams) -> float:
    """Seconds of an average step, over as many steps as it takes for every block to fold once.

    In the list of actions that is priced, the blocks of each step have numbers of their own. The number of updates that
    a block has to replay differs from step to step."""
    interval, num_blocks = buffers.interval, len(placement.blocks)
    seconds: dict[tuple[int, Kind], float] = {}
    actions: list[Action] = []
    num_steps = max(2, interval)
    order = range(num_blocks)
    _, loaded = pricing.pass_over(order, streamed=set(streamed), num_slots=buffers.num_slots, then=order)
    for step in range(num_steps):
        first = step * num_blocks
        folding = {i for i in order if (step + turn(i, interval)) % interval == 0}
        found, loaded = pricing.pass_over(
            order,
            streamed=set(streamed),
            num_slots=buffers.num_slots,
            downloads={i for i in folding & set(streamed) if placement.blocks[i].trainable},
            loaded=loaded,
            then=order,
        )
        of_step = _seconds(model, placement, streamed, buffers, params, step=step)
        seconds |= {(b if b == pricing.NON_BLOCKS else first + b, kind): s for (b, kind), s in of_step.items()}
        actions += [replace(action, block=first + action.block) for action in found] + [pricing.non_blocks()]
    link_s = _link_s(model.rates, placement, streamed, interval)
    return max(pricing.seconds(actions, seconds) / num_steps, link_s)


def _link_s(rates: Rates, placement: Placement, streamed: list[int], interval: int) -> float:
    sizes_and_rates = (
        _traffic(placement, streamed, interval),
        _concurrent_link_rates(rates, placement, streamed, interval),
    )
    return max(nbytes / rate for nbytes, rate in zip(*sizes_and_rates, strict=True))


def _traffic(placement: Placement, streamed: list[int], interval: int) -> tuple[float, float]:
    """Bytes that cross the link in an average step: (host to device, device to host)."""
    store = sum(placement.blocks[i].nbytes for i in streamed)
    written_back = sum(placement.blocks[i].nbytes for i in streamed if placement.blocks[i].trainable)
    low = sum(u.low_nbytes for u in placement.blocks) if streamed else 0
    return store + low / interval, (written_back + low) / interval


def _concurrent_link_rates(
    rates: Rates, placement: Placement, streamed: list[int], interval: int
) -> tuple[float, float]:
    """Bytes per second (host to device, device to host) while both directions are in use. Less than the rate of one
    direction alone where the sum exceeds what the link carries."""
    up, down = _traffic(placement, streamed, interval)
    alone_s = max(up / rates.link_up_gbps, down / rates.link_down_gbps)
    slower = max(1.0, (up + down) / rates.link_both_gbps / alone_s) if alone_s else 1.0
    return rates.link_up_gbps * 1e9 / slower, rates.link_down_gbps * 1e9 / slower


def _noise_s(
    unit: Unit, rates: Rates, *, pending: float, folds: float, num_passes: int, params: ZOParams, pairs: bool = False
) -> float:
    """Seconds of a unit's noise kernels in one step.

    The first launch replays the pending updates and makes the first perturbed copy; later launches make the copies of
    the other passes. With `pairs` one launch makes the copies of both signs from one draw. With `pairs` and one
    direction, weights are stored only where the unit folds. `folds` is the share of steps in which it does."""
    if not unit.trainable:  # decoded once a step
        decoded = sum(p.nbytes + p.numel * p.dtype.itemsize for p in unit.parts if not p.direct)
        return decoded / (rates.device_memory_gbps * 1e9)
    numel = sum(p.numel for p in unit.placed if p.trainable)
    num_launches = num_passes // 2 if pairs else num_passes
    draws = params.num_directions * pending + num_launches + FOLD_DRAWS * folds
    stored = unit.nbytes * (num_launches + (folds if num_launches == 1 else 1))
    moved = stored + num_passes * unit.scratch_nbytes + 2 * folds * unit.low_nbytes
    return numel * draws / (rates.noise_gdraws * 1e9) + moved / (rates.device_memory_gbps * 1e9)
