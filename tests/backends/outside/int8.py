"""int8, a storage format from outside ds_zo: whole numbers from -127 to 127, in groups of 64 with a float32 scale."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from ds_zo.ops import Format, FrozenFormat

GROUP_NUMEL = 64
INT8 = Format("int8", torch.bits8, scale_dtype=torch.float32, scale_numel=1, group_numel=GROUP_NUMEL)


def quantise(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A byte for each value, and the groups' scales. The last group may be short."""
    x = values.detach().reshape(-1).float()
    groups = F.pad(x, (0, -x.numel() % GROUP_NUMEL)).view(-1, GROUP_NUMEL)
    scales = groups.abs().amax(dim=1) / 127
    codes = (groups / torch.where(scales > 0, scales, 1.0)[:, None]).round().clamp(-127, 127).to(torch.int8)
    return codes.view(torch.uint8).view(-1)[: x.numel()], scales


def dequantise_(out: torch.Tensor, packed: torch.Tensor, scales: torch.Tensor) -> None:
    out.copy_(packed.view(torch.int8) * scales.repeat_interleave(GROUP_NUMEL)[: out.numel()])


ENTRY = FrozenFormat(INT8, quantise, dequantise_)
