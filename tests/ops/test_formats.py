"""Storage formats: nearest rounding as torch casts, unbiased stochastic rounding, exact masters, group scales."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from ds_zo import ops
from ds_zo.ops import formats
from tests.ops.flat_cases import BF12, FP8, STORAGE_DTYPES, scales_for

NARROW = (torch.bfloat16, torch.float16, FP8)


def spread_values(dtype: torch.dtype, numel: int = 20_000) -> torch.Tensor:
    """Both signs over the format's binades, its subnormals, zero and exact grid points."""
    generator = torch.Generator().manual_seed(1)
    low, high = {torch.bfloat16: (-120, 120), torch.float16: (-26, 15), FP8: (-11, 8), BF12: (-15, 8)}[dtype]
    exponents = torch.randint(low, high, (numel,), generator=generator)
    x = torch.ldexp(torch.rand(numel, generator=generator) + 1, exponents)
    x[::7] = x[::7].to(torch.bfloat16 if dtype == BF12 else dtype).float()
    x[::11] = 0
    x = x.clamp(max=formats.storage_format(dtype).largest)
    return torch.where(torch.rand(numel, generator=generator) < 0.5, -x, x)


@pytest.mark.parametrize("dtype", NARROW)
def test_nearest_equals_torch_cast(dtype: torch.dtype) -> None:
    x = spread_values(dtype)
    rounded = torch.from_numpy(formats.round_to(formats.storage_format(dtype), x.numpy()))
    assert torch.equal(rounded, x.to(dtype).float())


@pytest.mark.parametrize("dtype", NARROW)
def test_load_and_store_are_the_dtypes_own_bits(dtype: torch.dtype) -> None:
    width = torch.empty(0, dtype=dtype).element_size()
    integers = torch.uint8 if width == 1 else torch.int16
    codes = torch.arange(256 if width == 1 else 65536).to(torch.int32).to(integers).view(dtype)
    values = formats.load(codes)
    np.testing.assert_array_equal(values, codes.float().numpy())
    back = torch.empty_like(codes)
    formats.store_(back, values)
    finite = codes.float().isfinite()
    assert torch.equal(back.view(integers)[finite], codes.view(integers)[finite])
    assert torch.equal(back.float().isnan(), codes.float().isnan())


@pytest.mark.parametrize("num_bits", [7, 8, 16])
@pytest.mark.parametrize("dtype", [*NARROW, BF12])
def test_stochastic_rounding_is_unbiased_and_keeps_grid_points(dtype: torch.dtype, num_bits: int) -> None:
    """The mean over all dithers is the value to half a step of the dither; nearest misses by up to half an ulp."""
    fmt = formats.storage_format(dtype)
    x = spread_values(dtype, 300).numpy()
    total = np.zeros(len(x))
    for dither in range(1 << num_bits) if num_bits < 16 else range(0, 1 << 16, 127):
        addend = formats.dither_addend(
            np.full(len(x), dither, dtype=np.uint32), num_bits=num_bits, dropped_bits=fmt.dropped_bits
        )
        rounded = formats.round_to(fmt, x, addend)
        total += rounded
    count = (1 << num_bits) if num_bits < 16 else len(range(0, 1 << 16, 127))
    magnitude = np.maximum(np.abs(x), np.float32(fmt.tiny if fmt.tiny else 1e-37))
    ulp = 2.0 ** (np.floor(np.log2(magnitude)) - (23 - fmt.dropped_bits))
    bias = np.abs(total / count - x) / ulp
    assert bias.max() < 1.1 * max(2.0 ** -(num_bits + 1), 1 / count)
    nearest = np.abs(formats.round_to(fmt, x) - x) / ulp
    assert nearest.max() > 0.4
    on_grid = formats.round_to(fmt, x) == x
    assert on_grid.any()
    np.testing.assert_array_equal((total / count)[on_grid], x[on_grid])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rounding_keeps_nan_and_infinity(dtype: torch.dtype) -> None:
    fmt = formats.storage_format(dtype)
    x = np.array([0x7FFFFFFF, 0xFFFFFFFF, 0x7F800001, 0x7F800000, 0xFF800000], dtype=np.uint32).view(np.float32)
    for addend in (None, np.full(5, (1 << fmt.dropped_bits) - 1, dtype=np.uint32)):
        rounded = formats.round_to(fmt, x, addend)
        assert np.isnan(rounded[:3]).all()
        assert rounded[3] == np.inf
        assert rounded[4] == -np.inf


