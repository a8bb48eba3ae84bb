"""The estimate of Adapter: LoRA on all matrices of the blocks by AdamW, over a frozen base."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from ds_zo.backends.adapter.experts import stack_ids
from ds_zo.config.optimizers import AdamWParams
from ds_zo.config.section import StreamConfig
from ds_zo.planner import recomputed
from ds_zo.planner.estimate import (
    PROCESS_NBYTES,
    TWO_WORKSPACES_NBYTES,
    Estimate,
    Limits,
    base_config,
    parts,
)
from ds_zo.planner.models import LOW_RANK, Model
from ds_zo.planner.recomputed import Placed
from ds_zo.planner.timeline import Trace
from ds_zo.planner.units import section_of, units_of
from ds_zo.streaming.budget import decodes_by_matrix, decoding_nbytes, groups_nbytes

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
    head_in_chunks: bool = True,
) -> Estimate:
    """Estimates LoRA of rank LOW_RANK on all matrices of the blocks, by AdamW. `offload` None: blocks stream only where
    the whole model does not fit the device. `checkpointing`: of a run whose blocks do not stream. Streamed blocks are
    always recomputed. `head_in_chunks`: see `Model.low_rank_trace`."""

    traced = partial(Model.low_rank_trace, checkpointing=checkpointing, head_in_chunks=head_in_chunks)
    estimate = partial(_estimate, model, limits, params, traced, checkpointing)
    return recomputed.streaming(estimate, model, limits, stream or StreamConfig(), offload)


def _estimate(
    model: Model,
    limits: Limits,
    params: AdamWParams | None,
    traced: Callable[..., Trace],
    checkpointing: bool,
    stream: StreamConfig,
    offload: bool,
) -> Estimate:
    ranks = f"LoRA of rank {LOW_RANK}"
    ranks += f", on experts {model.experts_rank}," if model.experts_rank else ""
    scratch = decodings = 0
    if offload:
        placement = units_of(model, stream, trains_base=False, in_groups=stack_ids(model.module))
        by_matrix, in_group = decodes_by_matrix(placement, budget_nbytes=limits.device_nbytes), groups_nbytes(placement)
        recomputing = partial(traced, checkpointing=True, experts_in_groups=in_group > 0)
        trace = recomputed.trace_of(
            model, stream, recomputing, trained=model.adapter_numels_by_block, trains_before_blocks=False
        )
        trained = _trained(model, trace)
        placement.scratch_nbytes = scratch = decoding_nbytes(placement, by_matrix=by_matrix) + in_group
        placed = recomputed.place(model, limits, stream, trace, beside=trained, placement=placement)
        base = "" if stream.frozen_dtype == "auto" else f", base in {stream.frozen_dtype}"
        base += ", decoded matrix by matrix" if by_matrix else ""
        base += ", experts in groups" if in_group else ""
        setting = f"{placed.setting}{base}, {ranks} trained"
        decodings = 2 if by_matrix or in_group else 1
    else:
        trace = traced(model)
        trained = _trained(model, trace)
        setting = f"all on the device, {ranks} trained{', checkpointing' if checkpointing else ''}"
        placed = Placed(setting, model.weights_nbytes, trained)
    step_s, compute_s = recomputed.seconds(model, trace, placed, update_at_end_s=_update_s(model), decodings=decodings)
    written = {} if params is None else params.model_dump(exclude_unset=True)
    stored = section_of(limits, stream, offload=offload)
    return Estimate(
        contender="adapter",
        setting=setting,
        device=parts(weights=placed.weights_nbytes, slots=placed.slots_nbytes, scratch=scratch, **placed.beside),
        host=parts(weights=placed.store_nbytes, activations=placed.inputs_nbytes, process=PROCESS_NBYTES),
        filling_nbytes=placed.filling_nbytes,
        step_s=step_s,
        compute_s=compute_s,
        up_nbytes=placed.up_nbytes,
        down_nbytes=placed.inputs_nbytes,
        reduced_nbytes=4 * model.adapters_numel,
        shared=frozenset({"weights"}),
        config=base_config(batch=model.batch, dtype=model.dtype)
        | {"optimizer": {"type": "AdamW", "params": {"lr": 1e-4, **written}}}
        | stored
        | {"ds_zo": {"backend": "adapter", **stored.get("ds_zo", {})}},
        limits=limits,
    )


def _trained(model: Model, trace: Trace) -> dict[str, int]:
    """Device memory besides the base: adapters, float32 masters, Adam's moments, and the peak of the backward pass."""
    numel, itemsize = model.adapters_numel, model.itemsize
    return {
        "adapters": itemsize * numel + (4 * numel if itemsize < 4 else 0),
        "states": 8 * numel,
        **trace.peak_keeping.parts,
        "gradients": 4 * numel,  # summed in float32
        "workspace": TWO_WORKSPACES_NBYTES,
    }


def _update_s(model: Model) -> float:
    kernel_s = _STEP_PASSES * model.adapters_numel / (model.rates.device_memory_gbps * 1e9)
    return max(kernel_s, 2 * len(model.matrices) * _TENSOR_LAUNCH_S)
