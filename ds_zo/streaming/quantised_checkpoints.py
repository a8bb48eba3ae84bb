"""Reads weights that transformers has saved in four bits: with bitsandbytes, or in MXFP4."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch

from ds_zo.config.json_text import parse_json
from ds_zo.ops import MXFP4, NF4, NF4_NESTED, mxfp4, nested
from ds_zo.ops.nf4 import CODE, GROUP_NUMEL, Quantised

_STATE = ".quant_state.bitsandbytes__nf4"
_FOREIGN_STATE = ".quant_state.bitsandbytes__fp4"
_BLOCKS, _SCALES = "_blocks", "_scales"
"""Suffixes of the two tensors of a weight in MXFP4."""
_DAMAGED = "the checkpoint is damaged, so download or save it again"


def shipped_wire(names: Collection[str], name: str) -> torch.dtype | None:
    """The dtype that stands for the four-bit format of the weight `name`, in a checkpoint with tensors `names`. None:
    the weight is not in four bits."""
    if name + _FOREIGN_STATE in names:
        raise ValueError(f"4-bit weights must be NF4, got FP4: save the model with bnb_4bit_quant_type nf4 ({name})")
    if name + _STATE in names:
        return NF4_NESTED.dtype if f"{name}.nested_absmax" in names else NF4.dtype
    return MXFP4.dtype if name + _BLOCKS in names and name + _SCALES in names else None


def weight_names(names: Collection[str]) -> set[str]:
    """The names of a checkpoint's tensors and of its weights in MXFP4, which have no tensor of their own name."""
    packed = (name.removesuffix(_BLOCKS) for name in names if name.endswith(_BLOCKS))
    return {*names, *(name for name in packed if name + _SCALES in names)}


def plain_names(names: Collection[str]) -> set[str]:
    """The names of weights, without the other tensors of weights in NF4."""
    states = {name.removesuffix(_STATE) for name in names if name.endswith(_STATE)}
    return {name for name in names if name.rpartition(".")[0] not in states and not name.endswith(_STATE)}


def stacked(name: str, parts: Sequence[Quantised], shape: tuple[int, ...]) -> Quantised:
    """The weight whose matrices are `parts`, in this order. One part has the shape of its own file."""
    if len(parts) == 1:
        return parts[0]
    found = [part.shape for part in parts]
    is_stack = len(set(found)) == 1 and found[0][-1:] == shape[-1:]
    if not is_stack or sum(map(math.prod, found)) != math.prod(shape):
        raise ValueError(f"{name} must have shape {shape}, got matrices of {sorted(set(found))}: {_DAMAGED}")
    packed, scales = torch.cat([part.packed for part in parts]), torch.cat([part.absmax for part in parts])
    return type(parts[0])(packed, scales, shape)


def read_quantised(read: Callable[[str], torch.Tensor], name: str, wire: torch.dtype = NF4.dtype) -> Quantised:
    """The weight `name`, in MXFP4 if `wire` says so, else in NF4. `read` returns the checkpoint's tensors by name."""
    return _read_mxfp4(read, name) if wire is MXFP4.dtype else _read_nf4(read, name)


def _read_mxfp4(read: Callable[[str], torch.Tensor], name: str) -> Quantised:
    blocks, scales = read(name + _BLOCKS), read(name + _SCALES)
    found = f"{name}{_BLOCKS} of shape {list(blocks.shape)} and {name}{_SCALES} of {list(scales.shape)}"
    is_right = blocks.dim() == 4 and blocks.shape == (*scales.shape, mxfp4.GROUP_NUMEL // 2)
    if not is_right or {blocks.dtype, scales.dtype} != {torch.uint8}:
        raise ValueError(
            f"MXFP4 weights must be bytes of shape (experts, columns, blocks, {mxfp4.GROUP_NUMEL // 2}) with a scale "
            f"for each block, got {found}: the checkpoint is damaged or of another layout, so download it again"
        )
    num_experts, num_columns, num_blocks, _ = blocks.shape
    shape = (num_experts, num_blocks * mxfp4.GROUP_NUMEL, num_columns)
    return mxfp4.MXFP4Values(blocks.reshape(-1), scales.reshape(-1), shape)


def _read_nf4(read: Callable[[str], torch.Tensor], name: str) -> Quantised:
    try:
        state = _state(read, name)
        shape = tuple(state["shape"])
        packed = read(name).reshape(-1).view(torch.uint8)
        absmax = read(f"{name}.absmax").reshape(-1)
        _check_code_book(f"{name}.quant_map", read, CODE, of="NF4", tolerance=0.0)
        num_bytes, num_scales = -(-math.prod(shape) // 2), -(-math.prod(shape) // GROUP_NUMEL)
        if (packed.numel(), absmax.numel()) != (num_bytes, num_scales):
            raise ValueError(
                f"{name} has {packed.numel()} packed bytes and {absmax.numel()} scales, but its shape {list(shape)} "
                f"needs {num_bytes} and {num_scales}: {_DAMAGED}"
            )
        if "nested_offset" not in state:
            return Quantised(packed, absmax.float(), shape)
        return nested.NestedValues(packed, _nested_scales(read, name, state, absmax)[None], shape)
    except KeyError as error:
        raise ValueError(f"{error.args[0]} must be among the parts of NF4 weight {name}: {_DAMAGED}") from None


def _nested_scales(
    read: Callable[[str], torch.Tensor], name: str, state: Mapping[str, Any], index: torch.Tensor
) -> torch.Tensor:
    """The row of scales of a weight with double quantisation."""
    largest, block_numel = read(f"{name}.nested_absmax").reshape(-1).float(), state["nested_blocksize"]
    if block_numel != nested.BLOCK_NUMEL or largest.numel() != -(-index.numel() // nested.BLOCK_NUMEL):
        raise ValueError(
            f"{name}.nested_absmax must have a scale for each {nested.BLOCK_NUMEL} of {index.numel()} scales, got "
            f"{largest.numel()} for each {block_numel}: {_DAMAGED}"
        )
    # bitsandbytes computes this code book where it quantises: its last bits depend on the CPU.
    _check_code_book(f"{name}.nested_quant_map", read, nested.CODE, of="double quantisation", tolerance=1e-6)
    offset = torch.tensor(state["nested_offset"], dtype=torch.float32, device="cpu")
    return nested.row_of(offset, largest, index)


def _check_code_book(
    name: str, read: Callable[[str], torch.Tensor], expected: torch.Tensor, *, of: str, tolerance: float
) -> None:
    """`tolerance`: by which share of a value the file's may differ."""
    found = read(name).float().cpu()
    if found.shape != expected.shape or not torch.allclose(found, expected, rtol=tolerance, atol=0.0):
        raise ValueError(
            f"{name} must be the code book of {of}, got {found.tolist()[:3]} and more: quantise the model again with "
            "bnb_4bit_quant_type nf4"
        )


def _state(read: Callable[[str], torch.Tensor], name: str) -> Mapping[str, Any]:
    """The settings with which bitsandbytes has quantised the weight."""
    raw = bytes(read(name + _STATE).tolist())
    try:
        state: dict[str, Any] = parse_json(raw)
    except ValueError:
        raise ValueError(f"{name}{_STATE} must be JSON, got {raw[:40]!r}: {_DAMAGED}") from None
    if state["blocksize"] != GROUP_NUMEL:
        raise ValueError(
            f"NF4 weights must have groups of {GROUP_NUMEL}, got {state['blocksize']}: quantise the model again with "
            f"that blocksize ({name})"
        )
    return state