def test_bf16_split_holds_float32_bit_for_bit() -> None:
    bits = torch.randint(-(2**31), 2**31, (200_000,), generator=torch.Generator().manual_seed(2))
    x = bits.to(torch.int32).view(torch.float32)
    x = x[x.isfinite() & (x.abs() < formats.storage_format(torch.bfloat16).largest)]
    storage, low = torch.empty_like(x, dtype=torch.bfloat16), torch.empty_like(x, dtype=torch.int16)
    ops.encode_(storage, x, low=low)
    assert torch.equal(ops.decode(storage, low).view(torch.int32), x.view(torch.int32))
    assert ((storage.float() - x).abs() <= (x.to(torch.bfloat16).float() - x).abs()).all()  # and storage is a nearest


def test_bf16_split_at_the_top_and_beyond() -> None:
    x = torch.tensor([3.4e38, -3.4e38, float("inf"), -float("inf"), float("nan"), 0.0, -0.0])
    storage, low = torch.empty(7, dtype=torch.bfloat16), torch.empty(7, dtype=torch.int16)
    ops.encode_(storage, x, low=low)
    assert storage[:2].isfinite().all()  # a finite master never has an infinite copy
    back = ops.decode(storage, low)
    torch.testing.assert_close(back[:2], x[:2], rtol=4e-3, atol=0)
    assert torch.equal(back[2:4], x[2:4])
    assert back[4].isnan()
    assert torch.equal(back[5:].view(torch.int32), x[5:].view(torch.int32))


@pytest.mark.parametrize(
    ("dtype", "relative", "absolute"),
    [(torch.float16, 0.0, 2.0**-41), (FP8, 2.0**-19, 2.0**-26), (BF12, 0.0, 2.0**-30)],
)
def test_split_resolution_is_as_documented(dtype: torch.dtype, relative: float, absolute: float) -> None:
    x = spread_values(dtype)
    fmt = formats.storage_format(dtype)
    high, low = formats.split(fmt, x.numpy())
    back = torch.from_numpy(formats.join(fmt, high, low))
    assert torch.all((back - x).abs() <= x.abs() * relative + absolute)
    if dtype == BF12:  # and float32's own bits where storage is normal
        assert torch.equal(back[x.abs() >= fmt.tiny], x[x.abs() >= fmt.tiny])
    again = formats.split(fmt, back.numpy())
    np.testing.assert_array_equal(again[0], high)
    np.testing.assert_array_equal(again[1], low)


@pytest.mark.parametrize("dtype", STORAGE_DTYPES)
def test_encode_decode_round_trip(dtype: torch.dtype) -> None:
    x = torch.randn(1000, generator=torch.Generator().manual_seed(3)) * 0.02
    storage = torch.empty(1000, dtype=dtype)
    scales = scales_for(dtype, 1000)
    ops.encode_(storage, x, scales=scales)
    step = {torch.float32: 0.0, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, FP8: 2.0**-4, BF12: 2.0**-8}[dtype]
    smallest = {torch.float16: 2.0**-25, FP8: 2.0**-22, BF12: 2.0**-26}.get(dtype, 0.0)
    assert torch.all((ops.decode(storage, None, scales) - x).abs() <= x.abs() * step + smallest)


