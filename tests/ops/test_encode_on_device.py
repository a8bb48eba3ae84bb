"""Loading encodes on the device where it can: the bits are those of the CPU path."""

from __future__ import annotations

import pytest
import torch
from flat_cases import BF12, FP8, scales_for

from ds_zo.ops.codecs import encode_, encode_on_device_


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, FP8, BF12])
def test_encode_on_device_gives_the_bits_of_encode(dtype: torch.dtype, split: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(256 * 40, generator=generator) * torch.exp2(torch.randint(-30, 6, (256 * 40,), generator=generator))
    x[:256] = 0.0
    x[300:310] = torch.tensor([0.0, -0.0, 1.0, -1.0, 448.0, 449.0, 2.0**-14, 2.0**-15, 2.0**-24, 65504.0])

    def encoded(encode: object) -> list[torch.Tensor]:
        storage = torch.zeros(x.shape, dtype=dtype)
        low = torch.zeros(x.shape, dtype=torch.int16) if split else None
        exponents = scales_for(dtype, x.numel())
        encode(storage, x.clone(), low=low, exponents=exponents)  # type: ignore[operator]
        bits = torch.int8 if dtype.itemsize == 1 else torch.int16
        return [t for t in (storage.view(bits), low, exponents) if t is not None]

    for ours, theirs in zip(encoded(encode_on_device_), encoded(encode_), strict=True):
        assert torch.equal(ours, theirs)
