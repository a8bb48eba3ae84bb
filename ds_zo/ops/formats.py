"""Storage formats of parameters and their rounding, in numpy float32 and integer arithmetic.

[Note: split masters]
With a second plane of int16, the low plane, the pair (storage, low) holds the float32 master weight. Both are in sign
and magnitude: |x| = |storage| + low * ulp(storage) / 2**16. Storage is |x| rounded half up, so low always fits.
    bfloat16       exact: low is the lower half of the bits (a magnitude above the largest bfloat16 saturates)
    float16        exact where storage is normal (27 bits); spacing 2**-40 below 2**-14
    float8_e4m3fn  20 bits: relative error below 2**-19 where normal; spacing 2**-25 of the group's scale below
    bf12           exact where storage is normal: low is the lower half of the bits; spacing 2**-29 of the scale below
NaN and infinity are in the storage, with low = 0. fp8 and bf12 have no infinity: they saturate.

[Note: group scales]
value = stored * 2**exponent, with one exponent for each group of 256 elements of the flat tensor. A plane of scales
beside the storage holds the exponents. A group's exponent puts the group's largest magnitude into the top binade of the
format. It grows when a stored value would overflow, and never shrinks: values that did not change keep their bits, and
folds cannot make a scale oscillate. A group of zeros has the smallest exponent, so that its first update sets it.

[Note: bf12] Twelve bits: a sign, 4 bits of exponent (bias 7) and 7 bits of mantissa, as many as bfloat16 has, under the
group's exponent. So bf12 holds every bfloat16 within 13 binades of its group's largest value exactly, and smaller
values to 2**-22 of that largest value. The storage has one byte for each element, sign and mantissa; its dtype is
torch.uint8. The 4 exponent bits are in the plane of scales, which has 33 int32 for each group. The first is the group's
exponent. The others are one word for each lane of 8 elements, the first element in the lowest bits. Whole words and
whole groups are written: beyond a parameter's end they hold zeros. The top code is NaN.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ds_zo.ops.segments import LANE_NUMEL, SEGMENT_ALIGNMENT

Floats = NDArray[np.float32]

SIGN = 0x80000000
MAGNITUDE = 0x7FFFFFFF
INFINITY_BITS = 0x7F800000
MIN_EXPONENT, MAX_EXPONENT = -100, 100
BIAS_SHIFT = 2.0**120
"""Factor for a bit pattern with 4 exponent bits in a float32's upper bits. It changes float32's exponent bias to the
format's own."""
TOP_EXPONENT = 8
"""Exponent of the largest magnitude under a group's scale, in both scaled formats."""
LANE_SHIFTS = np.arange(LANE_NUMEL, dtype=np.uint32) * np.uint32(4)
"""Bit positions, in a lane's word, of the exponents of its elements."""


