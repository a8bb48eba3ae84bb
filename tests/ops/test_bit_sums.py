"""Sums of the bits of weights: equal on every device, and other ones where one bit or the order differs."""

from __future__ import annotations

import random

import torch

from ds_zo.ops import bit_sum, bit_sums

DTYPES = [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.uint8, torch.float64]


def test_sums_tell_tensors_apart() -> None:
    for seed in range(40):
        rng = random.Random(seed)
        numel = rng.choice([1, 3, 5, rng.randrange(1, 40_000), 4 * 1024 * 4096 + rng.randrange(9)])
        dtype = rng.choice(DTYPES) if numel < 100_000 else torch.uint8
        bits = torch.randint(256, (numel * dtype.itemsize,), dtype=torch.uint8, generator=_generator(seed))
        tensor = bits.view(dtype)
        found = bit_sum(tensor)
        assert bit_sum(tensor.clone()) == found, seed
        changed = bits.clone()
        at = rng.randrange(len(bits))
        changed[at] ^= 1 << rng.randrange(8)
        assert bit_sum(changed.view(dtype)) != found, seed
        first, second = (rng.randrange(numel) for _ in range(2))
        swapped = bits.clone().view(numel, -1)
        swapped[[first, second]] = swapped[[second, first]]
        assert (bit_sum(swapped.view(-1).view(dtype)) == found) == torch.equal(swapped.view(-1), bits), seed
        signs = bits.clone()
        signs[3::8] ^= 128  # an even number of the highest bits
        assert (bit_sum(signs.view(dtype)) == found) == torch.equal(signs, bits), seed


def test_devices_have_one_sum() -> None:
    for seed in range(20):
        numel = random.Random(seed).randrange(1, 60_000)
        words = torch.randint(256, (4 * numel,), dtype=torch.uint8, generator=_generator(seed))
        assert bit_sums._add_rows_on_device(words).tolist() == bit_sums._add_rows(words).tolist()


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)
