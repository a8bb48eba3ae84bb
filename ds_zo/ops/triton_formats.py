# mypy: disable-error-code="no-untyped-def"
"""Triton's side of `formats`: the same roundings in the same integer arithmetic.

A format is known by its count of dropped mantissa bits (0 float32, 13 float16, 16 bfloat16, 20 float8_e4m3fn). bfloat16
and fp8 travel as int16 and uint8, so that one code serves GPUs with and without fp8 instructions, and the interpreter.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ds_zo.ops import formats as _formats

FP16, BF16, FP8 = tl.constexpr(13), tl.constexpr(16), tl.constexpr(20)

_NAN_BITS = tl.constexpr(0x7FC00000)
_INFINITY_BITS = tl.constexpr(_formats.INFINITY_BITS)
_MIN_EXPONENT, _MAX_EXPONENT = tl.constexpr(_formats.MIN_EXPONENT), tl.constexpr(_formats.MAX_EXPONENT)
_FP8_SHIFT = tl.constexpr(_formats.FP8_SHIFT)
_FP8_UNSHIFT = tl.constexpr(1.0 / _formats.FP8_SHIFT)
_FP8_MAX_MANTISSA = tl.constexpr(_formats.FP8_MAX_MANTISSA)
_LARGEST_BF16_BITS = tl.constexpr(0x7F7F0000)
_LARGEST_FP16 = tl.constexpr(65504.0)
_LARGEST_FP8 = tl.constexpr(448.0)
_TINY_FP16, _TINY_FP8 = tl.constexpr(2.0**-14), tl.constexpr(2.0**-6)


@triton.jit
def float_bits(x):
    return x.to(tl.uint32, bitcast=True)


@triton.jit
def bits_float(bits):
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def load_values(ptr, index, mask, DROPPED: tl.constexpr):
    """Stored elements as float32 (fp8: before their scale)."""
    raw = tl.load(ptr + index, mask=mask, other=0)
    if DROPPED == BF16:
        x = (raw.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    elif DROPPED == FP8:
        code = raw.to(tl.uint32)
        x = bits_float((code & 0x7F) << 20) * _FP8_SHIFT
        x = tl.where((code & 0x7F) == 0x7F, bits_float(code * 0 + _NAN_BITS), x)
        x = bits_float(float_bits(x) | ((code & 0x80) << 24))
    else:
        x = raw.to(tl.float32)
    return x


@triton.jit
def store_values(ptr, index, mask, x, DROPPED: tl.constexpr):
    """Write float32 values that are already on the format's grid."""
    bits = float_bits(x)
    if DROPPED == BF16:
        tl.store(ptr + index, (bits >> 16).to(tl.int16), mask=mask)
    elif DROPPED == FP8:
        code = float_bits(bits_float(bits & 0x7FFFFFFF) * _FP8_UNSHIFT) >> 20
        code = tl.where(x == x, code, 0x7F)
        tl.store(ptr + index, (code | ((bits & 0x80000000) >> 24)).to(tl.uint8), mask=mask)
    elif DROPPED == FP16:
        tl.store(ptr + index, x.to(tl.float16), mask=mask)
    else:
        tl.store(ptr + index, x, mask=mask)


@triton.jit
def dither_addend(dither, NUM_BITS: tl.constexpr, DROPPED: tl.constexpr):
    if NUM_BITS >= DROPPED:
        addend = dither >> (NUM_BITS - DROPPED)
    else:
        addend = ((dither << 1) | 1) << (DROPPED - NUM_BITS - 1)
    return addend


@triton.jit
def nearest_addend(x, DROPPED: tl.constexpr):
    """What makes truncation round to nearest even."""
    bits = float_bits(x)
    if DROPPED != BF16:
        magnitude = bits & 0x7FFFFFFF
        bits = float_bits(bits_float(magnitude) + _lift(magnitude, DROPPED))
    return ((bits >> DROPPED) & 1) + ((1 << (DROPPED - 1)) - 1)


