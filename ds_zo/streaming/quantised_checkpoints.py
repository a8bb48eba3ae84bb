"""Reads weights that transformers has saved in four bits with bitsandbytes."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch

from ds_zo.ops.nf4 import GROUP_NUMEL, Quantised, expand_absmax

_STATE = ".quant_state.bitsandbytes__nf4"
_FOREIGN_STATE = ".quant_state.bitsandbytes__fp4"


def is_quantised(names: Collection[str], name: str) -> bool:
    """Whether the weight `name` of a checkpoint with tensors `names` is stored in four bits."""
    if name + _FOREIGN_STATE in names:
        raise ValueError(f"4-bit weights must be NF4, got FP4: save the model with bnb_4bit_quant_type nf4 ({name})")
    return name + _STATE in names


def read_quantised(read: Callable[[str], torch.Tensor], name: str) -> Quantised:
    """The weight `name`. `read` returns a tensor of the checkpoint by its name."""
    state = _state(read, name)
    shape = tuple(state["shape"])
    packed = read(name).reshape(-1).view(torch.uint8)
    absmax = read(f"{name}.absmax").reshape(-1)
    if "nested_offset" in state:
        absmax = expand_absmax(
            absmax,
            absmax=read(f"{name}.nested_absmax"),
            code_book=read(f"{name}.nested_quant_map"),
            offset=state["nested_offset"],
            group_numel=state["nested_blocksize"],
        )
    num_bytes, num_scales = -(-math.prod(shape) // 2), -(-math.prod(shape) // GROUP_NUMEL)
    if (packed.numel(), absmax.numel()) != (num_bytes, num_scales):
        raise ValueError(
            f"{name} has {packed.numel()} packed bytes and {absmax.numel()} scales, but its shape {list(shape)} needs "
            f"{num_bytes} and {num_scales}: the checkpoint is damaged, so download or save it again"
        )
    return Quantised(packed, absmax.float(), shape)


def _state(read: Callable[[str], torch.Tensor], name: str) -> Mapping[str, Any]:
    """The settings with which bitsandbytes has quantised the weight."""
    raw = bytes(read(name + _STATE).tolist())
    try:
        state: dict[str, Any] = json.loads(raw)
    except ValueError:
        raise ValueError(
            f"{name}{_STATE} is not JSON, got {raw[:40]!r}: the checkpoint is damaged, so download or save it again"
        ) from None
    if state["blocksize"] != GROUP_NUMEL:
        raise ValueError(
            f"NF4 weights must have groups of {GROUP_NUMEL}, got {state['blocksize']}: quantise the model again with "
            f"that blocksize ({name})"
        )
    return state
