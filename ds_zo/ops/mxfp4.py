"""MXFP4, the four-bit format in which gpt-oss ships its experts, for parameters that are not trained.

[Note: mxfp4]
A value is `CODE[index] * 2**(scale - 127)`, computed in float32 and then rounded to the parameter's dtype. Blocks of 32
values share a scale of one byte. A byte holds two indices, the first value's in the lower four bits. The parameter has
the shape (experts, rows, columns). Its packed bytes are in the order of the checkpoint, (experts, columns, rows / 2),
and so are its scales, (experts, columns, rows / 32): decoding transposes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ds_zo.ops import nf4
from ds_zo.ops.formats import Format

_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
CODE = torch.tensor([*_MAGNITUDES, *(-x for x in _MAGNITUDES)], dtype=torch.float32, device="cpu")
GROUP_NUMEL = 32
MXFP4 = Format(
    "mxfp4", torch.float4_e2m1fn_x2, scale_dtype=torch.uint8, scale_numel=1, group_numel=GROUP_NUMEL, packed_numel=2
)
"""Not one of `FORMATS`: no update is ever stored in it."""


@dataclass(frozen=True)
class MXFP4Values(nf4.Quantised):
    """A tensor in MXFP4, with its scales in `absmax`."""

    wire = MXFP4.dtype

    def values(self) -> torch.Tensor:
        out = torch.empty(self.shape, dtype=torch.float32, device="cpu")
        dequantise_(out, self.packed, self.absmax)
        return out


def quantise(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The packed bytes and the scales of a tensor, on its device. Values that are on the grid of some MXFP4 tensor of
    the same shape are kept exactly. See [Note: mxfp4]."""
    x = values.detach().float().transpose(1, 2).reshape(-1, GROUP_NUMEL)
    exponent = torch.frexp(x.abs().amax(dim=1))[1] - 1  # of the largest magnitude; its block then has 4 to 6 at most
    scale = (exponent - 2 + 127).clamp(0, 254)
    scaled = torch.ldexp(x, (127 - scale)[:, None])
    code = CODE[:8].to(x.device)
    magnitude = scaled.abs().contiguous()
    index = torch.bucketize(magnitude, (code[1:] + code[:-1]) / 2, out_int32=True)
    is_tie = magnitude == (code[:-1] + code[1:])[index.clamp(max=6)] / 2
    index = (index + (is_tie & (index % 2 == 1))).to(torch.uint8) | (torch.signbit(x).to(torch.uint8) << 3)
    index = index.view(-1, 2)
    return index[:, 0] | (index[:, 1] << 4), scale.to(torch.uint8)


def dequantise_(out: torch.Tensor, packed: torch.Tensor, scales: torch.Tensor) -> None:
    """Writes the values of `packed` to `out` (experts, rows, columns), in its dtype. All tensors are on the CPU."""
    _, num_rows, num_columns = out.shape
    byte = torch.arange(256, device="cpu")
    pairs = CODE[torch.stack([byte & 15, byte >> 4], dim=1)]
    packed, scales = packed.view(len(out), -1), scales.view(len(out), -1)
    for expert, target in enumerate(out):  # one at a time, so that temporaries stay small
        code = pairs.index_select(0, packed[expert].int()).view(-1, GROUP_NUMEL)
        ones = torch.ones(scales.shape[1], dtype=torch.float32, device="cpu")
        factors = torch.ldexp(ones, scales[expert].int() - 127)
        target.copy_((code * factors[:, None]).view(num_columns, num_rows).T)


def check(out: torch.Tensor, packed: torch.Tensor, scales: torch.Tensor) -> None:
    """Raises if the tensors do not fit together."""
    numel = out.numel()
    is_whole = out.dim() == 3 and out.is_contiguous() and out.shape[1] % GROUP_NUMEL == 0
    if not is_whole or (packed.numel(), scales.numel()) != (numel // 2, numel // GROUP_NUMEL):
        raise ValueError(
            f"MXFP4 needs a contiguous tensor (experts, rows, columns) whose rows are a multiple of {GROUP_NUMEL}, "
            f"half as many packed bytes and a scale for {GROUP_NUMEL} values, got {tuple(out.shape)}, {packed.numel()} "
            f"and {scales.numel()} (out)"
        )
