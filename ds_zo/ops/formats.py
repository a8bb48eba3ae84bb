"""Storage formats of parameters and their rounding, in numpy float32 and integer arithmetic.

[Note: split masters]
With a second plane of int16 (`low`) the pair (storage, low) holds the float32 master. Everything is in sign and
magnitude: |x| = |storage| + low * ulp(storage) / 2**16, storage being |x| rounded half up, so that low always fits.
    bfloat16       exact: low is the lower half of the bits (a magnitude above the largest bfloat16 saturates)
    float16        exact where storage is normal (27 bits); spacing 2**-40 below 2**-14
    float8_e4m3fn  20 bits: relative error below 2**-19 where normal; spacing 2**-25 of the group's scale below
NaN and infinity live in the storage with low = 0 (fp8 has no infinity: it saturates).

[Note: fp8 scales]
value = fp8 * 2**exponent with one int8 exponent for each 256 elements of the flat tensor. It is chosen so that the
group's largest magnitude lands in (224, 448], grows when a stored value would overflow, and never shrinks: values that
did not change keep their bits, and folds cannot make a scale oscillate. An all-zero group has the least exponent, so
that its first update decides.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ds_zo.ops.segments import SEGMENT_ALIGNMENT

Floats = NDArray[np.float32]

SIGN = 0x80000000
MAGNITUDE = 0x7FFFFFFF
INFINITY_BITS = 0x7F800000
MIN_EXPONENT, MAX_EXPONENT = -100, 100
FP8_SHIFT = 2.0**120
"""Moves an e4m3 bit pattern, standing in float32's top bits, from float32's exponent bias to its own."""
FP8_NAN = 0x7F
FP8_MAX_MANTISSA = 0x600000
"""Mantissa of 448 = 1.75 * 2**8."""


@dataclass(frozen=True)
class Format:
    """How a storage dtype truncates float32."""

    dtype: torch.dtype
    dropped_bits: int
    """Mantissa bits that float32 has more."""
    tiny: float
    """Smallest normal, below which the spacing is constant; 0 where float32's own exponent range is kept."""
    largest: float


FORMATS: dict[torch.dtype, Format] = {
    f.dtype: f
    for f in (
        Format(torch.float32, 0, 0.0, float(np.finfo(np.float32).max)),
        Format(torch.bfloat16, 16, 0.0, float(np.uint32(0x7F7F0000).view(np.float32))),
        Format(torch.float16, 13, 2.0**-14, 65504.0),
        Format(torch.float8_e4m3fn, 20, 2.0**-6, 448.0),
    )
}


def storage_format(dtype: torch.dtype) -> Format:
    try:
        return FORMATS[dtype]
    except KeyError:
        names = ", ".join(str(d).removeprefix("torch.") for d in FORMATS)
        raise ValueError(f"parameters must be stored as one of {names}, got {dtype}: convert them first") from None


def rounding_std(dtype: torch.dtype) -> float:
    """Largest relative standard deviation of one stochastic rounding of a normal value: half a step, where the value
    lies midway between two neighbours at the low end of a binade."""
    dropped = storage_format(dtype).dropped_bits
    return 2.0 ** (dropped - 23) / 2 if dropped else 0.0


def dither_addend(dither: NDArray[np.uint32], *, num_bits: int, dropped_bits: int) -> NDArray[np.uint32]:
    """What to add to float32 bits before truncation; a dither coarser than what is dropped sits mid-step, unbiased."""
    if num_bits >= dropped_bits:
        return dither >> np.uint32(num_bits - dropped_bits)
    return (dither << np.uint32(dropped_bits - num_bits)) | np.uint32(1 << (dropped_bits - num_bits - 1))


def round_to(fmt: Format, x: Floats, addend: NDArray[np.uint32] | None = None) -> Floats:
    """x on the format's grid, still float32: stochastic by `addend`, to nearest even without.

    Subnormals get the spacing of the lowest normal binade by adding `tiny` first: then one truncation serves all.
    fp16 and bf16 overflow to infinity as a cast does, fp8 saturates.
    """
    if fmt.dropped_bits == 0:
        return x
    bits = x.view(np.uint32)
    magnitude = bits & np.uint32(MAGNITUDE)
    lift = _lift(fmt, magnitude)
    if lift is not None:
        magnitude = (magnitude.view(np.float32) + lift).view(np.uint32)
    if addend is None:
        addend = (magnitude >> np.uint32(fmt.dropped_bits)) & np.uint32(1)
        addend += np.uint32((1 << (fmt.dropped_bits - 1)) - 1)
    rounded = _truncate(fmt, magnitude, addend, lift)
    if fmt.dtype == torch.float8_e4m3fn:
        np.minimum(rounded, np.float32(fmt.largest), out=rounded)
    return _finish(x, rounded)


