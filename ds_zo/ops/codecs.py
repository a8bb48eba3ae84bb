"""Whole parameters into and out of storage, for loading and saving. Rounds to nearest; any device."""

from __future__ import annotations

import torch

from ds_zo.ops.formats import fit_exponents, join, load, round_to, scale_by, split, storage_format, store_


def encode_(
    storage: torch.Tensor,
    values: torch.Tensor,
    *,
    low: torch.Tensor | None = None,
    exponents: torch.Tensor | None = None,
) -> None:
    """Write float32 values to a segment of storage, its low plane and (fp8) its fresh exponents, one for 256 elements.

    Each tensor is the segment's own slice, 1-D. The work is done on the CPU: this is for loading, not for steps.
    """
    fmt = storage_format(storage.dtype)
    _check_exponents(storage, exponents)
    x = values.detach().reshape(-1).to(device="cpu", dtype=torch.float32).numpy()
    if exponents is not None:
        fitted = fit_exponents(x)
        exponents.copy_(torch.from_numpy(fitted))
        x = scale_by(x, fitted, -1)
    if low is not None and fmt.dropped_bits:
        x, low_values = split(fmt, x)
        low.copy_(torch.from_numpy(low_values))
    else:
        x = round_to(fmt, x)
    staged = torch.empty(x.shape, dtype=storage.dtype)
    store_(staged, x)
    storage.copy_(staged)


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
