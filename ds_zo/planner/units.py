"""The units of a planned model: the forms in which `ds_zo.stream` stores them, and how many blocks do not stream."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import nn

from ds_zo.config.section import StreamConfig
from ds_zo.ops import MXFP4
from ds_zo.planner.estimate import Limits
from ds_zo.planner.models import Model
from ds_zo.streaming.budget import Needed, most_resident
from ds_zo.streaming.placement import WIRE, Placement, plan_units

PINNED = {"device": "cpu", "pin_memory": True}
"""`offload_param` and `offload_optimizer` of the JSON."""


def units_of(
    model: Model,
    stream: StreamConfig,
    *,
    trains_base: bool,
    wire: str = "auto",
    split: bool = False,
    in_groups: Collection[int] = (),
) -> Placement:
    """The model divided into units. `trains_base`: all parameters are trained; else adapters that the model does not
    have yet, over a frozen base. A plan reads no files. With mxfp4 it therefore takes the weights of experts, which
    have three dimensions, for those that the files hold in that form. `in_groups`: see `plan_units`."""
    groups: Sequence[dict[str, Any]] = [{"params": list(model.module.parameters())}] if trains_base else []
    in_mxfp4 = stream.frozen_dtype == "mxfp4" and not trains_base

    def mxfp4_of_experts(p: nn.Parameter) -> torch.dtype | None:
        return MXFP4.dtype if p.dim() == 3 else None

    placement = plan_units(
        model.module,
        groups,
        block_paths=stream.blocks,
        wire=WIRE[wire],
        frozen_wire=mxfp4_of_experts if in_mxfp4 else WIRE[stream.frozen_dtype],
        split=split,
        in_groups=in_groups,
    )
    if in_mxfp4 and not placement.decodes_frozen:
        raise ValueError(
            f"frozen_dtype mxfp4 keeps weights of experts that a model's files hold in MXFP4, got {model.name}, which "
            "has no experts: take nf4 (--stream)"
        )
    return placement


def num_resident(
    placement: Placement, limits: Limits, stream: StreamConfig, needed: Needed, *, other_nbytes: int
) -> int:
    """How many blocks stay on the device, where blocks stream: as many as the user says, or as fit. `other_nbytes`:
    device memory that `needed` does not count."""
    if stream.resident_blocks is not None:
        return min(stream.resident_blocks, len(placement.blocks))
    if limits.device_nbytes is None:
        return 0
    found = most_resident(placement, budget_nbytes=limits.device_nbytes, activations_nbytes=other_nbytes, needed=needed)
    return max(0, found)


def section_of(limits: Limits, stream: StreamConfig, *, offload: bool, **zero: Any) -> dict[str, Any]:
    """The keys of the JSON that say how blocks are stored and whether they stream. `zero`: further keys of
    `zero_optimization`."""
    section = stream.model_dump(exclude_unset=True)
    if offload and limits.device_nbytes is not None and stream.resident_blocks is None:
        section["device_memory_gb"] = limits.device_nbytes / 1e9
    if offload:
        zero["offload_param"] = PINNED
    return {"zero_optimization": {"stage": 0, **zero}} | ({"ds_zo": {"stream": section}} if section else {})
