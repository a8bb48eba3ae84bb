"""MXFP4: values have the bits that transformers computes, and values on its grid are kept."""

from __future__ import annotations

import pytest
import torch

from ds_zo import ops
from ds_zo.ops import mxfp4


def planes(num_experts: int, num_rows: int, num_columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Random packed bytes and every scale but 255, which means NaN, in a checkpoint's order."""
    generator = torch.Generator().manual_seed(0)
    blocks = torch.randint(
        0, 256, (num_experts, num_columns, num_rows // 32, 16), dtype=torch.uint8, generator=generator
    )
    scales = (torch.arange(blocks[..., 0].numel()) % 255).to(torch.uint8).view(blocks.shape[:-1])
    return blocks, scales


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
def test_values_are_those_of_transformers(dtype: torch.dtype) -> None:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    blocks, scales = planes(3, 64, 50)
    theirs = convert_moe_packed_tensors(blocks, scales).to(dtype)
    ours = torch.empty(3, 64, 50, dtype=dtype)
    ops.dequantise_mxfp4_(ours, blocks.view(-1), scales.view(-1))
    assert torch.equal(ours.isnan(), theirs.isnan())
    number = ~theirs.isnan()
    bits = torch.int32 if dtype is torch.float32 else torch.int16
    assert torch.equal(ours.view(bits)[number], theirs.view(bits)[number])


def test_values_on_the_grid_are_kept() -> None:
    blocks, scales = planes(2, 64, 40)
    scales = scales % 200 + 20
    values = mxfp4.MXFP4Values(blocks.view(-1), scales.view(-1), (2, 64, 40)).values()
    again = mxfp4.MXFP4Values(*mxfp4.quantise(values), (2, 64, 40)).values()
    assert torch.equal(again.view(torch.int32), values.view(torch.int32))


def test_other_values_go_to_the_nearest() -> None:
    values = torch.randn(2, 64, 24, generator=torch.Generator().manual_seed(0))
    values[0, :32, 0] = 0
    values[0, :32, 1] = torch.tensor([6.0, 0.25, 0.75, 1.25, 2.5, 3.5, 5.0, -0.25]).repeat(4)
    found = mxfp4.MXFP4Values(*mxfp4.quantise(values), (2, 64, 24)).values()
    assert found[0, :8, 1].tolist() == [6.0, 0.0, 1.0, 1.0, 2.0, 4.0, 4.0, 0.0], "ties go to even"
    assert not found[0, :32, 0].any()
    largest = values.view(2, 2, 32, 24).abs().amax(dim=2, keepdim=True)
    assert ((found - values).view(2, 2, 32, 24).abs() <= largest / 4).all()


def test_planes_of_the_wrong_size_are_refused() -> None:
    blocks, scales = planes(1, 32, 8)
    for shape in ((1, 32, 7), (32, 8), (1, 16, 16)):
        with pytest.raises(ValueError, match=r"MXFP4 needs a contiguous tensor .*\(out\)"):
            ops.dequantise_mxfp4_(torch.empty(shape), blocks.view(-1), scales.view(-1))
