"""LoRA beside LOMO: which parameters are adapters, and whose schedule they follow."""

from __future__ import annotations

import torch
from torch import nn


def adapter_parameters(module: nn.Module) -> frozenset[int]:
    """Ids of the parameters that PEFT has added: its layers name the attributes that hold them."""
    found: set[int] = set()
    for m in module.modules():
        for name in getattr(m, "adapter_layer_names", ()):
            held = getattr(m, name, None)
            if isinstance(held, nn.Module):
                found |= {id(p) for p in held.parameters()}
            elif isinstance(held, nn.Parameter):
                found.add(id(held))
    return frozenset(found)


def record_initial_lr(optimizer: torch.optim.Optimizer) -> None:
    """Notes each group's rate before a scheduler changes it, under the name that torch's schedulers give it."""
    for group in optimizer.param_groups:
        group.setdefault("initial_lr", group["lr"])
