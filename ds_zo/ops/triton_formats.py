# mypy: disable-error-code="no-untyped-def"
"""The roundings of `formats` as Triton functions, in the same integer arithmetic.

A format's id is its number of dropped mantissa bits: 0 float32, 13 float16, 16 bfloat16, 20 float8_e4m3fn. bf12 drops
as many bits as bfloat16; its id is 32 more. So the formats with ids >= FP8 are the scaled ones. Kernels get bfloat16
and fp8 tensors as int16 and uint8. The same code thus runs on GPUs with and without fp8 instructions, and in the
interpreter.

[Note: patterns]
A scaled format's exponent has 4 bits. The pattern of a value has its sign, exponent and mantissa at the bit positions
that float32 has for them. Read as a float32, the pattern is 2**-120 times the value under the group's scale, and the
format's subnormals are float32's subnormals. So rounding is an integer addition and a mask, for subnormals too. The
results equal those of `formats`, which adds `tiny` to subnormals instead.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ds_zo.ops import formats as _formats

FP16, BF16, FP8, BF12 = tl.constexpr(13), tl.constexpr(16), tl.constexpr(20), tl.constexpr(32 + 16)

_NAN_BITS = tl.constexpr(0x7FC00000)
_INFINITY_BITS = tl.constexpr(_formats.INFINITY_BITS)
_MIN_EXPONENT, _MAX_EXPONENT = tl.constexpr(_formats.MIN_EXPONENT), tl.constexpr(_formats.MAX_EXPONENT)
_BIAS_SHIFT = tl.constexpr(_formats.BIAS_SHIFT)
_BIAS_UNSHIFT = tl.constexpr(1.0 / _formats.BIAS_SHIFT)
_BIASED_TOP = tl.constexpr(127 + _formats.TOP_EXPONENT)
_MAX_MANTISSA_FP8, _MAX_MANTISSA_BF12 = tl.constexpr(0x600000), tl.constexpr(0x7E0000)
_LARGEST_BF16_BITS = tl.constexpr(0x7F7F0000)
_LARGEST_FP16 = tl.constexpr(65504.0)
_LARGEST_FP8 = tl.constexpr(448.0)
_NAN_VALUE_FP8, _NAN_VALUE_BF12 = tl.constexpr(480.0), tl.constexpr(510.0)
"""The values that the top code would have if it were not NaN."""
_TINY_FP16, _TINY_FP8 = tl.constexpr(2.0**-14), tl.constexpr(2.0**-6)
_GROUP_WORDS = tl.constexpr(33)


def format_id(fmt: _formats.Format) -> int:
    return fmt.dropped_bits + (32 if fmt.has_lanes else 0)


@triton.jit
def float_bits(x):
    return x.to(tl.uint32, bitcast=True)


@triton.jit
def bits_float(bits):
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def load_values(ptr, index, mask, FORMAT: tl.constexpr):
    """Stored elements as float32. fp8: not multiplied by their group's scale."""
    raw = tl.load(ptr + index, mask=mask, other=0)
    if FORMAT == BF16:
        x = (raw.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    elif FORMAT == FP8:
        # Sign extension puts copies of the sign above the magnitude, so one shift moves both to float32's positions.
        code = raw.to(tl.int8, bitcast=True).to(tl.int32).to(tl.uint32, bitcast=True)
        x = unbias((code << 20) & 0x87F00000, FORMAT)
    else:
        x = raw.to(tl.float32)
    return x


@triton.jit
def store_values(ptr, index, mask, x, FORMAT: tl.constexpr):
    """Write float32 values that are already on the format's grid."""
    if FORMAT == BF16:
        tl.store(ptr + index, (float_bits(x) >> 16).to(tl.int16), mask=mask)
    elif FORMAT == FP16:
        tl.store(ptr + index, x.to(tl.float16), mask=mask)
    else:
        tl.store(ptr + index, x, mask=mask)


@triton.jit
def load_lanes(ptr, words_ptr, index, mask, lane, lane_mask):
    """Loads bf12 elements as patterns. The words of their lanes follow their groups' exponents in the plane of
    scales."""
    code = tl.load(ptr + index, mask=mask, other=0).to(tl.uint32)
    word = tl.load(words_ptr + _lane_word(lane), mask=lane_mask, other=0).to(tl.uint32, bitcast=True)
    exponent = (word[:, None] >> _nibble_shifts()) & 15
    return ((code * 0x01010000) & 0x807F0000) | (exponent << 23)


@triton.jit
def store_lanes(ptr, words_ptr, index, mask, lane, group_mask, pattern):
    """Stores bf12 patterns. Words of whole groups are written, with zeros for masked elements."""
    tl.store(ptr + index, _code(pattern, BF12), mask=mask)
    exponent = (pattern >> 23) & 15
    word = tl.sum(tl.where(mask, exponent, 0) << _nibble_shifts(), axis=1)
    tl.store(words_ptr + _lane_word(lane), word.to(tl.int32, bitcast=True), mask=group_mask)


@triton.jit
def store_codes(ptr, index, mask, pattern, FORMAT: tl.constexpr):
    tl.store(ptr + index, _code(pattern, FORMAT), mask=mask)


@triton.jit
def _code(pattern, FORMAT: tl.constexpr):
    """The byte of a pattern's sign and lowest 7 code bits."""
    return (((pattern >> (FORMAT % 32)) & 0x7F) | ((pattern >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def _lane_word(lane):
    """Index of a lane's word, relative to the first word of the group that has lane 0."""
    return lane + lane // 32 + 1


@triton.jit
def group_word(group, FORMAT: tl.constexpr):
    """Index of a group's exponent in the plane of scales."""
    return group * _GROUP_WORDS if FORMAT == BF12 else group


@triton.jit
def _nibble_shifts():
    return (tl.arange(0, 8) * 4).to(tl.uint32)[None, :]


@triton.jit
def bias(x):
    """The pattern of a magnitude under its group's scale, unrounded; see [Note: patterns]."""
    return float_bits(tl.abs(x) * _BIAS_UNSHIFT)


@triton.jit
def unbias(pattern, FORMAT: tl.constexpr):
    x = bits_float(pattern) * _BIAS_SHIFT
    nan = bits_float(pattern * 0 + _NAN_BITS)
    return tl.where(tl.abs(x) == (_NAN_VALUE_BF12 if FORMAT == BF12 else _NAN_VALUE_FP8), nan, x)


@triton.jit
def round_pattern(x, biased, addend, FORMAT: tl.constexpr):
    """The stored pattern of x, given its magnitude's pattern: rounded, saturated, with the sign of x."""
    top: tl.constexpr = (1 << 27) - (1 << (FORMAT % 32)) - 1
    rounded = tl.minimum(biased + addend, top) & (0x100000000 - (1 << (FORMAT % 32)))
    rounded = tl.where(x == x, rounded, top + 1)
    return rounded | (float_bits(x) & 0x80000000)


@triton.jit
def split_pattern(x, FORMAT: tl.constexpr):
    """(pattern, low plane as int32) of a bf12 master. Their sum is the master's pattern; see [Note: split masters]."""
    biased = bias(x)
    pattern = round_pattern(x, biased, biased * 0 + 0x8000, FORMAT)
    low = tl.minimum(biased.to(tl.int32) - (pattern & 0x7FFFFFFF).to(tl.int32), 32767)
    return pattern, tl.where(biased < _INFINITY_BITS, low, 0)


@triton.jit
def dither_addend(dither, NUM_BITS: tl.constexpr, FORMAT: tl.constexpr):
    DROPPED: tl.constexpr = FORMAT % 32
    if NUM_BITS >= DROPPED:
        addend = dither >> (NUM_BITS - DROPPED)
    else:
        addend = ((dither << 1) | 1) << (DROPPED - NUM_BITS - 1)
    return addend


@triton.jit
def nearest_addend(x, FORMAT: tl.constexpr):
    """The addend with which truncation rounds to nearest even."""
    DROPPED: tl.constexpr = FORMAT % 32
    if FORMAT == BF16:
        bits = float_bits(x)
    elif FORMAT >= FP8:
        bits = bias(x)
    else:
        magnitude = float_bits(x) & 0x7FFFFFFF
        bits = float_bits(bits_float(magnitude) + _lift(magnitude, FORMAT))
    return ((bits >> DROPPED) & 1) + ((1 << (DROPPED - 1)) - 1)


@triton.jit
def round_to(x, addend, FORMAT: tl.constexpr):
    bits = float_bits(x)
    if FORMAT == BF16:
        # bfloat16 has float32's subnormals, so the sign bit need not be removed.
        rounded = (bits + addend) & 0xFFFF0000
    else:
        rounded = float_bits(_truncate(bits & 0x7FFFFFFF, addend, FORMAT)) | (bits & 0x80000000)
    return tl.where(x == x, bits_float(rounded), bits_float(bits * 0 + _NAN_BITS))


@triton.jit
def round_sum(x, addend, number, FORMAT: tl.constexpr):
    """`round_to` for the result of a fused multiply-add, of which a store takes only the upper half (bfloat16). NaNs of
    such results are quiet: their upper half alone makes them NaN. So a NaN is only left unchanged. `number` (x is not
    NaN) is computed once for both signs of the perturbation."""
    if FORMAT == BF16:
        rounded = bits_float(float_bits(x) + tl.where(number, addend, 0))
    else:
        rounded = round_to(x, addend, FORMAT)
    return rounded


@triton.jit
def split(x, FORMAT: tl.constexpr):
    """(storage value as float32, low plane as int32); see [Note: split masters]."""
    bits = float_bits(x)
    magnitude = bits & 0x7FFFFFFF
    finite = magnitude < _INFINITY_BITS
    half = magnitude * 0 + (1 << (FORMAT - 1))
    if FORMAT == BF16:
        high = (magnitude + half) & 0xFFFF0000
        high = tl.where(finite, tl.minimum(high, _LARGEST_BF16_BITS), high)
        low = magnitude.to(tl.int32) - high.to(tl.int32)
    else:
        value = _truncate(magnitude, half, FORMAT)
        if FORMAT == FP8:
            value = tl.minimum(value, _LARGEST_FP8)
        else:
            value = tl.where(finite, tl.minimum(value, _LARGEST_FP16), value)
        high = float_bits(value)
        residual = (bits_float(magnitude) - value) * _residual_scale(value, FORMAT)
        low = _round_to_int(tl.where(finite, residual, 0.0))
    low = tl.where(finite, tl.minimum(low, 32767), 0)
    value = tl.where(x == x, bits_float(high | (bits & 0x80000000)), bits_float(bits * 0 + _NAN_BITS))
    return value, low


@triton.jit
def join(high, low, FORMAT: tl.constexpr):
    """The float32 master of a storage value and its low plane: the inverse of `split`."""
    bits = float_bits(high)
    if FORMAT == BF16:
        joined = (bits.to(tl.int32, bitcast=True) + low.to(tl.int32)).to(tl.float32, bitcast=True)
    else:
        magnitude = bits_float(bits & 0x7FFFFFFF)
        joined = magnitude + low.to(tl.float32) * _residual_step(magnitude, FORMAT)
        joined = bits_float(float_bits(joined) | (bits & 0x80000000))
    return joined


@triton.jit
def fit_exponents(largest, FORMAT: tl.constexpr):
    """Exponents of groups, given each group's largest finite magnitude."""
    bits = largest.to(tl.int32, bitcast=True)
    most = _MAX_MANTISSA_BF12 if FORMAT == BF12 else _MAX_MANTISSA_FP8
    exponent = (bits >> 23) - _BIASED_TOP + ((bits & 0x7FFFFF) > most).to(tl.int32)
    return tl.minimum(tl.maximum(exponent, _MIN_EXPONENT), _MAX_EXPONENT)


@triton.jit
def power_of_two(exponent):
    return ((exponent + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _tiny(FORMAT: tl.constexpr):
    return _TINY_FP16 if FORMAT == FP16 else _TINY_FP8


@triton.jit
def _lift(magnitude, FORMAT: tl.constexpr):
    return tl.where(bits_float(magnitude) < _tiny(FORMAT), _tiny(FORMAT), 0.0)


@triton.jit
def _truncate(magnitude, addend, FORMAT: tl.constexpr):
    lift = _lift(magnitude, FORMAT)
    kept = (float_bits(bits_float(magnitude) + lift) + addend) & (0x100000000 - (1 << FORMAT))
    value = bits_float(kept) - lift
    if FORMAT == FP16:
        value = tl.where(value > _LARGEST_FP16, bits_float(magnitude * 0 + _INFINITY_BITS), value)
    return value


@triton.jit
def _residual_scale(magnitude, FORMAT: tl.constexpr):
    exponent = tl.maximum(magnitude, _tiny(FORMAT)).to(tl.int32, bitcast=True) >> 23
    return ((254 + (23 - FORMAT) + 16 - exponent) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _residual_step(magnitude, FORMAT: tl.constexpr):
    exponent = tl.maximum(magnitude, _tiny(FORMAT)).to(tl.int32, bitcast=True) >> 23
    return ((exponent - (23 - FORMAT) - 16) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _round_to_int(x):
    """Rounds to nearest even by adding and subtracting a number at which float32 has no fraction bits. Needs
    |x| <= 2**16."""
    magic: tl.constexpr = 12582912.0
    return ((x + magic) - magic).to(tl.int32)
