"""Encodes whole parameters to a storage format and decodes them, for loading and saving. Rounds to nearest."""

from __future__ import annotations

import numpy as np
import torch

from ds_zo.ops.formats import (
    BIAS_SHIFT,
    LANE_SHIFTS,
    MAX_EXPONENT,
    MIN_EXPONENT,
    TOP_EXPONENT,
    Format,
    exponents_of,
    fit_exponents,
    join,
    load,
    max_mantissa,
    nan_code,
    round_to,
    scale_by,
    split,
    storage_format,
    store_,
)
from ds_zo.ops.segments import LANE_NUMEL, SEGMENT_ALIGNMENT

CHUNK_NUMEL = 1 << 24
"""Elements encoded on a device at a time, so that temporaries stay small compared with a step's memory."""
_BFLOAT16_NAN = 0x7FC0


def encode_(
    storage: torch.Tensor,
    values: torch.Tensor,
    *,
    low: torch.Tensor | None = None,
    scales: torch.Tensor | None = None,
) -> None:
    """Write float32 values to a segment of storage, to its low plane and, for scaled formats, to its scales, which are
    fitted to the values.

    Each tensor is 1-D and covers exactly the segment. `values` on CUDA are encoded there, other values on the CPU, with
    equal bits. For loading, not for use in a step.
    """
    fmt = storage_format(storage.dtype)
    _check_scales(storage, scales)
    if values.is_cuda:
        flat = values.detach().reshape(-1)
        for start in range(0, flat.numel(), CHUNK_NUMEL):
            at = slice(start, min(start + CHUNK_NUMEL, flat.numel()))
            encode_on_device_(
                storage[at],
                flat[at].float(),
                low=None if low is None else low[at],
                scales=None if scales is None else scales[fmt.scales_of(at.start, at.stop)],
            )
        return
    x = values.detach().reshape(-1).to(device="cpu", dtype=torch.float32).numpy()
    if scales is not None:
        fitted = fit_exponents(fmt, x)
        exponents_of(fmt, scales).copy_(torch.from_numpy(fitted))
        x = scale_by(x, fitted, -1)
    with np.errstate(invalid="ignore"):  # NaN passes through
        if low is not None and fmt.dropped_bits:
            x, low_values = split(fmt, x)
            low.copy_(torch.from_numpy(low_values))
        else:
            x = round_to(fmt, x)
    staged = torch.empty(x.shape, dtype=storage.dtype)
    staged_scales = scales.cpu() if scales is not None and fmt.has_lanes else None
    store_(staged, x, staged_scales)
    storage.copy_(staged)
    if scales is not None and staged_scales is not None:
        scales.copy_(staged_scales)


def copy_staged_(target: torch.Tensor, values: torch.Tensor) -> None:
    """target.copy_(values); from CUDA to the host it copies chunk by chunk through a pinned buffer.

    In a buffer that ranks share each rank has pinned only its own shard, and CUDA refuses to copy to partly pinned
    memory. `is_pinned` cannot tell: for a view it answers for the first byte of the storage. Copies through new
    pageable memory are slow: 13 GB take 15 s on an H200.
    """
    if target.is_cuda or not values.is_cuda:
        target.copy_(values)
        return
    values, target = values.reshape(-1), target.view(-1)
    staging = torch.empty(min(values.numel(), CHUNK_NUMEL), dtype=values.dtype, pin_memory=True)
    for start in range(0, values.numel(), CHUNK_NUMEL):
        chunk = values[start : start + CHUNK_NUMEL]
        target[start : start + CHUNK_NUMEL].copy_(staging[: chunk.numel()].copy_(chunk))


