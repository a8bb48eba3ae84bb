"""int4, a storage format from outside ds_zo: whole numbers from -7 to 7, in groups of 64 with a float16 scale."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from ds_zo.ops import Format, FrozenFormat

GROUP_NUMEL = 64
INT4 = Format("int4", torch.bits2x4, scale_dtype=torch.float16, scale_numel=1, group_numel=GROUP_NUMEL, packed_numel=2)
_OFFSET = 8
"""Added to a number, so that a code is not negative."""


def quantise(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A byte for two values, the first in the lower four bits, and the groups' scales. The last group may be short."""
    x = values.detach().reshape(-1).float()
    groups = F.pad(x, (0, -x.numel() % GROUP_NUMEL)).view(-1, GROUP_NUMEL)
    scales = (groups.abs().amax(dim=1) / 7).half()
    factors = torch.where(scales > 0, scales, 1.0).float()[:, None]
    codes = (groups / factors).round().clamp(-7, 7).add(_OFFSET).to(torch.uint8).view(-1, 2)
    packed = codes[:, 0] | (codes[:, 1] << 4)
    return packed[: -(-x.numel() // 2)], scales


def dequantise_(out: torch.Tensor, packed: torch.Tensor, scales: torch.Tensor) -> None:
    packed = packed.view(torch.uint8)
    codes = torch.stack([packed & 15, packed >> 4], dim=1).view(-1)[: out.numel()]
    factors = scales.float().repeat_interleave(GROUP_NUMEL)[: out.numel()]
    out.copy_((codes.float() - _OFFSET) * factors)


ENTRY = FrozenFormat(INT4, quantise, dequantise_)
