# mypy: disable-error-code="no-untyped-def"
"""`frozen.dequantise_nf4_` as one Triton kernel, for CUDA tensors and, in tests, CPU tensors under Triton's
interpreter."""

from __future__ import annotations

from functools import cache

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from ds_zo.ops import nested
from ds_zo.ops.formats import storage_format
from ds_zo.ops.nf4 import CODE, GROUP_NUMEL
from ds_zo.ops.triton_formats import format_id, nearest_addend, round_to, store_values

WORDS = 1024
"""Words of 8 values that a program processes."""
NUM_WARPS = 8

_WORD_NUMEL: tl.constexpr = tl.constexpr(8)
_GROUP_WORDS: tl.constexpr = tl.constexpr(GROUP_NUMEL // 8)
_BLOCK_NUMEL: tl.constexpr = tl.constexpr(nested.BLOCK_NUMEL)


@triton.jit
def _dequantise_kernel(
    packed_ptr,
    scales_ptr,
    floats_ptr,
    scale_code_ptr,
    code_ptr,
    out_ptr,
    numel,
    num_words,
    row_nbytes,
    NESTED: tl.constexpr,
    IN_WORDS: tl.constexpr,
    OUT_FORMAT: tl.constexpr,
    CASTS: tl.constexpr,
    WORDS: tl.constexpr,
):
    # Offsets within a program have 32 bits; only its start has 64. On an H200, instructions limit this kernel.
    matrix = tl.program_id(1).to(tl.int64)
    first = tl.program_id(0).to(tl.int64) * WORDS
    word = tl.arange(0, WORDS)
    lane = tl.arange(0, _WORD_NUMEL)
    mask = word < tl.minimum(num_words - first, WORDS).to(tl.int32)
    bits = tl.load(packed_ptr + matrix * num_words + first + word, mask=mask, other=0).to(tl.uint32, bitcast=True)
    group = first // _GROUP_WORDS + word // _GROUP_WORDS
    if NESTED:
        # A row of scales is `offset`, `largest` of each block, and the indices: see [Note: nested scales].
        row = floats_ptr + matrix * (row_nbytes // 4)
        num_floats = 1 + tl.cdiv(tl.cdiv(numel, _GROUP_WORDS * _WORD_NUMEL), _BLOCK_NUMEL)
        scale = tl.load(scales_ptr + matrix * row_nbytes + num_floats * 4 + group, mask=mask, other=0)
        largest = tl.load(row + 1 + group // _BLOCK_NUMEL, mask=mask, other=0.0)
        absmax = tl.load(scale_code_ptr + scale.to(tl.int32)) * largest + tl.load(row)
    else:
        absmax = tl.load(floats_ptr + group, mask=mask, other=0.0)
    # In a word, the first value's index is in the upper half of the lowest byte, and the second's in its lower half.
    index = (bits[:, None] >> ((lane * 4) ^ 4).to(tl.uint32)[None, :]) & 15
    x = tl.load(code_ptr + index.to(tl.int32)) * absmax[:, None]
    within = word[:, None] * _WORD_NUMEL + lane[None, :]
    at = matrix * numel + first * _WORD_NUMEL + within
    mask = mask[:, None]
    if not IN_WORDS:
        mask = first * _WORD_NUMEL + within < numel
    if CASTS:
        tl.store(out_ptr + at, x.to(out_ptr.dtype.element_ty), mask=mask)
    else:
        if OUT_FORMAT > 0:
            x = round_to(x, nearest_addend(x, OUT_FORMAT), OUT_FORMAT)
        store_values(out_ptr, at, mask, x, OUT_FORMAT)


def dequantise_triton_(out: torch.Tensor, packed: torch.Tensor, scales: torch.Tensor) -> None:
    """`out` has a row for each matrix. Several rows are of whole groups.

    A GPU rounds two values in one instruction. The interpreter rounds by integer arithmetic, because its casts do not
    round to nearest even."""
    (num_matrices, numel), casts, is_nested = out.shape, out.is_cuda, scales.dtype is torch.uint8
    if packed.numel() % 4:  # few matrices have such a size
        packed = F.pad(packed, (0, -packed.numel() % 4))
    _dequantise_kernel[(triton.cdiv(numel, WORDS * _WORD_NUMEL.value), num_matrices)](
        packed.view(torch.int32),
        scales,
        scales.view(torch.float32),
        _code(out.device, is_nested=True),
        _code(out.device),
        out if casts or out.dtype is not torch.bfloat16 else out.view(torch.int16),
        numel,
        triton.cdiv(numel, _WORD_NUMEL.value),
        scales.numel() // num_matrices,
        NESTED=is_nested,
        IN_WORDS=numel % _WORD_NUMEL.value == 0,
        OUT_FORMAT=format_id(storage_format(out.dtype)),
        CASTS=casts,
        WORDS=WORDS,
        num_warps=NUM_WARPS,
        enable_fp_fusion=False,  # nested scales round the product, then the sum
    )


@cache
def _code(device: torch.device, *, is_nested: bool = False) -> torch.Tensor:
    return (nested.CODE if is_nested else CODE).to(device)