def encode_on_device_(
    storage: torch.Tensor, x: torch.Tensor, *, low: torch.Tensor | None, scales: torch.Tensor | None
) -> None:
    """`encode_` for values on a device, in torch operations."""
    fmt = storage_format(storage.dtype)
    finite, no_number = x.isfinite(), x.isnan()
    x = x.masked_fill(no_number, float("nan"))  # NaN without a sign
    if scales is not None:
        largest_of = x.abs().masked_fill(~finite, 0.0).view(-1, SEGMENT_ALIGNMENT).amax(dim=1)
        bits = largest_of.view(torch.int32)
        fitted = (bits >> 23) - 127 - TOP_EXPONENT + ((bits & 0x7FFFFF) > max_mantissa(fmt))
        fitted = fitted.clamp(MIN_EXPONENT, MAX_EXPONENT)
        if not fmt.has_lanes:
            copy_staged_(scales, fitted)
        factors = ((127 - fitted) << 23).view(torch.float32)  # 2**-fitted, exact on every device
        x = (x.view(-1, SEGMENT_ALIGNMENT) * factors[:, None]).view(-1)
    if not fmt.dropped_bits or (low is None and not fmt.has_lanes):
        largest = fmt.largest if fmt.scaled else float("inf")
        copy_staged_(storage, _narrow(fmt, x.clamp(-largest, largest), no_number))
        return
    magnitude = x.abs()
    lift = torch.where(magnitude < fmt.tiny, fmt.tiny, 0.0)
    lifted = (magnitude + lift).view(torch.int32)
    half = 1 << (fmt.dropped_bits - 1)
    addend = half if low is not None else ((lifted >> fmt.dropped_bits) & 1) + (half - 1)
    high = ((lifted + addend) & -(1 << fmt.dropped_bits)).view(torch.float32) - lift
    high = torch.where(finite, high.clamp(max=fmt.largest), fmt.largest if fmt.scaled else float("inf"))
    high = high.masked_fill(no_number, float("nan"))
    if low is not None:
        if fmt.dropped_bits == 16:
            residual = (lifted - (high + lift).view(torch.int32)).float()
        else:
            exponent = high.clamp(min=fmt.tiny).view(torch.int32) >> 23
            scale = ((254 + (23 - fmt.dropped_bits) + 16 - exponent) << 23).view(torch.float32)
            residual = ((magnitude - high) * scale).round()
        copy_staged_(low, residual.masked_fill(~finite, 0.0).clamp(-32768, 32767).to(torch.int16))
    if scales is not None and fmt.has_lanes:
        code = (high * (1 / BIAS_SHIFT)).view(torch.int32) >> fmt.dropped_bits
        code = code.masked_fill(no_number, int(nan_code(fmt)))
        copy_staged_(scales, torch.cat([fitted[:, None], _lane_words(fmt, code)], dim=1).view(-1))
        copy_staged_(storage, ((code & 0x7F) | (torch.signbit(x).int() << 7)).to(torch.uint8))
    else:
        copy_staged_(storage, _narrow(fmt, torch.copysign(high, x), no_number))


def _narrow(fmt: Format, x: torch.Tensor, no_number: torch.Tensor) -> torch.Tensor:
    """x in the format's dtype, with the same bits for every NaN. A cast to bfloat16 writes NaN bits that depend on the
    processor: 0x7FC0 on aarch64 and in scalar code, 0xFFFF in vector code of x86-64, 0x7FFF on CUDA."""
    narrow = x.to(fmt.dtype)
    if fmt.dtype is torch.bfloat16:
        narrow.view(torch.int16).masked_fill_(no_number, _BFLOAT16_NAN)
    return narrow


def _lane_words(fmt: Format, code: torch.Tensor) -> torch.Tensor:
    """[group, lane]: words that hold the exponents of `code`, packed as in [Note: bf12]."""
    shifts = torch.from_numpy(LANE_SHIFTS.astype("int32")).to(code.device)
    words = ((code >> 7).view(-1, LANE_NUMEL) << shifts).sum(dim=1, dtype=torch.int32)
    return words.view(-1, fmt.scale_numel - 1)


def decode(storage: torch.Tensor, low: torch.Tensor | None = None, scales: torch.Tensor | None = None) -> torch.Tensor:
    """The float32 values of a segment of storage, on the storage's device."""
    fmt = storage_format(storage.dtype)
    _check_scales(storage, scales)
    scales = None if scales is None else scales.cpu()
    x = load(storage.detach().cpu(), scales)
    if low is not None and fmt.dropped_bits:
        x = join(fmt, x, low.cpu().numpy())
    if scales is not None:
        x = scale_by(x, exponents_of(fmt, scales).numpy(), 1)
    return torch.from_numpy(x).to(storage.device)


def _check_scales(storage: torch.Tensor, scales: torch.Tensor | None) -> None:
    fmt = storage_format(storage.dtype)
    found = None if scales is None else scales.dtype
    if found != fmt.scale_dtype:
        raise ValueError(f"{fmt.name} storage needs scales of dtype {fmt.scale_dtype}, got {found} (scales)")