@pytest.mark.parametrize("scale", [1e-20, 0.02, 1.0, 508.0, 509.0, 7e8])
def test_bf12_holds_bfloat16_as_it_is_within_13_binades(scale: float) -> None:
    generator = torch.Generator().manual_seed(4)
    numel = 1000
    x = torch.ldexp(torch.rand(numel, generator=generator) + 1, torch.randint(-13, 0, (numel,), generator=generator))
    x = torch.where(torch.rand(numel, generator=generator) < 0.5, -x, x) * scale
    x[::9] = 0
    x[::256] = 1.9 * scale  # each group's largest
    x = x.bfloat16().float()
    storage, scales = torch.empty(numel, dtype=BF12), scales_for(BF12, numel)
    ops.encode_(storage, x, scales=scales)
    assert torch.equal(ops.decode(storage, None, scales), x)
    ops.encode_(storage, x * 2.0**-10, scales=scales)
    assert torch.equal(ops.decode(storage, None, scales), x * 2.0**-10)


def test_bf12_split_holds_float32_bit_for_bit_across_rounding_up() -> None:
    """Neighbours of powers of two and of the smallest normal, where storage lies in the next binade."""
    near = torch.tensor([2.0**e for e in range(-9, 9)])
    x = torch.cat([near, near * (1 - 2.0**-24), near * (1 - 2.0**-9), near * (1 + 2.0**-23), near * (1 - 2.0**-8)])
    x = torch.cat([x, -x, torch.tensor([508.0, 0.0, -0.0])]).repeat(2)[:256]
    storage, low, scales = torch.empty(256, dtype=BF12), torch.empty(256, dtype=torch.int16), scales_for(BF12, 256)
    ops.encode_(storage, x, low=low, scales=scales)
    assert scales is not None
    assert scales[0] == 0
    back, normal = ops.decode(storage, low, scales), x.abs() >= 2.0**-6
    assert torch.equal(back[normal], x[normal])
    assert torch.all((back - x).abs() <= 2.0**-30)
    assert torch.equal(back.signbit(), x.signbit())


def test_bf12_keeps_nan_and_saturates() -> None:
    x = torch.zeros(256)
    x[:5] = torch.tensor([float("nan"), float("inf"), -float("inf"), 400.0, -1.0])
    for low in (None, torch.empty(256, dtype=torch.int16)):
        storage, scales = torch.empty(256, dtype=BF12), scales_for(BF12, 256)
        ops.encode_(storage, x, low=low, scales=scales)
        back = ops.decode(storage, low, scales)
        assert back[0].isnan()
        assert back[1:5].tolist() == [508.0, -508.0, 400.0, -1.0]


def test_fp8_exponent_puts_the_largest_into_the_top_binade() -> None:
    for scale in (1e-20, 3e-5, 0.02, 1.0, 448.0, 449.0, 7e8):
        x = torch.linspace(-scale, scale, 256)
        scales = torch.empty(1, dtype=torch.int8)
        ops.encode_(torch.empty(256, dtype=FP8), x, scales=scales)
        top = scale * 2.0 ** -int(scales[0])
        assert 224 < top <= 448, scale


def test_fp8_all_zero_group_waits_for_its_first_update() -> None:
    storage, scales = torch.empty(256, dtype=FP8), torch.empty(1, dtype=torch.int8)
    ops.encode_(storage, torch.zeros(256), scales=scales)
    assert int(scales[0]) == formats.MIN_EXPONENT
    assert torch.equal(ops.decode(storage, None, scales), torch.zeros(256))


def test_wrong_storage_is_refused() -> None:
    with pytest.raises(ValueError, match=r"stored as one of float32, bfloat16.*got torch\.float64"):
        ops.encode_(torch.empty(4, dtype=torch.float64), torch.zeros(4))
    with pytest.raises(ValueError, match="float8_e4m3fn storage needs scales"):
        ops.decode(torch.empty(4, dtype=FP8))
