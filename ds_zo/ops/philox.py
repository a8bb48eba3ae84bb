"""Philox 4x32 on numpy arrays: the source of every random bit of this package.

It has seven rounds, the fewest that pass every test of BigCrush (Salmon et al., 2011, Table 2). The authors recommend
ten as a safety margin. Noise that only has to be uncorrelated does not need the margin; `tests/ops/test_rng.py`
measures the properties that it needs.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np

MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
NUM_ROUNDS = 7
MASK32 = 0xFFFFFFFF

_M0, _M1 = (np.uint64(m) for m in MULTIPLIERS)
_MASK = np.uint64(MASK32)
_HALF = np.uint64(32)


def split_seed(seed: int) -> tuple[int, int]:
    """The Philox key: low and high half of a seed in [0, 2**63)."""
    if not 0 <= seed < 2**63:
        raise ValueError(f"seed must be in [0, 2**63), got {seed}: take it modulo 2**63 (seed)")
    return seed & MASK32, seed >> 32


@lru_cache
def _keys(key: tuple[int, int], num_rounds: int) -> list[tuple[np.uint64, np.uint64]]:
    """The key of each round."""
    return [
        (np.uint64((key[0] + i * KEY_STEPS[0]) & MASK32), np.uint64((key[1] + i * KEY_STEPS[1]) & MASK32))
        for i in range(num_rounds)
    ]


def philox4x32(
    counter: tuple[Any, Any, Any, Any], key: tuple[int, int], *, num_rounds: int = NUM_ROUNDS
) -> tuple[Any, Any, Any, Any]:
    """Four words of 32 bits (in uint64) for each counter. A counter word that is an int applies to the whole array.

    Scalar words stay scalar through the first rounds. This saves most of two rounds when only the lowest counter word
    varies. The upper halves of products are not cleared: a word is masked only before it is multiplied or returned.
    """
    c0, c1, c2, c3 = (np.uint64(c) if isinstance(c, int) else np.asarray(c, dtype=np.uint64) for c in counter)
    for k0, k1 in _keys(key, num_rounds):
        p0, p1 = c0 * _M0, c2 * _M1
        c0 = p1 >> _HALF
        c0 ^= c1
        c0 ^= k0
        c0 &= _MASK
        c2 = p0 >> _HALF
        c2 ^= c3
        c2 ^= k1
        c2 &= _MASK
        c1, c3 = p1, p0
    return c0, c1 & _MASK, c2, c3 & _MASK
