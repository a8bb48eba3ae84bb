"""Storage formats of parameters that are never trained: one entry of `PACKED` each.

The formats of `formats.FORMATS` serve frozen parameters too; updates can be stored in them. In the formats here they
cannot, and a kernel of their own decodes them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from ds_zo.ops import mxfp4, nf4
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

    is_flat: bool = True
    """The functions take flat tensors that begin with a group: any span of parameters. Otherwise they take one
    parameter, in its shape."""


def dequantise_nf4_(out: torch.Tensor, packed: torch.Tensor, absmax: torch.Tensor) -> None:
    """Writes the values of an nf4 plane to `out`, rounded to its dtype. See [Note: nf4] in `ops.nf4`."""
    packed = packed.view(torch.uint8)
    nf4.check(out, packed, absmax)
    if out.is_cuda:
        from ds_zo.ops.triton_nf4 import dequantise_triton_

        dequantise_triton_(out, packed, absmax)
    else:
        nf4.dequantise_(out, packed, absmax)


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
        FrozenFormat(mxfp4.MXFP4, mxfp4.quantise, dequantise_mxfp4_, is_flat=False),
    )
}
"""By the dtype that stands for each format. `streaming.placement.register_format` adds one."""


def format_of(dtype: torch.dtype) -> Format | None:
    """The format of stored bytes of a dtype; None if it has none. The uint8 of bf12 and the dtypes of `PACKED` are used
    for nothing else."""
    return PACKED[dtype].form if dtype in PACKED else FORMATS.get(dtype)