@triton.jit
def round_to(x, addend, DROPPED: tl.constexpr):
    bits = float_bits(x)
    if DROPPED == BF16:
        # No subnormals of its own, so the sign may stay where it is.
        rounded = (bits + addend) & 0xFFFF0000
    else:
        rounded = float_bits(_truncate(bits & 0x7FFFFFFF, addend, DROPPED))
        if DROPPED == FP8:
            rounded = float_bits(tl.minimum(bits_float(rounded), _LARGEST_FP8))
        rounded = rounded | (bits & 0x80000000)
    return tl.where(x == x, bits_float(rounded), bits_float(bits * 0 + _NAN_BITS))


@triton.jit
def split(x, DROPPED: tl.constexpr):
    """(storage value as float32, low plane as int32); see [Note: split masters]."""
    bits = float_bits(x)
    magnitude = bits & 0x7FFFFFFF
    finite = magnitude < _INFINITY_BITS
    half = magnitude * 0 + (1 << (DROPPED - 1))
    if DROPPED == BF16:
        high = (magnitude + half) & 0xFFFF0000
        high = tl.where(finite, tl.minimum(high, _LARGEST_BF16_BITS), high)
        low = magnitude.to(tl.int32) - high.to(tl.int32)
    else:
        value = _truncate(magnitude, half, DROPPED)
        if DROPPED == FP8:
            value = tl.minimum(value, _LARGEST_FP8)
        else:
            value = tl.where(finite, tl.minimum(value, _LARGEST_FP16), value)
        high = float_bits(value)
        residual = (bits_float(magnitude) - value) * _residual_scale(value, DROPPED)
        low = _round_to_int(tl.where(finite, residual, 0.0))
    low = tl.where(finite, tl.minimum(low, 32767), 0)
    value = tl.where(x == x, bits_float(high | (bits & 0x80000000)), bits_float(bits * 0 + _NAN_BITS))
    return value, low


@triton.jit
def join(high, low, DROPPED: tl.constexpr):
    """The master that `split` took apart."""
    bits = float_bits(high)
    if DROPPED == BF16:
        joined = (bits.to(tl.int32, bitcast=True) + low.to(tl.int32)).to(tl.float32, bitcast=True)
    else:
        magnitude = bits_float(bits & 0x7FFFFFFF)
        joined = magnitude + low.to(tl.float32) * _residual_step(magnitude, DROPPED)
        joined = bits_float(float_bits(joined) | (bits & 0x80000000))
    return joined


@triton.jit
def fit_exponents(largest):
    """Exponents for groups whose largest finite magnitudes are given."""
    bits = largest.to(tl.int32, bitcast=True)
    exponent = (bits >> 23) - 135 + ((bits & 0x7FFFFF) > _FP8_MAX_MANTISSA).to(tl.int32)
    return tl.minimum(tl.maximum(exponent, _MIN_EXPONENT), _MAX_EXPONENT)


@triton.jit
def power_of_two(exponent):
    return ((exponent + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _tiny(DROPPED: tl.constexpr):
    return _TINY_FP8 if DROPPED == FP8 else _TINY_FP16


@triton.jit
def _lift(magnitude, DROPPED: tl.constexpr):
    return tl.where(bits_float(magnitude) < _tiny(DROPPED), _tiny(DROPPED), 0.0)


@triton.jit
def _truncate(magnitude, addend, DROPPED: tl.constexpr):
    lift = _lift(magnitude, DROPPED)
    kept = (float_bits(bits_float(magnitude) + lift) + addend) & (0x100000000 - (1 << DROPPED))
    value = bits_float(kept) - lift
    if DROPPED == FP16:
        value = tl.where(value > _LARGEST_FP16, bits_float(magnitude * 0 + _INFINITY_BITS), value)
    return value


@triton.jit
def _residual_scale(magnitude, DROPPED: tl.constexpr):
    exponent = tl.maximum(magnitude, _tiny(DROPPED)).to(tl.int32, bitcast=True) >> 23
    return ((254 + (23 - DROPPED) + 16 - exponent) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _residual_step(magnitude, DROPPED: tl.constexpr):
    exponent = tl.maximum(magnitude, _tiny(DROPPED)).to(tl.int32, bitcast=True) >> 23
    return ((exponent - (23 - DROPPED) - 16) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _round_to_int(x):
    """To nearest even, by the addend that leaves no fraction bits: |x| <= 2**16 here."""
    magic: tl.constexpr = 12582912.0
    return ((x + magic) - magic).to(tl.int32)
