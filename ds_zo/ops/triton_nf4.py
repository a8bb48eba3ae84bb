# mypy: disable-error-code="no-untyped-def"
"""`nf4.dequantise_` as one Triton kernel, for CUDA tensors and, in tests, CPU tensors under Triton's interpreter."""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl

from ds_zo.ops.formats import storage_format
from ds_zo.ops.nf4 import CODE, GROUP_NUMEL
from ds_zo.ops.triton_formats import format_id, nearest_addend, round_to, store_values

WORDS = 1024
"""Words of 8 values that a program processes."""
NUM_WARPS = 8

_WORD_NUMEL: tl.constexpr = tl.constexpr(8)
_GROUP_WORDS: tl.constexpr = tl.constexpr(GROUP_NUMEL // 8)


@triton.jit
def _dequantise_kernel(
    packed_ptr,
    absmax_ptr,
    code_ptr,
    out_ptr,
    numel,
    OUT_FORMAT: tl.constexpr,
    CASTS: tl.constexpr,
    WORDS: tl.constexpr,
):
    # Offsets within a program have 32 bits; only its start has 64. On an H200, instructions limit this kernel.
    first = tl.program_id(0).to(tl.int64) * WORDS
    word = tl.arange(0, WORDS)
    lane = tl.arange(0, _WORD_NUMEL)
    mask = word < tl.minimum(numel // _WORD_NUMEL - first, WORDS).to(tl.int32)
    bits = tl.load(packed_ptr + first + word, mask=mask, other=0).to(tl.uint32, bitcast=True)
    absmax = tl.load(absmax_ptr + first // _GROUP_WORDS + word // _GROUP_WORDS, mask=mask, other=0.0)
    # In a word, the first value's index is in the upper half of the lowest byte, and the second's in its lower half.
    index = (bits[:, None] >> ((lane * 4) ^ 4).to(tl.uint32)[None, :]) & 15
    x = tl.load(code_ptr + index.to(tl.int32)) * absmax[:, None]
    at = first * _WORD_NUMEL + (word[:, None] * _WORD_NUMEL + lane[None, :])
    if CASTS:
        tl.store(out_ptr + at, x.to(out_ptr.dtype.element_ty), mask=mask[:, None])
    else:
        if OUT_FORMAT > 0:
            x = round_to(x, nearest_addend(x, OUT_FORMAT), OUT_FORMAT)
        store_values(out_ptr, at, mask[:, None], x, OUT_FORMAT)


def dequantise_triton_(out: torch.Tensor, packed: torch.Tensor, absmax: torch.Tensor) -> None:
    """Needs a multiple of 8 elements, which every plane of a unit has.

    A GPU rounds two values in one instruction. The interpreter rounds by integer arithmetic, because its casts do not
    round to nearest even."""
    numel, casts = out.numel(), out.is_cuda
    assert numel % _WORD_NUMEL.value == 0, numel
    _dequantise_kernel[(triton.cdiv(numel, WORDS * _WORD_NUMEL.value),)](
        packed.view(torch.int32),
        absmax,
        _code(out.device),
        out if casts or out.dtype is not torch.bfloat16 else out.view(torch.int16),
        numel,
        OUT_FORMAT=format_id(storage_format(out.dtype)),
        CASTS=casts,
        WORDS=WORDS,
        num_warps=NUM_WARPS,
    )


@cache
def _code(device: torch.device) -> torch.Tensor:
    return torch.tensor(CODE, dtype=torch.float32, device=device)
