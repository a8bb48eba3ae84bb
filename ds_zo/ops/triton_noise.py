# mypy: disable-error-code="no-untyped-def"
"""The draws of `rng` as Triton functions: the same words, noise and dithers; see [Note: one definition of the noise].

Fused multiply-adds are explicit (`tl.fma`). Every specialisation of the kernel thus fuses the same operations, and a
replay of k entries gives the bits of k replays.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ds_zo.ops import philox as _philox
from ds_zo.ops import rng as _rng

_M0, _M1 = (tl.constexpr(m) for m in _philox.MULTIPLIERS)
_W0, _W1 = (tl.constexpr(w) for w in _philox.KEY_STEPS)
_NUM_ROUNDS = tl.constexpr(_philox.NUM_ROUNDS)
_NOISE, _FOLD = tl.constexpr(_rng.NOISE), tl.constexpr(_rng.FOLD)
NUM_PURPOSES = tl.constexpr(_rng.NUM_PURPOSES)
_ONE_BITS = tl.constexpr(_rng.ONE_BITS)
_SQRT_HALF_BITS = tl.constexpr(_rng.SQRT_HALF_BITS)
_EXPONENT_FIELD = tl.constexpr(_rng.EXPONENT_FIELD)
_ONE_LESS_HALF_STEP = tl.constexpr(_rng.ONE_LESS_HALF_STEP)
_THREE_HALVES_LESS_HALF_STEP = tl.constexpr(_rng.THREE_HALVES_LESS_HALF_STEP)
_DITHER_MULTIPLIER = tl.constexpr(_rng.DITHER_MULTIPLIER)
_MINUS_TWO_LN2 = tl.constexpr(_rng.MINUS_TWO_LN2)
_LOG = tl.constexpr(_rng.LOG_COEFFICIENTS)
_SIN = tl.constexpr(_rng.SIN_COEFFICIENTS)
_COS = tl.constexpr(_rng.COS_COEFFICIENTS)
_LOG_DEGREE = tl.constexpr(len(_rng.LOG_COEFFICIENTS) - 1)
_TRIG_DEGREE = tl.constexpr(len(_rng.SIN_COEFFICIENTS) - 1)


@triton.jit
def philox(c0, c1, c2, c3, k0, k1):
    """Four uint32 words of Philox. Scalar counter words stay scalar, in uniform registers, as long as possible."""
    for _ in tl.static_range(_NUM_ROUNDS):
        p0 = c0.to(tl.uint64) * _M0
        p1 = c2.to(tl.uint64) * _M1
        c0 = (p1 >> 32).to(tl.uint32) ^ c1 ^ k0
        c2 = (p0 >> 32).to(tl.uint32) ^ c3 ^ k1
        c1 = p1.to(tl.uint32)
        c3 = p0.to(tl.uint32)
        k0 += _W0
        k1 += _W1
    return c0, c1, c2, c3


@triton.jit
def _polynomial(x, COEFFICIENTS: tl.constexpr, DEGREE: tl.constexpr):
    result = tl.full(x.shape, COEFFICIENTS[DEGREE], tl.float32)
    for i in tl.static_range(DEGREE):
        result = tl.fma(result, x, tl.full(x.shape, COEFFICIENTS[DEGREE - 1 - i], tl.float32))
    return result


@triton.jit
def box_muller(word):
    u = (((word >> 9) & 0x7FFF80) | _ONE_BITS).to(tl.float32, bitcast=True) - _ONE_LESS_HALF_STEP
    bits = u.to(tl.int32, bitcast=True)
    exponent = (bits - _SQRT_HALF_BITS) & _EXPONENT_FIELD
    f = (bits - exponent).to(tl.float32, bitcast=True) - 1.0
    # Converts to float by integer addition to 1.5 * 2**23: conversion instructions have an eighth of the throughput.
    halvings = ((exponent >> 23) + 0x4B400000).to(tl.float32, bitcast=True) - 12582912.0
    minus_two_ln2 = tl.full(f.shape, _MINUS_TWO_LN2, tl.float32)
    radius = tl.sqrt(tl.fma(halvings, minus_two_ln2, _polynomial(f, _LOG, _LOG_DEGREE) * f))

    s = (((word & 0x7FFF) << 8) | _ONE_BITS).to(tl.float32, bitcast=True) - _THREE_HALVES_LESS_HALF_STEP
    square = s * s
    cosine = _polynomial(square, _COS, _TRIG_DEGREE).to(tl.uint32, bitcast=True) ^ ((word << 16) & 0x80000000)
    return radius * cosine.to(tl.float32, bitcast=True), radius * (_polynomial(square, _SIN, _TRIG_DEGREE) * s)


@triton.jit
def _dither_word(word):
    return word * tl.full((), _DITHER_MULTIPLIER, tl.uint32)


@triton.jit
def _interleave4(a0, a1, a2, a3):
    return tl.join(tl.join(a0, a2), tl.join(a1, a3))


@triton.jit
def _pick(index, a0, a1, a2, a3):
    return tl.where((index & 2) == 0, tl.where((index & 1) == 0, a0, a1), tl.where((index & 1) == 0, a2, a3))


@triton.jit
def _blocks(offset, LANES: tl.constexpr, PER_LANE: tl.constexpr, PER_BLOCK: tl.constexpr):
    """(low words, common high word) of the counter blocks for vector lanes from a scalar offset; see ChunkRange."""
    first = offset // PER_BLOCK
    low = first.to(tl.uint32) + (tl.arange(0, LANES) * PER_LANE).to(tl.uint32)
    return low, (first >> 32).to(tl.uint32)


@triton.jit
def normal_lanes(w0, w1, w2, w3):
    """The normal numbers of Philox blocks, as [LANES, 8]."""
    z0, z1 = box_muller(w0)
    z2, z3 = box_muller(w1)
    z4, z5 = box_muller(w2)
    z6, z7 = box_muller(w3)
    z = tl.join(_interleave4(z0, z2, z4, z6), _interleave4(z1, z3, z5, z7))
    return tl.reshape(z, (w0.shape[0], 8))


@triton.jit
def draw_lanes(offset, step, direction, k0, k1, LANES: tl.constexpr, NORMAL: tl.constexpr):
    """(z, dither) as [LANES, 8] for consecutive offsets from `offset`, a multiple of 8."""
    purpose = direction * NUM_PURPOSES + _NOISE
    if NORMAL:
        low, high = _blocks(offset, LANES, 1, 8)
        w0, w1, w2, w3 = philox(low, high, step, purpose, k0, k1)
        z = normal_lanes(w0, w1, w2, w3)
        products = _interleave4(_dither_word(w0), _dither_word(w1), _dither_word(w2), _dither_word(w3))
        dither = tl.join(products >> 24, (products >> 16) & 255)
    else:
        halves = (offset // 8).to(tl.uint32) + tl.arange(0, LANES).to(tl.uint32)
        first = offset // 16
        # A lane is half a block, so two lanes have the same block number.
        low = first.to(tl.uint32) + (halves - (first.to(tl.uint32) * 2)) // 2
        w0, w1, w2, w3 = philox(low, (first >> 32).to(tl.uint32), step, purpose, k0, k1)
        upper = (halves & 1) != 0
        pair = tl.join(tl.where(upper, w2, w0), tl.where(upper, w3, w1))
        byte = _interleave4(pair, pair >> 8, pair >> 16, pair >> 24)
        z = (((byte << 24) & 0x80000000) | _ONE_BITS).to(tl.float32, bitcast=True)
        dither = byte & 127
    return tl.reshape(z, (LANES, 8)), tl.reshape(dither, (LANES, 8))


@triton.jit
def draw_elements(offset, step, direction, k0, k1, NORMAL: tl.constexpr):
    """(z, dither) for any tensor of offsets, with one Philox call for each element."""
    purpose = direction * NUM_PURPOSES + _NOISE
    if NORMAL:
        block = offset // 8
        w0, w1, w2, w3 = philox(block.to(tl.uint32), (block >> 32).to(tl.uint32), step, purpose, k0, k1)
        word = _pick(offset // 2, w0, w1, w2, w3)
        z_even, z_odd = box_muller(word)
        odd = (offset & 1) != 0
        z = tl.where(odd, z_odd, z_even)
        product = _dither_word(word)
        dither = tl.where(odd, (product >> 16) & 255, product >> 24)
    else:
        block = offset // 16
        w0, w1, w2, w3 = philox(block.to(tl.uint32), (block >> 32).to(tl.uint32), step, purpose, k0, k1)
        byte = _pick(offset // 4, w0, w1, w2, w3) >> ((offset & 3) * 8).to(tl.uint32)
        z = (((byte << 24) & 0x80000000) | _ONE_BITS).to(tl.float32, bitcast=True)
        dither = byte & 127
    return z, dither


@triton.jit
def fold_lanes(offset, step, k0, k1, LANES: tl.constexpr):
    """16 bits of dither as [LANES, 8] for consecutive offsets from `offset`, a multiple of 8."""
    low, high = _blocks(offset, LANES, 1, 8)
    w0, w1, w2, w3 = philox(low, high, step, step * 0 + _FOLD, k0, k1)
    words = _interleave4(w0, w1, w2, w3)
    return tl.reshape(tl.join(words & 0xFFFF, words >> 16), (LANES, 8))


@triton.jit
def fold_elements(offset, step, k0, k1):
    block = offset // 8
    w0, w1, w2, w3 = philox(block.to(tl.uint32), (block >> 32).to(tl.uint32), step, step * 0 + _FOLD, k0, k1)
    word = _pick(offset // 2, w0, w1, w2, w3)
    return (word >> ((offset & 1) * 16).to(tl.uint32)) & 0xFFFF
