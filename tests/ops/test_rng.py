"""The noise: known words, purity, and the statistics that SPSA relies on."""

from __future__ import annotations

from functools import partial
from itertools import pairwise

import numpy as np
import pytest
import torch

from ds_zo import ops
from ds_zo.ops import rng
from ds_zo.ops.philox import philox4x32

DISTRIBUTIONS = ("normal", "rademacher")
NUMEL = 400_000


@pytest.mark.parametrize(
    ("num_rounds", "counter", "key", "words"),
    [
        (7, (0, 0, 0, 0), (0, 0), (0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48)),
        (7, (0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x5207DDC2, 0x45165E59, 0x4D8EE751, 0x8C52F662)),
        (
            7,
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0x4DFCCABA, 0x190A87F0, 0xC47362BA, 0xB6B5242A),
        ),
        (10, (0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ],
)
def test_philox_known_answers(
    num_rounds: int, counter: tuple[int, ...], key: tuple[int, int], words: tuple[int, ...]
) -> None:
    of = partial(philox4x32, num_rounds=num_rounds)
    assert tuple(int(w) for w in of(counter, key)) == words  # type: ignore[arg-type]
    arrays = tuple(np.array([c, 0], dtype=np.uint64) for c in counter)
    assert tuple(int(w[0]) for w in of(arrays, key)) == words  # type: ignore[arg-type]


def test_noise_is_box_muller_on_the_documented_words() -> None:
    """The definition in float64 libm, independent of the polynomials."""
    seed, step, direction, block = 2**40 + 3, 11, 2, 2**32 + 77
    key = (seed & 0xFFFFFFFF, seed >> 32)
    expected = []
    for w in (int(x) for x in ops.philox4x32((block & 0xFFFFFFFF, block >> 32, step, direction * 4), key)):
        radius = np.sqrt(-2 * np.log(((w >> 16) + 0.5) / 2**16))
        s = ((w & 0x7FFF) + 0.5) / 2**15 - 0.5
        expected += [radius * np.cos(np.pi * s) * (-1 if w & 0x8000 else 1), radius * np.sin(np.pi * s)]
    z = ops.noise(seed, step, direction, block * 8, 8)
    np.testing.assert_allclose(z.numpy(), expected, rtol=1e-5, atol=1e-5)


def test_rademacher_signs_are_the_documented_bits() -> None:
    words = ops.philox4x32((5, 0, 3, 4), (9, 0))
    bits = b"".join(int(w).to_bytes(4, "little") for w in words)
    expected = [-1.0 if byte & 0x80 else 1.0 for byte in bits]
    assert ops.noise(9, 3, 1, 80, 16, "rademacher").tolist() == expected


def test_logarithm_is_accurate_up_to_one() -> None:
    u = np.array([2.0**-24, 1e-6, 0.1, 0.5, 0.7071, 0.9, 0.999, 1 - 2.0**-20, 1 - 2.0**-24], dtype=np.float32)
    np.testing.assert_allclose(rng.minus_two_log(u), -2 * np.log(u.astype(np.float64)), rtol=1e-5)


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
@pytest.mark.parametrize("start", [0, 5, 2**33 + 1, 2**35 - 333])
def test_any_split_of_the_range_gives_the_same_bits(distribution: rng.Distribution, start: int) -> None:
    whole = ops.noise(3, 4, 1, start, 1000, distribution)
    cuts = [0, 1, 2, 7, 16, 63, 333, 334, 1000]
    parts = [ops.noise(3, 4, 1, start + a, b - a, distribution) for a, b in pairwise(cuts)]
    assert torch.equal(torch.cat(parts), whole)


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_moments(distribution: rng.Distribution) -> None:
    z = ops.noise(17, 1, 0, 3, NUMEL, distribution).double()
    tolerance = 5 / NUMEL**0.5
    assert abs(z.mean()) < tolerance
    assert abs(z.var() - 1) < 1.5 * tolerance
    assert abs((z**3).mean()) < 4 * tolerance
    assert abs((z**4).mean() - (3 if distribution == "normal" else 1)) < 10 * tolerance


def test_normal_has_the_normal_distribution() -> None:
    """Kolmogorov-Smirnov; and even and odd words, which take different formulas, each on its own."""
    z = ops.noise(1, 2, 3, 0, NUMEL).double()
    for part in (z, z[0::2], z[1::2]):
        ordered = part.sort().values
        cdf = 0.5 * (1 + torch.erf(ordered / 2**0.5))
        grid = (torch.arange(len(part)) + 0.5) / len(part)
        assert (cdf - grid).abs().max() * len(part) ** 0.5 < 1.95  # the 0.1% point


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_streams_are_uncorrelated(distribution: rng.Distribution) -> None:
    """Over seeds, steps, directions, far offsets and every lag within a Philox block and a little beyond."""
    base = ops.noise(1, 1, 0, 0, NUMEL, distribution)
    others = [(2, 1, 0, 0), (1 + 2**32, 1, 0, 0), (1, 2, 0, 0), (1, 1, 1, 0), (1, 1, 0, 2**34), (1, 1, 0, 2**36)]
    others += [(1, 1, 0, lag) for lag in (1, 2, 3, 4, 5, 8, 15, 16, 17)]
    for other in others:
        correlation = (base * ops.noise(*other, NUMEL, distribution)).mean()
        assert abs(correlation) < 5 / NUMEL**0.5, other


def test_purposes_are_separate_streams() -> None:
    at = {"seed": 4, "step": 5, "offset": 0, "numel": NUMEL}
    fold = rng.fold_dither(**at).astype(np.float64) / 65536 - 0.5
    copy = rng.copy_dither(**at, direction=0, distribution="normal").astype(np.float64) / 256 - 0.5
    z = rng.draw(**at, direction=0, distribution="normal").z
    for a, b in ((fold, copy), (fold, z), (copy, z), (copy, z * z)):
        assert abs(np.mean(a * b)) < 5 / NUMEL**0.5
    for dither in (fold, copy):
        assert abs(dither.mean()) < 5 / NUMEL**0.5 + 1 / 512
        assert abs(dither.var() - 1 / 12) < 1e-3


def test_dither_is_even_wherever_the_noise_lies() -> None:
    """A copy's rounding must not lean on the noise that it rounds: in every tenth of z, the dither's bytes are even."""
    z, dither = rng.draw(seed=4, step=5, direction=0, offset=0, numel=NUMEL, distribution="normal", with_dither=True)
    assert dither is not None
    for parity in (0, 1):
        order = np.argsort(z[parity::2])
        for part in np.array_split(dither[parity::2][order], 10):
            counts = np.bincount(part, minlength=256)
            expected = len(part) / 256
            assert ((counts - expected) ** 2 / expected).sum() < 255 + 5 * (2 * 255) ** 0.5
    again = rng.draw(seed=4, step=6, direction=0, offset=0, numel=NUMEL, distribution="normal", with_dither=True)
    assert again.dither is not None
    assert abs(np.corrcoef(dither, again.dither)[0, 1]) < 5 / NUMEL**0.5


def test_sums_over_many_noises_are_normal_too() -> None:
    """What a projection g = <grad, z> sees: fixed weights over many elements, over steps and directions."""
    numel, num_draws = 512, 4000
    weights = np.random.default_rng(0).standard_normal(numel)
    sums = np.array(
        [
            weights @ rng.draw(seed=3, step=i // 2, direction=i % 2, offset=40, numel=numel, distribution="normal").z
            for i in range(num_draws)
        ]
    ) / np.linalg.norm(weights)
    assert abs(sums.mean()) < 4 / num_draws**0.5
    assert abs(sums.var() - 1) < 4 * (2 / num_draws) ** 0.5
    assert abs((sums[0::2] * sums[1::2]).mean()) < 4 / (num_draws / 2) ** 0.5
    assert abs((sums[2:] * sums[:-2]).mean()) < 4 / num_draws**0.5


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_dither_is_the_same_with_and_without_noise(distribution: rng.Distribution) -> None:
    at = {"seed": 4, "step": 5, "direction": 2, "offset": 13, "numel": 333}
    drawn = rng.draw(**at, distribution=distribution, with_dither=True).dither
    np.testing.assert_array_equal(drawn, rng.copy_dither(**at, distribution=distribution))


@pytest.mark.parametrize("seed", [-1, 2**63])
def test_seed_out_of_range_is_refused(seed: int) -> None:
    with pytest.raises(ValueError, match=r"seed must be in \[0, 2\*\*63\)"):
        ops.noise(seed, 0, 0, 0, 4)


def test_extreme_seeds_and_steps_differ() -> None:
    draws = [ops.noise(seed, step, 0, 0, 8) for seed in (0, 1, 2**32, 2**63 - 1) for step in (0, 1, 2**31, 2**32 - 1)]
    assert len({tuple(d.tolist()) for d in draws}) == len(draws)
