"""The noise z(seed, step, direction, offset) and the rounding dithers, as pure functions of their arguments.

[Note: one definition of the noise]
Key = (seed low, seed high). Counter = (block low, block high, step, direction * 4 + purpose). `offset` is the element's
global parameter offset, so nothing about tiling, splitting or freezing changes a draw.

    normal      block = offset // 4,  word = offset % 4; words pair up (0, 1), (2, 3) for Box-Muller:
                u = (word_even >> 9 + 1/2) / 2**23,  radius = sqrt(-2 ln u)
                s = (word_odd >> 8) % 2**23 / 2**23 - 1/2,  even z = +-radius cos(pi s) (sign: top bit of word_odd),
                odd z = radius sin(pi s). The low 8 bits of every word are left over for the copy dither.
    rademacher  block = offset // 16, byte = offset % 16 (little end first); z = +1 where the byte's top bit is clear,
                else -1. The low 7 bits are the copy dither. One call serves 16 elements.
    fold        block = offset // 8,  half word = offset % 8; 16 bits of dither, purpose FOLD, direction 0.

The logarithm and the sine are short polynomials in float32, written out, because libm's differ between machines and, in
vectorised libraries, between the middle and the end of an array. Changing anything here means a new NOISE_VERSION.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ds_zo.ops.philox import MASK32, philox4x32, split_seed

NOISE_VERSION = 1
"""Stored with checkpoints: a log written under another version cannot be replayed."""

NOISE, FOLD = 0, 1
"""Purposes: separate streams for the same (seed, step, direction, offset)."""

Distribution = Literal["normal", "rademacher"]

NUM_PURPOSES = 4
COPY_DITHER_BITS: dict[str, int] = {"normal": 8, "rademacher": 7}
FOLD_DITHER_BITS = 16

# Minimax fits; relative error 1.7e-7, 5e-9 and (absolute) 5e-8, below float32's own rounding of z.
LOG_COEFFICIENTS = (
    -1.9999998807907104, 1.0000072717666626, -0.6667011976242065, 0.4993981719017029,
    -0.39800330996513367, 0.34501659870147705, -0.32445159554481506, 0.20213785767555237,
)  # fmt: skip
"""-2 ln(1 + f) = f * polynomial(f) for 1 + f in [sqrt(1/2), sqrt(2))."""
SIN_COEFFICIENTS = (3.1415927410125732, -5.167709827423096, 2.550069808959961, -0.5982421636581421, 0.07756044715642929)
"""sin(pi s) = s * polynomial(s * s) for |s| <= 1/2."""
COS_COEFFICIENTS = (0.9999999403953552, -4.934792995452881, 4.058412075042725, -1.3318802118301392, 0.2196969985961914)
"""cos(pi s) = polynomial(s * s) for |s| <= 1/2."""
ONE_BITS = 0x3F800000
SQRT_HALF_BITS = 0x3F3504F3
EXPONENT_FIELD = -(1 << 23)
ONE_LESS_HALF_STEP = 1.0 - 2.0**-24
MINUS_TWO_LN2_SCALED = -2.0 * 0.6931471805599453 * 2.0**-23
"""For an exponent still standing in the exponent field, that is times 2**23."""

Floats = NDArray[np.float32]
Words = NDArray[Any]


class Draw(NamedTuple):
    """Noise of a range of offsets and the dither that its words leave over (None unless asked for)."""

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
) -> Draw:
    """z for offsets [offset, offset + numel), and the copy dither of the same words."""
    if distribution == "normal":
        return _draw_normal(_stream(seed, step, direction, NOISE), offset, numel, with_dither)
    byte = _unpack(_stream(seed, step, direction, NOISE), offset, numel, np.dtype("<u1"))
    z = np.float32(1) - (byte >> np.uint8(7)).astype(np.float32) * np.float32(2)
    return Draw(z, (byte & np.uint8(127)).astype(np.uint32) if with_dither else None)


def copy_dither(
    *, seed: int, step: int, direction: int, offset: int, numel: int, distribution: Distribution
) -> NDArray[np.uint32]:
    """The dither alone, for copies that are rounded but not perturbed."""
    stream = _stream(seed, step, direction, NOISE)
    if distribution == "rademacher":
        return (_unpack(stream, offset, numel, np.dtype("<u1")) & np.uint8(127)).astype(np.uint32)
    return _unpack(stream, offset, numel, np.dtype("<u4")) & np.uint32(255)


def fold_dither(*, seed: int, step: int, offset: int, numel: int) -> NDArray[np.uint32]:
    """16 bits an element for the stochastic rounding of a fold."""
    return _unpack(_stream(seed, step, 0, FOLD), offset, numel, np.dtype("<u2")).astype(np.uint32)


class _Stream(NamedTuple):
    key: tuple[int, int]
    step: int
    purpose: int


def _stream(seed: int, step: int, direction: int, purpose: int) -> _Stream:
    return _Stream(split_seed(seed), step & MASK32, (direction * NUM_PURPOSES + purpose) & MASK32)


def _words(stream: _Stream, first_block: int, num_blocks: int) -> tuple[Words, Words, Words, Words]:
    """Philox over consecutive blocks. The high counter word stays scalar, so a range across 2**32 is made in two."""
    until_carry = (1 << 32) - (first_block & MASK32)
    if num_blocks > until_carry:
        head = _words(stream, first_block, until_carry)
        tail = _words(stream, first_block + until_carry, num_blocks - until_carry)
        w0, w1, w2, w3 = (np.concatenate(parts) for parts in zip(head, tail, strict=True))
        return w0, w1, w2, w3
    low = first_block & MASK32
    blocks = np.arange(low, low + num_blocks, dtype=np.uint64)
    return philox4x32((blocks, first_block >> 32, stream.step, stream.purpose), stream.key)


def _unpack(stream: _Stream, offset: int, numel: int, piece: np.dtype[Any]) -> Words:
    """Consecutive pieces (bytes, half words or words) of the 128-bit blocks, one for each offset."""
    pieces_per_block = 16 // piece.itemsize
    first = offset // pieces_per_block
    num_blocks = -(-(offset + numel) // pieces_per_block) - first
    words = np.empty((num_blocks, 4), dtype="<u4")
    for j, word in enumerate(_words(stream, first, num_blocks)):
        words[:, j] = word
    skip = offset - first * pieces_per_block
    return words.reshape(-1).view(piece)[skip : skip + numel]


def _draw_normal(stream: _Stream, offset: int, numel: int, with_dither: bool) -> Draw:
    first = offset // 4
    num_blocks = -(-(offset + numel) // 4) - first
    words = [w.astype(np.uint32) for w in _words(stream, first, num_blocks)]
    z = np.empty((num_blocks, 4), dtype=np.float32)
    for even in (0, 2):
        box_muller(words[even], words[even + 1], out_even=z[:, even], out_odd=z[:, even + 1])
    dither = None
    if with_dither:
        dither = np.empty((num_blocks, 4), dtype=np.uint32)
        for j in range(4):
            np.bitwise_and(words[j], np.uint32(255), out=dither[:, j])
    cut = slice(offset - first * 4, offset - first * 4 + numel)
    return Draw(z.reshape(-1)[cut], None if dither is None else dither.reshape(-1)[cut])


def box_muller(word_even: Words, word_odd: Words, *, out_even: Floats, out_odd: Floats) -> None:
    """Two normals from two uint32 words, as the module's note defines them."""
    u = ((word_even >> np.uint32(9)) | np.uint32(ONE_BITS)).view(np.float32)
    u -= np.float32(ONE_LESS_HALF_STEP)
    radius = minus_two_log(u)
    np.sqrt(radius, out=radius)

    s = ((word_odd >> np.uint32(8)) & np.uint32(0x7FFFFF) | np.uint32(ONE_BITS)).view(np.float32)
    s -= np.float32(1.5)
    square = s * s
    cosine = _polynomial(square, COS_COEFFICIENTS)
    bits = cosine.view(np.uint32)
    bits ^= word_odd & np.uint32(0x80000000)
    np.multiply(radius, cosine, out=out_even)
    sine = _polynomial(square, SIN_COEFFICIENTS)
    sine *= s
    np.multiply(radius, sine, out=out_odd)


def minus_two_log(u: Floats) -> Floats:
    """-2 ln u for normal u in (0, 1), to float32's relative accuracy up to u = 1."""
    bits = u.view(np.int32)
    exponent = bits - np.int32(SQRT_HALF_BITS)
    exponent &= np.int32(EXPONENT_FIELD)
    f = (bits - exponent).view(np.float32)
    f -= np.float32(1)
    result = _polynomial(f, LOG_COEFFICIENTS)
    result *= f
    result += exponent.astype(np.float32) * np.float32(MINUS_TWO_LN2_SCALED)
    return result


def _polynomial(x: Floats, coefficients: tuple[float, ...]) -> Floats:
    result = x * np.float32(coefficients[-1])
    for c in coefficients[-2:0:-1]:
        result += np.float32(c)
        result *= x
    result += np.float32(coefficients[0])
    return result
