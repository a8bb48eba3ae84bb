"""The units of a planned model, in the forms that `ds_zo.stream` stores them in."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from ds_zo.config.section import StreamConfig
from ds_zo.ops import MXFP4
from ds_zo.planner.models import Model
from ds_zo.streaming.placement import WIRE, Placement, plan_units


def units_of(
    model: Model, stream: StreamConfig, *, trains_base: bool, wire: str = "auto", split: bool = False
) -> Placement:
    """The model divided into units. `trains_base`: all parameters are trained; else adapters that the model does not
    have yet, over a frozen base. A plan reads no files. With mxfp4 it therefore takes the weights of experts, which
    have three dimensions, for those that the files hold in that form."""
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
    )
    if in_mxfp4 and not placement.decodes_frozen:
        raise ValueError(
            f"frozen_dtype mxfp4 keeps weights of experts that a model's files hold in MXFP4, got {model.name}, which "
            "has no experts: take nf4 (--stream)"
        )
    return placement
