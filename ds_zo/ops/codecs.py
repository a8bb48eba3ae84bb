"""Whole parameters into and out of storage, for loading and saving. Rounds to nearest; any device."""

from __future__ import annotations

import numpy as np
import torch

from ds_zo.ops.formats import (
    FP8_MAX_MANTISSA,
    MAX_EXPONENT,
    MIN_EXPONENT,
    fit_exponents,
    join,
    load,
    round_to,
    scale_by,
    split,
    storage_format,
    store_,
)
from ds_zo.ops.segments import SEGMENT_ALIGNMENT


def encode_(
    storage: torch.Tensor,
    values: torch.Tensor,
    *,
    low: torch.Tensor | None = None,
    exponents: torch.Tensor | None = None,
) -> None:
    """Write float32 values to a segment of storage, its low plane and (fp8) its fresh exponents, one for 256 elements.

    Each tensor is the segment's own slice, 1-D. `values` on CUDA are encoded there, others on the CPU, to the same
    bits: this is for loading, not for steps.
    """
    fmt = storage_format(storage.dtype)
    _check_exponents(storage, exponents)
    if values.is_cuda:
        encode_on_device_(storage, values.detach().reshape(-1).float(), low=low, exponents=exponents)
        return
    x = values.detach().reshape(-1).to(device="cpu", dtype=torch.float32).numpy()
    if exponents is not None:
        fitted = fit_exponents(x)
        exponents.copy_(torch.from_numpy(fitted))
        x = scale_by(x, fitted, -1)
    with np.errstate(invalid="ignore"):  # NaN passes through
        if low is not None and fmt.dropped_bits:
            x, low_values = split(fmt, x)
            low.copy_(torch.from_numpy(low_values))
        else:
            x = round_to(fmt, x)
    staged = torch.empty(x.shape, dtype=storage.dtype)
    store_(staged, x)
    storage.copy_(staged)


def encode_on_device_(
    storage: torch.Tensor, x: torch.Tensor, *, low: torch.Tensor | None, exponents: torch.Tensor | None
) -> None:
    """`encode_` in torch operations. Finite values only: a model that holds others is not worth loading fast."""
    fmt = storage_format(storage.dtype)
    if exponents is not None:
        bits = x.abs().view(-1, SEGMENT_ALIGNMENT).amax(dim=1).view(torch.int32)
        fitted = (bits >> 23) - 127 - 8 + ((bits & 0x7FFFFF) > FP8_MAX_MANTISSA)
        fitted = fitted.clamp(MIN_EXPONENT, MAX_EXPONENT)
        exponents.copy_(fitted)
        x = (x.view(-1, SEGMENT_ALIGNMENT) * torch.exp2(-fitted.float())[:, None]).view(-1)
    if low is None or not fmt.dropped_bits:
        largest = fmt.largest if fmt.dtype == torch.float8_e4m3fn else float("inf")
        storage.copy_(x.clamp(-largest, largest).to(fmt.dtype))
        return
    magnitude = x.abs()
    lift = torch.where(magnitude < fmt.tiny, fmt.tiny, 0.0)
    lifted = (magnitude + lift).view(torch.int32) + (1 << (fmt.dropped_bits - 1))
    high = (lifted & -(1 << fmt.dropped_bits)).view(torch.float32) - lift
    high = high.clamp(max=fmt.largest)
    if fmt.dtype == torch.bfloat16:
        residual = (magnitude.view(torch.int32) - high.view(torch.int32)).float()
    else:
        exponent = high.clamp(min=fmt.tiny).view(torch.int32) >> 23
        scale = ((254 + (23 - fmt.dropped_bits) + 16 - exponent) << 23).view(torch.float32)
        residual = ((magnitude - high) * scale).round()
    low.copy_(residual.clamp(-32768, 32767).to(torch.int16))
    storage.copy_(torch.copysign(high, x).to(fmt.dtype))


def decode(
    storage: torch.Tensor, low: torch.Tensor | None = None, exponents: torch.Tensor | None = None
) -> torch.Tensor:
    """The float32 values of a segment of storage, on its device."""
    fmt = storage_format(storage.dtype)
    _check_exponents(storage, exponents)
    x = load(storage.detach().cpu())
    if low is not None and fmt.dropped_bits:
        x = join(fmt, x, low.cpu().numpy())
    if exponents is not None:
        x = scale_by(x, exponents.cpu().numpy(), 1)
    return torch.from_numpy(x).to(storage.device)


def _check_exponents(storage: torch.Tensor, exponents: torch.Tensor | None) -> None:
    if (storage.dtype == torch.float8_e4m3fn) != (exponents is not None):
        raise ValueError(f"exponents go with float8_e4m3fn storage and with no other, got {storage.dtype} (exponents)")