def split(fmt: Format, x: Floats) -> tuple[Floats, NDArray[np.int16]]:
    """(storage value as float32, low plane) of a master; see [Note: split masters]."""
    bits = x.view(np.uint32) & np.uint32(MAGNITUDE)
    lift = _lift(fmt, bits)
    lifted = bits if lift is None else (bits.view(np.float32) + lift).view(np.uint32)
    high = _truncate(fmt, lifted, np.uint32(1 << (fmt.dropped_bits - 1)), lift)
    finite = bits < np.uint32(INFINITY_BITS)
    np.minimum(high, np.float32(fmt.largest), out=high, where=finite | (fmt.dtype == torch.float8_e4m3fn))
    if fmt.dtype == torch.bfloat16:
        low = (bits.view(np.int32) - high.view(np.int32)).astype(np.float32)
    else:
        low = np.rint((bits.view(np.float32) - high) * _residual_scale(fmt, high))
    low[~finite] = 0
    return _finish(x, high), np.clip(low, -32768, 32767).astype(np.int16)


def join(fmt: Format, high: Floats, low: NDArray[np.int16]) -> Floats:
    """The master that `split` took apart."""
    bits = high.view(np.uint32)
    if fmt.dtype == torch.bfloat16:
        return (bits + low.astype(np.int32).view(np.uint32)).view(np.float32)
    magnitude = np.abs(high)
    magnitude += low.astype(np.float32) / _residual_scale(fmt, magnitude)  # a power of two: exact
    return _finish(high, magnitude)


def load(storage: torch.Tensor) -> Floats:
    """Stored elements as float32 (fp8: before their scale). Always a fresh array."""
    if storage.dtype == torch.float8_e4m3fn:
        codes = storage.view(torch.uint8).numpy().astype(np.uint32)
        magnitude = codes & np.uint32(FP8_NAN)
        values = (magnitude << np.uint32(20)).view(np.float32) * np.float32(FP8_SHIFT)
        values[magnitude == FP8_NAN] = np.nan
        values.view(np.uint32)[:] |= (codes & np.uint32(0x80)) << np.uint32(24)
        return values
    return storage.to(torch.float32, copy=True).numpy()


def store_(storage: torch.Tensor, values: Floats) -> None:
    """Write float32 values that are already on the storage's grid."""
    if storage.dtype == torch.bfloat16:
        upper = (values.view(np.uint32) >> np.uint32(16)).astype(np.uint16)
        storage.view(torch.int16).numpy()[:] = upper.view(np.int16)
    elif storage.dtype == torch.float8_e4m3fn:
        bits = values.view(np.uint32)
        code = (np.abs(values) * np.float32(1 / FP8_SHIFT)).view(np.uint32) >> np.uint32(20)
        code[np.isnan(values)] = FP8_NAN
        storage.view(torch.uint8).numpy()[:] = (code | ((bits & np.uint32(SIGN)) >> np.uint32(24))).astype(np.uint8)
    else:
        storage.copy_(torch.from_numpy(values))


def fit_exponents(x: Floats) -> NDArray[np.int8]:
    """The least exponents with which each group's largest finite magnitude is at most 448; see [Note: fp8 scales]."""
    num_groups = -(-len(x) // SEGMENT_ALIGNMENT)
    padded = np.zeros(num_groups * SEGMENT_ALIGNMENT, dtype=np.float32)
    np.abs(x, out=padded[: len(x)])
    padded[~np.isfinite(padded)] = 0
    bits = padded.reshape(num_groups, SEGMENT_ALIGNMENT).view(np.int32).max(axis=1)
    above = (bits & 0x7FFFFF) > FP8_MAX_MANTISSA
    return np.clip((bits >> 23) - 127 - 8 + above, MIN_EXPONENT, MAX_EXPONENT).astype(np.int8)


def scale_by(x: Floats, exponents: NDArray[np.int8], sign: int) -> Floats:
    """x * 2**(sign * exponent of its group), exactly."""
    factors = np.ldexp(np.float32(1), sign * exponents.astype(np.int32)).astype(np.float32)
    return x * np.repeat(factors, SEGMENT_ALIGNMENT)[: len(x)]


def _lift(fmt: Format, magnitude: NDArray[np.uint32]) -> Floats | None:
    if fmt.tiny == 0.0:
        return None
    tiny = np.float32(fmt.tiny)
    return np.where(magnitude < tiny.view(np.uint32), tiny, np.float32(0))


def _truncate(fmt: Format, magnitude: NDArray[np.uint32], addend: Any, lift: Floats | None) -> Floats:
    kept = magnitude + addend
    kept &= np.uint32(0x100000000 - (1 << fmt.dropped_bits))
    values = kept.view(np.float32)
    if lift is not None:
        values -= lift
    if fmt.dtype == torch.float16:
        values[values > np.float32(fmt.largest)] = np.inf
    return values


def _residual_scale(fmt: Format, magnitude: Floats) -> Floats:
    """2**16 / ulp of the format at a magnitude: a power of two put together from its exponent."""
    exponent = np.maximum(magnitude, np.float32(fmt.tiny)).view(np.int32) >> 23
    return ((254 + (23 - fmt.dropped_bits) + 16 - exponent) << 23).astype(np.int32).view(np.float32)


def _finish(x: Floats, magnitude: Floats) -> Floats:
    """Give a magnitude the sign of x, and keep NaN, whose bits a dither may have carried anywhere."""
    bits = magnitude.view(np.uint32)
    bits |= x.view(np.uint32) & np.uint32(SIGN)
    if np.isnan(x).any():
        magnitude[np.isnan(x)] = np.nan
    return magnitude
