# mypy: disable-error-code="no-untyped-def"
"""Triton's side of `formats`: the same roundings in the same integer arithmetic.

A format is known by its count of dropped mantissa bits (0 float32, 13 float16, 16 bfloat16, 20 float8_e4m3fn); bf12,
which drops as many as bfloat16, by 32 more. So formats from FP8 on are the scaled ones. bfloat16 and fp8 travel as
int16 and uint8, so that one code serves GPUs with and without fp8 instructions, and the interpreter.
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
_LARGEST_FP8, _LARGEST_BF12 = tl.constexpr(448.0), tl.constexpr(508.0)
_TINY_FP16, _TINY_SCALED = tl.constexpr(2.0**-14), tl.constexpr(2.0**-6)
_TINY_SCALED_BITS = tl.constexpr((127 - 6) << 23)
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
    """Stored elements as float32 (fp8: before their scale)."""
    raw = tl.load(ptr + index, mask=mask, other=0)
    if FORMAT == BF16:
        x = (raw.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    elif FORMAT == FP8:
        code = raw.to(tl.uint32)
        x = _unbias((code & 0x7F) << 20, code, 0x7F << 20)
    else:
        x = raw.to(tl.float32)
    return x


@triton.jit
def load_lanes(ptr, words_ptr, index, mask, lane, lane_mask):
    """`load_values` for bf12, the words of whose lanes stand behind their groups' exponents."""
    code = tl.load(ptr + index, mask=mask, other=0).to(tl.uint32)
    word = tl.load(words_ptr + lane_word(lane), mask=lane_mask, other=0).to(tl.uint32, bitcast=True)
    exponent = (word[:, None] >> _nibble_shifts()) & 15
    return _unbias((exponent << 23) | ((code & 0x7F) << 16), code, 0x7FF << 16)


@triton.jit
def store_lanes(ptr, words_ptr, index, mask, lane, group_mask, x):
    """`store_values` for bf12. Words of whole groups are written, with zeros for what is masked."""
    bits = float_bits(x)
    code = float_bits(bits_float(bits & 0x7FFFFFFF) * _BIAS_UNSHIFT) >> 16
    code = tl.where(x == x, code, 0x7FF)
    tl.store(ptr + index, ((code & 0x7F) | ((bits & 0x80000000) >> 24)).to(tl.uint8), mask=mask)
    word = tl.sum(tl.where(mask, code >> 7, 0) << _nibble_shifts(), axis=1)
    tl.store(words_ptr + lane_word(lane), word.to(tl.int32, bitcast=True), mask=group_mask)


@triton.jit
def lane_word(lane):
    """Of a lane, from the first word of the group at which lanes are counted from 0."""
    return lane + lane // 32 + 1


@triton.jit
def group_word(group, FORMAT: tl.constexpr):
    """The element of the plane of scales that has a group's exponent."""
    return group * _GROUP_WORDS if FORMAT == BF12 else group


@triton.jit
def _nibble_shifts():
    return (tl.arange(0, 8) * 4).to(tl.uint32)[None, :]


@triton.jit
def _unbias(magnitude, code, NAN: tl.constexpr):
    """The float32 of a bit pattern with 4 exponent bits, and the sign that is the code's eighth bit."""
    x = bits_float(magnitude) * _BIAS_SHIFT
    x = tl.where(magnitude == NAN, bits_float(magnitude * 0 + _NAN_BITS), x)
    return bits_float(float_bits(x) | ((code & 0x80) << 24))


@triton.jit
def store_values(ptr, index, mask, x, FORMAT: tl.constexpr):
    """Write float32 values that are already on the format's grid."""
    bits = float_bits(x)
    if FORMAT == BF16:
        tl.store(ptr + index, (bits >> 16).to(tl.int16), mask=mask)
    elif FORMAT == FP8:
        code = float_bits(bits_float(bits & 0x7FFFFFFF) * _BIAS_UNSHIFT) >> 20
        code = tl.where(x == x, code, 0x7F)
        tl.store(ptr + index, (code | ((bits & 0x80000000) >> 24)).to(tl.uint8), mask=mask)
    elif FORMAT == FP16:
        tl.store(ptr + index, x.to(tl.float16), mask=mask)
    else:
        tl.store(ptr + index, x, mask=mask)


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
    """What makes truncation round to nearest even."""
    DROPPED: tl.constexpr = FORMAT % 32
    bits = float_bits(x)
    if FORMAT != BF16:
        magnitude = bits & 0x7FFFFFFF
        bits = float_bits(bits_float(magnitude) + _lift(magnitude, FORMAT))
    return ((bits >> DROPPED) & 1) + ((1 << (DROPPED - 1)) - 1)


