"""Loading encodes on the device where it can: the bits are those of the CPU path."""

from __future__ import annotations

import pytest
import torch

from ds_zo.ops.codecs import decode, encode_, encode_on_device_
from tests.ops.flat_cases import BF12, FP8, scales_for


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, FP8, BF12])
def test_encode_on_device_gives_the_bits_of_encode(dtype: torch.dtype, split: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(256 * 40, generator=generator) * torch.exp2(torch.randint(-30, 6, (256 * 40,), generator=generator))
    x[:256] = 0.0
    nan = float("nan")
    x[600:604] = torch.tensor([nan, float("inf"), -float("inf"), 1.0])
    x[604] = torch.tensor(-4194304, dtype=torch.int32).view(torch.float32)  # a NaN with a sign
    x[300:310] = torch.tensor([0.0, -0.0, 1.0, -1.0, 448.0, 449.0, 2.0**-14, 2.0**-15, 2.0**-24, 65504.0])

    def encoded(encode: object) -> list[torch.Tensor]:
        storage = torch.zeros(x.shape, dtype=dtype)
        low = torch.zeros(x.shape, dtype=torch.int16) if split else None
        scales = scales_for(dtype, x.numel())
        encode(storage, x.clone(), low=low, scales=scales)  # type: ignore[operator]
        bits = torch.int8 if dtype.itemsize == 1 else torch.int16
        return [t for t in (storage.view(bits), low, scales) if t is not None]

    for ours, theirs in zip(encoded(encode_on_device_), encoded(encode_), strict=True):
        assert torch.equal(ours, theirs)
    storage, *planes = encoded(encode_on_device_)
    low = planes.pop(0) if split else None
    value = decode(storage.view(dtype), low, planes[0] if planes else None)
    assert (value.isnan() == x.isnan()).all(), "a NaN spoils no other"
