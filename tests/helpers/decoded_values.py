"""Values as a storage format holds them, for comparisons with a base that is stored in that format."""

from __future__ import annotations

import copy

import torch
from torch import nn

from ds_zo import ops
from ds_zo.streaming.placement import WIRE


def decoded(value: torch.Tensor, form: str) -> torch.Tensor:
    if (packed := ops.PACKED.get(WIRE[form])) is not None:
        found = torch.empty(value.numel(), dtype=value.dtype)
        packed.dequantise_(found, *packed.quantise(value))
        return found.view(value.shape)
    fmt = ops.storage_format(WIRE[form])
    padded = torch.zeros(-(-value.numel() // 256) * 256)
    padded[: value.numel()] = value.reshape(-1)
    storage = torch.empty(padded.numel(), dtype=fmt.dtype)
    scales = torch.zeros(padded.numel() // 256 * fmt.scale_numel, dtype=fmt.scale_dtype)
    ops.encode_(storage, padded, scales=scales)
    return ops.decode(storage, scales=scales)[: value.numel()].view(value.shape).to(value.dtype)


def with_decoded_base(model: nn.Module, form: str) -> nn.Module:
    """A copy whose frozen matrices of blocks have the values that `form` stores."""
    model = copy.deepcopy(model)
    frozen = [p for n, p in model.named_parameters() if ".layers." in n and p.dim() == 2 and not p.requires_grad]
    assert frozen
    for p in frozen:
        p.data = decoded(p.data, form)
    return model
