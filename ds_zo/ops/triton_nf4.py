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

WORDS = 512
"""Words of 8 values that a program processes."""
NUM_WARPS = 2
"""Of 2, 4 and 8 the fastest on an H200: 3.2 TB/s, three quarters of a copy's rate."""

_WORD_NUMEL: tl.constexpr = tl.constexpr(8)
_GROUP_WORDS: tl.constexpr = tl.constexpr(GROUP_NUMEL // 8)


@triton.jit
def _dequantise_kernel(packed_ptr, absmax_ptr, code_ptr, out_ptr, numel, OUT_FORMAT: tl.constexpr, WORDS: tl.constexpr):
    word = tl.program_id(0).to(tl.int64) * WORDS + tl.arange(0, WORDS)
    lane = tl.arange(0, _WORD_NUMEL)
    mask = word * _WORD_NUMEL < numel
    bits = tl.load(packed_ptr + word, mask=mask, other=0).to(tl.uint32, bitcast=True)
    absmax = tl.load(absmax_ptr + word // _GROUP_WORDS, mask=mask, other=0.0)
    # In a word, the first value's index is in the upper half of the lowest byte, and the second's in its lower half.
    index = (bits[:, None] >> ((lane * 4) ^ 4).to(tl.uint32)[None, :]) & 15
    x = tl.load(code_ptr + index.to(tl.int32)) * absmax[:, None]
    if OUT_FORMAT > 0:
        x = round_to(x, nearest_addend(x, OUT_FORMAT), OUT_FORMAT)
    at = word[:, None] * _WORD_NUMEL + lane[None, :]
    store_values(out_ptr, at, mask[:, None], x, OUT_FORMAT)


def dequantise_triton_(out: torch.Tensor, packed: torch.Tensor, absmax: torch.Tensor) -> None:
    """Needs a multiple of 8 elements, which every plane of a unit has."""
    numel = out.numel()
    assert numel % _WORD_NUMEL.value == 0, numel
    _dequantise_kernel[(triton.cdiv(numel, WORDS * _WORD_NUMEL.value),)](
        packed.view(torch.int32),
        absmax,
        _code(out.device),
        out.view(torch.int16) if out.dtype is torch.bfloat16 else out,
        numel,
        OUT_FORMAT=format_id(storage_format(out.dtype)),
        WORDS=WORDS,
        num_warps=NUM_WARPS,
    )


@cache
def _code(device: torch.device) -> torch.Tensor:
    return torch.tensor(CODE, dtype=torch.float32, device=device)
