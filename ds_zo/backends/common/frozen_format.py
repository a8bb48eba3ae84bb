"""Units of a model whose frozen weights may be stored in another format than their dtype."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from ds_zo.config import ConfigError, Resolved
from ds_zo.streaming.loading import check_frozen_dtype, frozen_dtype_of, shipped_wire
from ds_zo.streaming.placement import WIRE, Placement, plan_units


def plan_frozen_format(
    module: nn.Module, param_groups: Sequence[Mapping[str, Any]], config: Resolved, **options: Any
) -> Placement:
    """`plan_units` with frozen matrices of blocks in the format of `ds_zo.stream.frozen_dtype`. `options`: further
    arguments of `plan_units`."""
    stream = config.section.stream
    frozen_dtype: str = stream.frozen_dtype
    if frozen_dtype == "auto" and config.stream:
        frozen_dtype = frozen_dtype_of(module) or "auto"
    check_frozen_dtype(module, frozen_dtype)
    ships = config.stream and frozen_dtype in ("auto", "mxfp4")
    frozen_wire = shipped_wire(module, frozen_dtype) if ships else WIRE[frozen_dtype]
    placement = plan_units(module, param_groups, block_paths=stream.blocks, frozen_wire=frozen_wire, **options)
    if frozen_dtype != "auto" and not placement.decodes_frozen:
        raise ConfigError(
            f"frozen_dtype stores frozen matrices of blocks, got {frozen_dtype} and a model that trains all of them: "
            "freeze the base model (PEFT does), or leave the key out",
            at="ds_zo.stream.frozen_dtype",
        )
    return placement
