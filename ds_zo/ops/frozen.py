"""Storage formats of parameters that are never trained: one entry of `PACKED` each.

The formats of `formats.FORMATS` serve frozen parameters too; updates can be stored in them. In the formats here they
cannot, and a kernel of their own decodes them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch

from ds_zo.ops import mxfp4, nested, nf4
from ds_zo.ops.formats import FORMATS, Format


@dataclass(frozen=True)
class FrozenFormat:
    """A storage format of frozen parameters, and its two functions, which run where their first argument is."""

    form: Format
    """Its name is the value of `ds_zo.stream.frozen_dtype`. Its dtype stands for it, and no other format has it."""

    quantise: Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
    """Returns the stored bytes of values, flat and as uint8, and their scales, flat. The last group may be short."""

    dequantise_: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]
    """`dequantise_(out, packed, scales)` writes the values to `out`, in its dtype. `packed` has the form's dtype. It
    and `scales` are flat."""

    takes: Literal["spans", "matrices", "parameters", "stacks"] = "spans"
    """What the functions take. spans: flat tensors that begin with a group, of any parameters. parameters: one
    parameter, in its shape. stacks: a stack of experts, or some of them, with their bytes in the same order. matrices:
    `quantise` takes one matrix, flat, and the `out` of `dequantise_` has the matrices of a stack of experts as rows."""


def dequantise_nf4_(out: torch.Tensor, packed: torch.Tensor, scales: torch.Tensor) -> None:
    """Writes the values of an nf4 or nf4_nested plane to `out`, rounded to its dtype. The dtype of `scales` tells which
    of them it is. See [Note: nf4] in `ops.nf4` and [Note: nested scales] in `ops.nested`."""
    packed, rows = packed.view(torch.uint8), out if out.dim() == 2 else out.view(1, -1)
    is_nested = scales.dtype is torch.uint8
    nf4.check(rows, packed, scales, form=nested.NF4_NESTED if is_nested else nf4.NF4)
    if out.is_cuda:
        from ds_zo.ops.triton_nf4 import dequantise_triton_

        dequantise_triton_(rows, packed, scales)
    else:
        absmax = nested.expand(scales.view(len(rows), -1), out.numel()) if is_nested else scales
        nf4.dequantise_(out.view(-1), packed, absmax)


def dequantise_mxfp4_(out: torch.Tensor, packed: torch.Tensor, scales: torch.Tensor) -> None:
    """Writes the values of an mxfp4 parameter to `out`, rounded to its dtype. See [Note: mxfp4] in `ops.mxfp4`."""
    packed = packed.view(torch.uint8)
    mxfp4.check(out, packed, scales)
    if out.is_cuda:
        from ds_zo.ops.triton_mxfp4 import dequantise_triton_

        dequantise_triton_(out, packed, scales)
    else:
        mxfp4.dequantise_(out, packed, scales)


PACKED: dict[torch.dtype, FrozenFormat] = {
    found.form.dtype: found
    for found in (
        FrozenFormat(nf4.NF4, nf4.quantise, dequantise_nf4_),
        FrozenFormat(nested.NF4_NESTED, nested.quantise, dequantise_nf4_, takes="matrices"),
        FrozenFormat(mxfp4.MXFP4, mxfp4.quantise, dequantise_mxfp4_, takes="stacks"),
    )
}
"""By the dtype that stands for each format. `streaming.placement.register_format` adds one."""


def format_of(dtype: torch.dtype) -> Format | None:
    """The format of stored bytes of a dtype; None if it has none. The uint8 of bf12 and the dtypes of `PACKED` are used
    for nothing else."""
    return PACKED[dtype].form if dtype in PACKED else FORMATS.get(dtype)
