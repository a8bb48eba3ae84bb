"""The noise z(seed, step, direction, offset) and the rounding dithers, as pure functions of their arguments.

[Note: one definition of the noise]
Philox key = (seed low, seed high). Counter = (block low, block high, step, direction * 4 + purpose). `offset` is the
element's index among all elements of the model, so tiling, splitting and freezing do not change a draw.

    normal      block = offset // 8,  word = offset % 8 // 2; a word is a pair of Box-Muller:
                u = (word // 2**16 + 1/2) / 2**16,  radius = sqrt(-2 ln u)
                s = (word % 2**15 + 1/2) / 2**15 - 1/2,  even z = +-radius cos(pi s) (sign: bit 15 of the word),
                odd z = radius sin(pi s). No |z| exceeds 4.86. The copy dithers are the two upper bytes of
                word * DITHER_MULTIPLIER, the upper one for the even z.
    rademacher  block = offset // 16, byte = offset % 16 (little end first); z = +1 where the byte's top bit is clear,
                else -1. The low 7 bits are the copy dither. One call serves 16 elements.
    rank1       z = u v (rounded once) for the element in row i and column j of a matrix whose first element has offset
                b. u and v are `normal` draws at offsets b + i (purpose FACTOR_ROWS) and b + j (FACTOR_COLUMNS), rounded
                to the parameter's dtype. z of all other parameters is 0. The copy dithers are those of `normal`.
    fold        block = offset // 8,  half word = offset % 8; 16 bits of dither, purpose FOLD, direction 0.

The logarithm, sine and cosine are short float32 polynomials. Library functions differ between machines and, in
vectorised libraries, between the middle and the end of an array. Any change of these definitions needs a new
NOISE_VERSION.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ds_zo.ops.philox import MASK32, philox4x32, split_seed

NOISE_VERSION = 2
"""Version of the definitions above, stored with checkpoints: a log of another version cannot be replayed."""

NOISE, FOLD, FACTOR_ROWS, FACTOR_COLUMNS = 0, 1, 2, 3
"""Purposes of a draw: separate random streams for the same (seed, step, direction, offset)."""

Distribution = Literal["normal", "rademacher", "rank1"]

NUM_PURPOSES = 4
COPY_DITHER_BITS: dict[str, int] = {"normal": 8, "rademacher": 7, "rank1": 8}
FOLD_DITHER_BITS = 16

DITHER_MULTIPLIER = 0x9E3779B1
"""Odd, near 2**32 / golden ratio: the upper bytes of the products are evenly distributed over any range of words."""

# Minimax fits with relative errors 7e-6 and 1e-6 and absolute error 7e-6, below the resolution 2**-17 of a 16-bit u.
LOG_COEFFICIENTS = (
    -2.000009059906006, 0.9998043775558472, -0.6651604771614075, 0.508065402507782, -0.44111865758895874,
    0.285841166973114,
)  # fmt: skip
"""-2 ln(1 + f) = f * polynomial(f) for 1 + f in [sqrt(1/2), sqrt(2))."""
SIN_COEFFICIENTS = (3.141589641571045, -5.167367935180664, 2.543604850769043, -0.55839604139328)
"""sin(pi s) = s * polynomial(s * s) for |s| <= 1/2."""
COS_COEFFICIENTS = (0.9999933242797852, -4.933938026428223, 4.04128360748291, -1.222127079963684)
"""cos(pi s) = polynomial(s * s) for |s| <= 1/2."""
ONE_BITS = 0x3F800000
SQRT_HALF_BITS = 0x3F3504F3
EXPONENT_FIELD = -(1 << 23)
ONE_LESS_HALF_STEP = 1.0 - 2.0**-17
THREE_HALVES_LESS_HALF_STEP = 1.5 - 2.0**-16
MINUS_TWO_LN2 = -2.0 * 0.6931471805599453

Floats = NDArray[np.float32]
Words = NDArray[Any]


class NoiseDraw(NamedTuple):
    """Noise of a range of offsets, and the copy dither from the same words (None unless requested)."""

    z: Floats
    dither: NDArray[np.uint32] | None


def draw(
    *,
    seed: int,
    step: int,
    direction: int,
    offset: int,
    numel: int,
    distribution: Distribution,
    with_dither: bool = False,
) -> NoiseDraw:
    """z for offsets [offset, offset + numel), and the copy dither of the same words. Not for rank-1 noise, which
    `reference` makes of factors."""
    assert distribution != "rank1"
    if distribution == "normal":
        return _draw_normal(_stream(seed, step, direction, NOISE), offset, numel, with_dither)
    byte = _unpack(_stream(seed, step, direction, NOISE), offset, numel, np.dtype("<u1"))
    z = np.float32(1) - (byte >> np.uint8(7)).astype(np.float32) * np.float32(2)
    return NoiseDraw(z, (byte & np.uint8(127)).astype(np.uint32) if with_dither else None)


def draw_blocks(*, seed: int, step: int, first_member: int, num_members: int, blocks: NDArray[np.int64]) -> Floats:
    """For each member, the 8 normal numbers of each block, as [member, 8 * block]. An entry of `blocks` is NUM_PURPOSES
    * counter block + purpose."""
    members = np.arange(first_member, first_member + num_members, dtype=np.int64)[:, None]
    counter, purpose = np.divmod(blocks, NUM_PURPOSES)
    purposes = (members * NUM_PURPOSES + purpose).reshape(-1)
    low, high = np.tile(counter & MASK32, num_members), np.tile(counter >> 32, num_members)
    words = philox4x32((low, high, step & MASK32, purposes), split_seed(seed))
    z = np.empty((purposes.size, 4, 2), dtype=np.float32)
    box_muller(np.stack(words, axis=1).astype(np.uint32), out_even=z[..., 0], out_odd=z[..., 1])
    return z.reshape(num_members, -1)


def copy_dither(
    *, seed: int, step: int, direction: int, offset: int, numel: int, distribution: Distribution
) -> NDArray[np.uint32]:
    """The copy dither without the noise, for a store in a call that makes no perturbed copy."""
    stream = _stream(seed, step, direction, NOISE)
    if distribution == "rademacher":
        return (_unpack(stream, offset, numel, np.dtype("<u1")) & np.uint8(127)).astype(np.uint32)
    words = _unpack(stream, offset // 2, (offset + numel + 1) // 2 - offset // 2, np.dtype("<u4"))
    return _pair_dithers(words)[offset % 2 : offset % 2 + numel]


def fold_dither(*, seed: int, step: int, offset: int, numel: int) -> NDArray[np.uint32]:
    """16 random bits for each element, for the stochastic rounding of a fold."""
    return _unpack(_stream(seed, step, 0, FOLD), offset, numel, np.dtype("<u2")).astype(np.uint32)


class _Stream(NamedTuple):
    key: tuple[int, int]
    step: int
    purpose: int


def _stream(seed: int, step: int, direction: int, purpose: int) -> _Stream:
    return _Stream(split_seed(seed), step & MASK32, (direction * NUM_PURPOSES + purpose) & MASK32)


def _words(stream: _Stream, first_block: int, num_blocks: int) -> tuple[Words, Words, Words, Words]:
    """Philox words of consecutive blocks. The high counter word stays scalar, so a range across a multiple of 2**32 is
    computed in two parts."""
    until_carry = (1 << 32) - (first_block & MASK32)
    if num_blocks > until_carry:
        head = _words(stream, first_block, until_carry)
        tail = _words(stream, first_block + until_carry, num_blocks - until_carry)
        w0, w1, w2, w3 = (np.concatenate(parts) for parts in zip(head, tail, strict=True))
        return w0, w1, w2, w3
    low = first_block & MASK32
    blocks = np.arange(low, low + num_blocks, dtype=np.uint64)
    return philox4x32((blocks, first_block >> 32, stream.step, stream.purpose), stream.key)


def _unpack(stream: _Stream, offset: int, numel: int, field: np.dtype[Any]) -> Words:
    """Consecutive fields (bytes, half words or words) of the 128-bit blocks, one for each offset."""
    fields_per_block = 16 // field.itemsize
    first = offset // fields_per_block
    num_blocks = -(-(offset + numel) // fields_per_block) - first
    words = np.empty((num_blocks, 4), dtype="<u4")
    for j, word in enumerate(_words(stream, first, num_blocks)):
        words[:, j] = word
    skip = offset - first * fields_per_block
    return words.reshape(-1).view(field)[skip : skip + numel]


def _draw_normal(stream: _Stream, offset: int, numel: int, with_dither: bool) -> NoiseDraw:
    first = offset // 2
    words = _unpack(stream, first, (offset + numel + 1) // 2 - first, np.dtype("<u4")).astype(np.uint32)
    z = np.empty((len(words), 2), dtype=np.float32)
    box_muller(words, out_even=z[:, 0], out_odd=z[:, 1])
    cut = slice(offset % 2, offset % 2 + numel)
    return NoiseDraw(z.reshape(-1)[cut], _pair_dithers(words)[cut] if with_dither else None)


def _pair_dithers(words: Words) -> NDArray[np.uint32]:
    product = words.astype(np.uint32) * np.uint32(DITHER_MULTIPLIER)
    dither = np.empty((len(words), 2), dtype=np.uint32)
    np.right_shift(product, np.uint32(24), out=dither[:, 0])
    np.bitwise_and(product >> np.uint32(16), np.uint32(255), out=dither[:, 1])
    return dither.reshape(-1)


def box_muller(word: Words, *, out_even: Floats, out_odd: Floats) -> None:
    """Two normal numbers from each uint32 word; see [Note: one definition of the noise]."""
    u = ((word >> np.uint32(9)) & np.uint32(0x7FFF80) | np.uint32(ONE_BITS)).view(np.float32)
    u -= np.float32(ONE_LESS_HALF_STEP)
    radius = minus_two_log(u)
    np.sqrt(radius, out=radius)

    s = ((word & np.uint32(0x7FFF)) << np.uint32(8) | np.uint32(ONE_BITS)).view(np.float32)
    s -= np.float32(THREE_HALVES_LESS_HALF_STEP)
    square = s * s
    cosine = _polynomial(square, COS_COEFFICIENTS)
    bits = cosine.view(np.uint32)
    bits ^= (word << np.uint32(16)) & np.uint32(0x80000000)
    np.multiply(radius, cosine, out=out_even)
    sine = _polynomial(square, SIN_COEFFICIENTS)
    sine *= s
    np.multiply(radius, sine, out=out_odd)


def minus_two_log(u: Floats) -> Floats:
    """-2 ln u for normal floats u in (0, 1), with relative error 1e-5, also near u = 1."""
    bits = u.view(np.int32)
    exponent = bits - np.int32(SQRT_HALF_BITS)
    exponent &= np.int32(EXPONENT_FIELD)
    f = (bits - exponent).view(np.float32)
    f -= np.float32(1)
    result = _polynomial(f, LOG_COEFFICIENTS)
    result *= f
    result += exponent.astype(np.float32) * np.float32(MINUS_TWO_LN2 * 2.0**-23)
    return result


def _polynomial(x: Floats, coefficients: tuple[float, ...]) -> Floats:
    result = x * np.float32(coefficients[-1])
    for c in coefficients[-2:0:-1]:
        result += np.float32(c)
        result *= x
    result += np.float32(coefficients[0])
    return result