@triton.jit
def round_to(x, addend, FORMAT: tl.constexpr):
    bits = float_bits(x)
    if FORMAT == BF16:
        # No subnormals of its own, so the sign may stay where it is.
        rounded = (bits + addend) & 0xFFFF0000
    else:
        rounded = float_bits(_truncate(bits & 0x7FFFFFFF, addend, FORMAT))
        if FORMAT >= FP8:
            rounded = float_bits(tl.minimum(bits_float(rounded), _largest(FORMAT)))
        rounded = rounded | (bits & 0x80000000)
    return tl.where(x == x, bits_float(rounded), bits_float(bits * 0 + _NAN_BITS))


@triton.jit
def split(x, FORMAT: tl.constexpr):
    """(storage value as float32, low plane as int32); see [Note: split masters]."""
    bits = float_bits(x)
    magnitude = bits & 0x7FFFFFFF
    finite = magnitude < _INFINITY_BITS
    half = magnitude * 0 + (1 << (FORMAT % 32 - 1))
    if FORMAT == BF16:
        high = (magnitude + half) & 0xFFFF0000
        high = tl.where(finite, tl.minimum(high, _LARGEST_BF16_BITS), high)
        low = magnitude.to(tl.int32) - high.to(tl.int32)
    elif FORMAT == BF12:
        lift = _lift(magnitude, FORMAT)
        value = tl.minimum(_truncate(magnitude, half, FORMAT), _largest(FORMAT))
        high = float_bits(value)
        low = float_bits(bits_float(magnitude) + lift).to(tl.int32) - float_bits(value + lift).to(tl.int32)
    else:
        value = _truncate(magnitude, half, FORMAT)
        if FORMAT == FP8:
            value = tl.minimum(value, _largest(FORMAT))
        else:
            value = tl.where(finite, tl.minimum(value, _largest(FORMAT)), value)
        high = float_bits(value)
        residual = (bits_float(magnitude) - value) * _residual_scale(value, FORMAT)
        low = _round_to_int(tl.where(finite, residual, 0.0))
    low = tl.where(finite, tl.minimum(low, 32767), 0)
    value = tl.where(x == x, bits_float(high | (bits & 0x80000000)), bits_float(bits * 0 + _NAN_BITS))
    return value, low


@triton.jit
def join(high, low, FORMAT: tl.constexpr):
    """The master that `split` took apart."""
    bits = float_bits(high)
    if FORMAT == BF16:
        joined = (bits.to(tl.int32, bitcast=True) + low.to(tl.int32)).to(tl.float32, bitcast=True)
    elif FORMAT == BF12:
        # A master below the smallest normal was lifted, though its storage may have been rounded up to that normal.
        magnitude = (bits & 0x7FFFFFFF).to(tl.int32) + low.to(tl.int32)
        lifted = float_bits(bits_float(bits & 0x7FFFFFFF) + _TINY_SCALED).to(tl.int32) + low.to(tl.int32)
        small = lifted.to(tl.float32, bitcast=True) - _TINY_SCALED
        joined = tl.where(magnitude < _TINY_SCALED_BITS, small, magnitude.to(tl.float32, bitcast=True))
        joined = bits_float(float_bits(joined) | (bits & 0x80000000))
    else:
        magnitude = bits_float(bits & 0x7FFFFFFF)
        joined = magnitude + low.to(tl.float32) * _residual_step(magnitude, FORMAT)
        joined = bits_float(float_bits(joined) | (bits & 0x80000000))
    return joined


@triton.jit
def fit_exponents(largest, FORMAT: tl.constexpr):
    """Exponents for groups whose largest finite magnitudes are given."""
    bits = largest.to(tl.int32, bitcast=True)
    most = _MAX_MANTISSA_BF12 if FORMAT == BF12 else _MAX_MANTISSA_FP8
    exponent = (bits >> 23) - _BIASED_TOP + ((bits & 0x7FFFFF) > most).to(tl.int32)
    return tl.minimum(tl.maximum(exponent, _MIN_EXPONENT), _MAX_EXPONENT)


@triton.jit
def power_of_two(exponent):
    return ((exponent + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _tiny(FORMAT: tl.constexpr):
    return _TINY_FP16 if FORMAT == FP16 else _TINY_SCALED


@triton.jit
def _largest(FORMAT: tl.constexpr):
    return _LARGEST_BF12 if FORMAT == BF12 else (_LARGEST_FP8 if FORMAT == FP8 else _LARGEST_FP16)


@triton.jit
def _lift(magnitude, FORMAT: tl.constexpr):
    return tl.where(bits_float(magnitude) < _tiny(FORMAT), _tiny(FORMAT), 0.0)


@triton.jit
def _truncate(magnitude, addend, FORMAT: tl.constexpr):
    lift = _lift(magnitude, FORMAT)
    kept = (float_bits(bits_float(magnitude) + lift) + addend) & (0x100000000 - (1 << (FORMAT % 32)))
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
    """To nearest even, by the addend that leaves no fraction bits: |x| <= 2**16 here."""
    magic: tl.constexpr = 12582912.0
    return ((x + magic) - magic).to(tl.int32)
