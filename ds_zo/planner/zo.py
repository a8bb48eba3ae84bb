"""The estimate of ZO, from the same units, buffers and schedule that its backend makes, on a model without memory."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from ds_zo.backends.zo.buffers import ZOBuffers
from ds_zo.backends.zo.fold_interval import INTERVALS, best_interval
from ds_zo.config.optimizers import ZOParams
from ds_zo.config.section import StreamConfig
from ds_zo.ops import PACKED
from ds_zo.ops.segments import chunk_numel
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
from ds_zo.planner.units import num_resident, section_of, units_of
from ds_zo.planner.zo_steps import ZOSteps, is_recorded
from ds_zo.streaming.budget import fits
from ds_zo.streaming.placement import Placement, evenly_spaced

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
    if params.noise != "mezo":
        raise ValueError(f'ZO is planned with noise "mezo", got "{params.noise}": leave it out (--params)')
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
    fixed = stream.writeback_interval or (None if streams else 1)
    buffers = ZOBuffers(stream, placement, num_passes, fixed or INTERVALS[-1], placement.narrow)
    # Products on the stream that records have a workspace of their own.
    recordings = (2 * trace.block_input_nbytes + WORKSPACE_NBYTES) * is_recorded(model, buffers, pairs=True)
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
    run = ZOSteps(model, buffers, [i for i in range(num_blocks) if i not in stays])
    if fixed is None:
        run = _with_best_interval(run, limits, other_nbytes=other_nbytes)
    buffers, streamed = run.buffers, run.streamed
    pairs, there = buffers.pairs(stay), buffers.device_bytes(stay)
    store = sum(placement.blocks[i].nbytes for i in streamed)
    low_store = sum(u.low_nbytes for u in placement.blocks) if streamed else 0
    whole_store = sum(u.nbytes + u.low_nbytes for u in placement.blocks)
    up_nbytes, down_nbytes = run.traffic
    written = {"lr": params.lr, "zo_eps": params.zo_eps, **params.model_dump(exclude_unset=True)}
    return Estimate(
        contender="zo",
        setting=_setting(stream, num_streamed=len(streamed), num_blocks=num_blocks, interval=buffers.interval),
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
        step_s=run.step_s,
        compute_s=run.compute_s,
        up_nbytes=int(up_nbytes),
        down_nbytes=int(down_nbytes),
        reduced_nbytes=4 * params.num_directions,
        config=base_config(batch=model.batch, dtype=model.dtype)
        | {"optimizer": {"type": "ZO", "params": written}}
        | section_of(limits, stream, offload=offload),
        limits=limits,
    )


def _with_best_interval(run: ZOSteps, limits: Limits, *, other_nbytes: int) -> ZOSteps:
    """The run with the interval that the backend would choose, and both perturbed copies made at once where they fit
    and computing takes longer than copying."""
    if not run.streamed:
        return replace(run, buffers=replace(run.buffers, interval=1))
    stay = len(run.blocks) - len(run.streamed)

    def with_interval(interval: int) -> ZOSteps:
        return replace(run, buffers=replace(run.buffers, interval=interval))

    def device_nbytes(buffers: ZOBuffers) -> int:
        return buffers.device_bytes(stay).total + other_nbytes

    interval = best_interval(
        lambda k: with_interval(k).step_s,
        device_nbytes=lambda k: device_nbytes(with_interval(k).buffers),
        budget_nbytes=limits.device_nbytes,
    )
    run = with_interval(interval)
    paired = replace(run.buffers, in_pairs=True)
    has_room = fits(device_nbytes(paired), budget_nbytes=limits.device_nbytes)
    return replace(run, buffers=paired) if has_room and run.is_compute_bound else run


def _setting(stream: StreamConfig, *, num_streamed: int, num_blocks: int, interval: int) -> str:
    where = f"{num_streamed} of {num_blocks} blocks streamed" if num_streamed else "all on the device"
    if stream.frozen_dtype != "auto":
        return f"{where}, base in {stream.frozen_dtype}, LoRA of rank {LOW_RANK} trained"
    return f"{where}, master {stream.master}" + (f", written back every {interval} steps" if num_streamed else "")


def _table_nbytes(placement: Placement) -> int:
    return sum(
        -(-placed.numel // chunk_numel(sum(p.numel for p in part.placed))) * _CHUNK_ROW_NBYTES
        for unit in placement.units
        for part in unit.parts
        if not part.direct and part.wire not in PACKED
        for placed in part.placed
    )
