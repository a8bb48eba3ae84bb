"""Adapters of PEFT, such as LoRA, that are trained together with LOMO."""

from __future__ import annotations

import torch
from torch import nn


def adapter_parameters(module: nn.Module) -> frozenset[int]:
    """Ids of the parameters that PEFT has added. PEFT's layers list the attributes that hold them in
    `adapter_layer_names`."""
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
    """Stores each group's learning rate as `initial_lr`, the name that torch's schedulers use, before a scheduler
    changes it."""
    for group in optimizer.param_groups:
        group.setdefault("initial_lr", group["lr"])
