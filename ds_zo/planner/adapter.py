"""The estimate of Adapter: LoRA on all matrices of the blocks by AdamW, over a frozen base."""

from __future__ import annotations

from typing import Any

from ds_zo.config.optimizers import AdamWParams
from ds_zo.config.section import StreamConfig
from ds_zo.planner import pricing, recomputed
from ds_zo.planner.estimate import PROCESS_NBYTES, TWO_WORKSPACES_NBYTES, Estimate, Limits, base_config, parts
from ds_zo.planner.models import Model
from ds_zo.planner.recomputed import Streamed
from ds_zo.planner.stock import LOW_RANK
from ds_zo.planner.timeline import Cost, Trace
from ds_zo.planner.units import units_of
from ds_zo.streaming.budget import decodes_by_matrix, decoding_nbytes
from ds_zo.streaming.placement import Placement
from ds_zo.streaming.schedule import Kind
from ds_zo.streaming.units import Unit

_STEP_PASSES = 56
"""Bytes of device memory that a step reads and writes for each trained element: gradients are converted, normed and
clipped, AdamW updates the master, and the rounded master is stored."""
_TENSOR_LAUNCH_S = 5e-5
"""Host time of one trained tensor in a step."""


def estimate_adapter(
    model: Model,
    limits: Limits,
    *,
    stream: StreamConfig | None = None,
    params: AdamWParams | None = None,
    offload: bool | None = None,
    checkpointing: bool = True,
) -> Estimate:
    """Estimates LoRA of rank LOW_RANK on all matrices of the blocks, by AdamW. `offload` None: blocks stream only where
    the whole model does not fit the device. `checkpointing`: of a run whose blocks do not stream. Streamed blocks are
    always recomputed."""
    stream = stream or StreamConfig()
    config = base_config(batch=model.batch, dtype=model.dtype)
    written = {} if params is None else params.model_dump(exclude_unset=True)
    config["optimizer"] = {"type": "AdamW", "params": {"lr": 1e-4, **written}}
    whole = _resident(model, limits, stream, config, checkpointing=checkpointing)
    if offload is False or (offload is None and whole.fits_device):
        return whole
    return _streamed(model, limits, stream, config)


def _resident(
    model: Model, limits: Limits, stream: StreamConfig, config: dict[str, Any], *, checkpointing: bool
) -> Estimate:
    trace = model.low_rank_trace(rank=LOW_RANK, checkpointing=checkpointing)
    section: dict[str, Any] = {"backend": "adapter"}
    if written := stream.model_dump(exclude_unset=True):
        section["stream"] = written
    return Estimate(
        contender="adapter",
        setting=f"all on the device, LoRA of rank {LOW_RANK} trained{', checkpointing' if checkpointing else ''}",
        device=parts(weights=model.weights_nbytes, **_trained(model, trace)),
        host=parts(process=PROCESS_NBYTES),
        step_s=trace.forward.seconds + trace.backward.seconds + _update(model).seconds,
        reduced_nbytes=4 * _numel(model),
        config=config | {"zero_optimization": {"stage": 0}, "ds_zo": section},
        limits=limits,
    )