@dataclass(frozen=True)
class Format:
    """A storage format. The fields from `dropped_bits` to `largest` say how it truncates float32; no code reads
    them of the formats in `frozen.PACKED`."""

    name: str
    dtype: torch.dtype
    dropped_bits: int = 0
    """Number of float32's mantissa bits that the format drops."""
    tiny: float = 0.0
    """Smallest normal magnitude, below which the spacing is constant; 0 if the format has float32's exponent range."""
    largest: float = math.inf
    scale_dtype: torch.dtype | None = None
    """Dtype of the plane of scales; None if the format has none. See [Note: group scales]."""
    scale_numel: int = 0
    """Elements of the plane of scales for one group. In `FORMATS` the first is the group's exponent."""
    group_numel: int = SEGMENT_ALIGNMENT
    """Elements that share a scale."""
    packed_numel: int = 1
    """Elements in one item of the storage's dtype."""

    @property
    def scaled(self) -> bool:
        return self.scale_dtype is not None

    @property
    def has_lanes(self) -> bool:
        """Whether the plane of scales also holds bits of each element; see [Note: bf12]."""
        return self.scale_numel > 1

    def num_scales(self, numel: int) -> int:
        """Elements of the plane of scales for `numel` values."""
        return -(-numel // self.group_numel) * self.scale_numel

    def scales_of(self, start: int, stop: int) -> slice:
        """The slice of the plane of scales for elements [start, stop); `start` must be a group's first element."""
        return slice(self.num_scales(start), self.num_scales(stop))


FORMATS: dict[torch.dtype, Format] = {
    f.dtype: f
    for f in (
        Format("float32", torch.float32, 0, 0.0, float(np.finfo(np.float32).max)),
        Format("bfloat16", torch.bfloat16, 16, 0.0, float(np.uint32(0x7F7F0000).view(np.float32))),
        Format("float16", torch.float16, 13, 2.0**-14, 65504.0),
        Format("float8_e4m3fn", torch.float8_e4m3fn, 20, 2.0**-6, 448.0, torch.int8, 1),
        Format("bf12", torch.uint8, 16, 2.0**-6, 508.0, torch.int32, 1 + SEGMENT_ALIGNMENT // LANE_NUMEL),
    )
}


def storage_format(dtype: torch.dtype) -> Format:
    try:
        return FORMATS[dtype]
    except KeyError:
        names = ", ".join(f.name for f in FORMATS.values())
        raise ValueError(f"parameters must be stored as one of {names}, got {dtype}: convert them first") from None


def rounding_std(dtype: torch.dtype) -> float:
    """Largest relative standard deviation of one stochastic rounding of a normal value. It is half a step, for a value
    midway between two neighbours at the low end of a binade."""
    dropped = storage_format(dtype).dropped_bits
    return 2.0 ** (dropped - 23) / 2 if dropped else 0.0


def dither_addend(dither: NDArray[np.uint32], *, num_bits: int, dropped_bits: int) -> NDArray[np.uint32]:
    """The number to add to float32 bits before truncation. A dither with fewer bits than are dropped is centred in its
    step, so that rounding is unbiased."""
    if num_bits >= dropped_bits:
        return dither >> np.uint32(num_bits - dropped_bits)
    return (dither << np.uint32(dropped_bits - num_bits)) | np.uint32(1 << (dropped_bits - num_bits - 1))


def round_to(fmt: Format, x: Floats, addend: NDArray[np.uint32] | None = None) -> Floats:
    """x rounded to the format's grid, as float32: stochastically with `addend`, to nearest even without.

    Adding `tiny` first gives subnormals the spacing of the lowest normal binade, so that one truncation rounds all
    values. fp16 and bf16 overflow to infinity as a cast does; scaled formats saturate.
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
    if fmt.scaled:
        np.minimum(rounded, np.float32(fmt.largest), out=rounded)
    return _finish(x, rounded)


def split(fmt: Format, x: Floats) -> tuple[Floats, NDArray[np.int16]]:
    """(storage value as float32, low plane) of a float32 master; see [Note: split masters]."""
    if fmt.has_lanes:
        return _split_pattern(fmt, x)
    bits = x.view(np.uint32) & np.uint32(MAGNITUDE)
    lift = _lift(fmt, bits)
    lifted = bits if lift is None else (bits.view(np.float32) + lift).view(np.uint32)
    high = _truncate(fmt, lifted, np.uint32(1 << (fmt.dropped_bits - 1)), lift)
    finite = bits < np.uint32(INFINITY_BITS)
    np.minimum(high, np.float32(fmt.largest), out=high, where=finite | fmt.scaled)
    if fmt.dtype == torch.bfloat16:
        low = (bits.view(np.int32) - high.view(np.int32)).astype(np.float32)
    else:
        low = np.rint((bits.view(np.float32) - high) * _residual_scale(fmt, high))
    low[~finite] = 0
    return _finish(x, high), np.clip(low, -32768, 32767).astype(np.int16)


def join(fmt: Format, high: Floats, low: NDArray[np.int16]) -> Floats:
    """The float32 master of a storage value and its low plane: the inverse of `split`."""
    if fmt.dtype == torch.bfloat16:
        return (high.view(np.uint32) + low.astype(np.int32).view(np.uint32)).view(np.float32)
    if fmt.has_lanes:
        return _finish(high, (_pattern(high) + low).view(np.float32) * np.float32(BIAS_SHIFT))
    magnitude = np.abs(high)
    magnitude += low.astype(np.float32) / _residual_scale(fmt, magnitude)  # a power of two: exact
    return _finish(high, magnitude)


def _split_pattern(fmt: Format, x: Floats) -> tuple[Floats, NDArray[np.int16]]:
    """`split` for bf12. With the format's exponent bias, float32's subnormals are the format's subnormals, so the low
    plane is the lower half of the bits for all values."""
    pattern = _pattern(x)
    finite = np.isfinite(x)
    kept = np.minimum(np.where(finite, pattern, INFINITY_BITS) + 0x8000, (int(nan_code(fmt)) << 16) - 1)
    kept = (kept & -0x10000).astype(np.int32)
    low = np.where(finite, np.clip(pattern - kept, -32768, 32767), 0)
    return _finish(x, kept.view(np.float32) * np.float32(BIAS_SHIFT)), low.astype(np.int16)


def _pattern(x: Floats) -> NDArray[np.int32]:
    """The float32 bits of |x| with a scaled format's exponent bias."""
    return (np.abs(x) * np.float32(1 / BIAS_SHIFT)).view(np.int32)


def load(storage: torch.Tensor, scales: torch.Tensor | None = None) -> Floats:
    """Stored elements as float32, not multiplied by their group's scale. Always a new array."""
    fmt = storage_format(storage.dtype)
    if not fmt.scaled:
        return storage.to(torch.float32, copy=True).numpy()
    codes = storage.view(torch.uint8).numpy().astype(np.uint32)
    magnitude = codes & np.uint32(0x7F)
    if fmt.has_lanes:
        assert scales is not None
        words = scales.view(-1, fmt.scale_numel)[:, 1:].numpy().view(np.uint32)
        exponents = (words.reshape(-1, 1) >> LANE_SHIFTS) & np.uint32(15)
        magnitude |= exponents.reshape(-1)[: len(codes)] << np.uint32(7)
    values = (magnitude << np.uint32(fmt.dropped_bits)).view(np.float32) * np.float32(BIAS_SHIFT)
    values[magnitude == nan_code(fmt)] = np.nan
    values.view(np.uint32)[:] |= (codes & np.uint32(0x80)) << np.uint32(24)
    return values


def store_(storage: torch.Tensor, values: Floats, scales: torch.Tensor | None = None) -> None:
    """Write float32 values that are already on the storage's grid. For bf12, write the lanes' words to `scales` too."""
    fmt = storage_format(storage.dtype)
    if storage.dtype == torch.bfloat16:
        upper = (values.view(np.uint32) >> np.uint32(16)).astype(np.uint16)
        storage.view(torch.int16).numpy()[:] = upper.view(np.int16)
    elif fmt.scaled:
        sign = (values.view(np.uint32) & np.uint32(SIGN)) >> np.uint32(24)
        code = _pattern(values).view(np.uint32) >> np.uint32(fmt.dropped_bits)
        code[np.isnan(values)] = nan_code(fmt)
        if fmt.has_lanes:
            assert scales is not None
            rows = scales.view(-1, fmt.scale_numel)[:, 1:].numpy()
            exponents = np.zeros(rows.size * LANE_NUMEL, dtype=np.uint32)
            exponents[: len(code)] = code >> np.uint32(7)
            words = np.bitwise_or.reduce(exponents.reshape(-1, LANE_NUMEL) << LANE_SHIFTS, axis=1)
            rows[:] = words.view(np.int32).reshape(rows.shape)
            code &= np.uint32(0x7F)
        storage.view(torch.uint8).numpy()[:] = (code | sign).astype(np.uint8)
    else:
        storage.copy_(torch.from_numpy(values))


def nan_code(fmt: Format) -> np.uint32:
    """The top code of a scaled format, whose exponent has 4 bits."""
    return np.uint32((1 << (27 - fmt.dropped_bits)) - 1)


def exponents_of(fmt: Format, scales: torch.Tensor) -> torch.Tensor:
    """A view of the groups' exponents in a plane of scales."""
    return scales.view(-1, fmt.scale_numel)[:, 0]


def fit_exponents(fmt: Format, x: Floats) -> NDArray[np.int32]:
    """For each group, the smallest exponent with which its largest finite magnitude fits; see [Note: group scales]."""
    num_groups = -(-len(x) // SEGMENT_ALIGNMENT)
    padded = np.zeros(num_groups * SEGMENT_ALIGNMENT, dtype=np.float32)
    np.abs(x, out=padded[: len(x)])
    padded[~np.isfinite(padded)] = 0
    bits = padded.reshape(num_groups, SEGMENT_ALIGNMENT).view(np.int32).max(axis=1)
    above = (bits & 0x7FFFFF) > max_mantissa(fmt)
    return np.clip((bits >> 23) - 127 - TOP_EXPONENT + above, MIN_EXPONENT, MAX_EXPONENT).astype(np.int32)


def max_mantissa(fmt: Format) -> int:
    """Mantissa bits of the format's largest magnitude. A larger mantissa in the top binade needs the next exponent."""
    return int(np.float32(fmt.largest).view(np.int32)) & 0x7FFFFF


def scale_by(x: Floats, exponents: NDArray[Any], sign: int) -> Floats:
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
    """2**16 / ulp of the format at a magnitude, a power of two, computed from the magnitude's exponent bits."""
    exponent = np.maximum(magnitude, np.float32(fmt.tiny)).view(np.int32) >> 23
    return ((254 + (23 - fmt.dropped_bits) + 16 - exponent) << 23).astype(np.int32).view(np.float32)


def _finish(x: Floats, magnitude: Floats) -> Floats:
    """Give a magnitude the sign of x. Restore NaN, whose bits a dither may have changed."""
    bits = magnitude.view(np.uint32)
    bits |= x.view(np.uint32) & np.uint32(SIGN)
    if np.isnan(x).any():
        magnitude[np.isnan(x)] = np.nan
    return magnitude
