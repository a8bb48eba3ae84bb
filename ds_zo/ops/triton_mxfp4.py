# mypy: disable-error-code="no-untyped-def"
"""`mxfp4.dequantise_` as one Triton kernel, for CUDA tensors and, in tests, CPU tensors under Triton's interpreter."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ds_zo.ops.formats import storage_format
from ds_zo.ops.triton_formats import format_id, nearest_addend, round_to, store_values

ROWS, COLUMNS = 64, 128
"""Shape of the tile of `out` that a program writes."""
_NUM_WARPS = 4
_CODE_FACTOR: tl.constexpr = tl.constexpr(2.0**126)
"""Factor for an index whose exponent and mantissa bits are at float32's positions. It changes the exponent's bias."""


@triton.jit
def _dequantise_kernel(
    packed_ptr,
    scales_ptr,
    out_ptr,
    num_rows,
    num_columns,
    OUT_FORMAT: tl.constexpr,
    CASTS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    first = tl.program_id(2).to(tl.int64) * num_rows * num_columns
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    word = tl.program_id(0) * (ROWS // 8) + tl.arange(0, ROWS // 8)
    mask = (column < num_columns)[:, None] & (word * 8 < num_rows)[None, :]
    bits = tl.load(packed_ptr + first // 8 + (column[:, None] * (num_rows // 8) + word[None, :]), mask=mask, other=0)
    at = column[:, None] * (num_rows // 32) + (word // 4)[None, :]
    scale = tl.load(scales_ptr + first // 32 + at, mask=mask, other=0).to(tl.int32)
    factor = tl.maximum(scale << 23, 0x400000).to(tl.float32, bitcast=True)  # scale 0: a subnormal
    bits, factor, mask = tl.trans(bits), tl.trans(factor), tl.trans(mask)
    for i in tl.static_range(8):
        # An arithmetic shift puts copies of the sign above the three other bits of the index.
        index = ((bits << (28 - 4 * i)) >> 6).to(tl.uint32, bitcast=True) & 0x81C00000
        x = index.to(tl.float32, bitcast=True) * _CODE_FACTOR * factor
        at = first + ((word * 8 + i)[:, None] * num_columns + column[None, :])
        if CASTS:
            tl.store(out_ptr + at, x.to(out_ptr.dtype.element_ty), mask=mask)
        else:
            if OUT_FORMAT > 0:
                x = round_to(x, nearest_addend(x, OUT_FORMAT), OUT_FORMAT)
            store_values(out_ptr, at, mask, x, OUT_FORMAT)


def dequantise_triton_(out: torch.Tensor, packed: torch.Tensor, scales: torch.Tensor) -> None:
    """See `triton_nf4.dequantise_triton_` on rounding."""
    num_experts, num_rows, num_columns = out.shape
    casts = out.is_cuda
    _dequantise_kernel[(triton.cdiv(num_rows, ROWS), triton.cdiv(num_columns, COLUMNS), num_experts)](
        packed.view(torch.int32),
        scales,
        out if casts or out.dtype is not torch.bfloat16 else out.view(torch.int16),
        num_rows,
        num_columns,
        OUT_FORMAT=format_id(storage_format(out.dtype)),
        CASTS=casts,
        ROWS=ROWS,
        COLUMNS=COLUMNS,
        num_warps=_NUM_WARPS,
    )