def _streamed(model: Model, limits: Limits, stream: StreamConfig, config: dict[str, Any]) -> Estimate:
    trace = model.low_rank_trace(rank=LOW_RANK, checkpointing=True)
    placement = units_of(model, stream, trains_base=False)
    by_matrix = decodes_by_matrix(placement, budget_nbytes=limits.device_nbytes)
    placement.scratch_nbytes = decoding_nbytes(placement, by_matrix=by_matrix)
    trained = _trained(model, trace)
    num_blocks = len(placement.blocks)
    on_host = num_blocks * trace.block_input_nbytes if stream.offload_activations else 0
    if on_host:  # the inputs of two blocks at a time are on the device
        trained["activations"] -= max(0, num_blocks - 2) * trace.block_input_nbytes
    found = recomputed.place(model, limits, stream, other_nbytes=sum(trained.values()), placement=placement)
    section: dict[str, Any] = {"backend": "adapter"}
    if written := recomputed.section_of(limits, stream):
        section["stream"] = written
    base = "" if stream.frozen_dtype == "auto" else f", base in {stream.frozen_dtype}"
    base += ", decoded matrix by matrix" if by_matrix else ""
    return Estimate(
        contender="adapter",
        setting=f"{found.setting}{base}, LoRA of rank {LOW_RANK} trained",
        device=parts(
            weights=found.weights_nbytes, slots=found.slots_nbytes, scratch=placement.scratch_nbytes, **trained
        ),
        host=parts(weights=found.store_nbytes, activations=on_host, process=PROCESS_NBYTES),
        filling_nbytes=found.filling_nbytes,
        step_s=_step_s(model, trace, found, inputs=on_host > 0, decodings=2 if by_matrix else 1),
        up_nbytes=found.up_nbytes + on_host,
        down_nbytes=on_host,
        reduced_nbytes=4 * _numel(model),
        shared=frozenset({"weights"}),
        config=config | {"zero_optimization": {"stage": 0, "offload_param": recomputed.OFFLOADED}, "ds_zo": section},
        limits=limits,
    )


def _numel(model: Model) -> int:
    return LOW_RANK * sum(map(sum, model.matrices))


def _trained(model: Model, trace: Trace) -> dict[str, int]:
    """Device memory besides the base: adapters, float32 masters, Adam's moments, and the peak of the backward pass or
    of the step, whichever is larger."""
    numel, itemsize = _numel(model), model.weights_nbytes // model.numel
    peak = trace.peak_keeping
    in_step = 4 * numel - peak.activations - peak.logits
    return {
        "adapters": itemsize * numel + (4 * numel if itemsize < 4 else 0),
        "states": 8 * numel,
        "gradients": max(itemsize * numel, in_step),
        "activations": peak.activations,
        "logits": peak.logits,
        "workspace": TWO_WORKSPACES_NBYTES,
    }


def _update(model: Model) -> Cost:
    kernel_s = _STEP_PASSES * _numel(model) / (model.rates.device_memory_gbps * 1e9)
    return Cost(0.0, kernel_s, 2 * len(model.matrices) * _TENSOR_LAUNCH_S)


def _decode_s(model: Model, unit: Unit) -> float:
    decoded = sum(part.nbytes + part.numel * part.dtype.itemsize for part in unit.parts if not part.direct)
    return decoded / (model.rates.device_memory_gbps * 1e9)


def _step_s(model: Model, trace: Trace, streamed: Streamed, *, inputs: bool, decodings: int) -> float:
    """Seconds of a step, from the schedule of its two passes. `inputs`: inputs of blocks are copied to the host and
    back. `decodings`: how often the backward pass decodes a block."""
    placement: Placement = streamed.placement
    num_blocks, moving = len(placement.blocks), set(streamed.blocks)
    up_s = 1 / (model.rates.link_up_gbps * 1e9)
    share = (trace.backward - trace.non_blocks * 2.0) * (1.0 / max(1, num_blocks))
    seconds: dict[tuple[int, Kind], float] = {}
    for i, unit in enumerate(placement.blocks):
        decode_s = _decode_s(model, unit)
        seconds[i, Kind.COMPUTE] = trace.block[min(i, len(trace.block) - 1)].seconds + decode_s
        seconds[num_blocks + i, Kind.COMPUTE] = share.seconds + decodings * decode_s
        seconds[i, Kind.UPLOAD] = unit.nbytes * up_s
        seconds[num_blocks + i, Kind.UPLOAD] = (unit.nbytes + inputs * trace.block_input_nbytes) * up_s
    seconds[pricing.NON_BLOCKS, Kind.COMPUTE] = (trace.non_blocks * 3.0).seconds + _update(model).seconds
    actions = pricing.forward_and_backward(num_blocks, streamed=moving, num_slots=streamed.num_slots)
    return pricing.seconds(actions, seconds)
