"""Ownership of parameters: one object of an engine reads and writes the weights behind each of them."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn

from ds_zo.streaming.intercepted import OWNER, owner_of, plain_class


class LowBits:
    """What a backend keeps of weights besides the parameters' own dtype. In this class it keeps nothing."""

    def added(self, parameter: nn.Parameter, full: torch.Tensor) -> torch.Tensor:
        """Returns the weights with these bits. `full`: the weights in float32, which may be changed."""
        return full

    def keep(self, parameter: nn.Parameter, value: torch.Tensor) -> None:
        """Called after the parameter was set to the rounded `value`."""


def attach(parameter: Any, owner: Any) -> None:
    """Makes `owner`, a `WeightsByName`, the owner of the parameter. Copies of the parameter are plain parameters."""
    setattr(parameter, OWNER, owner)
    parameter.__deepcopy__ = partial(_plain_copy, owner, parameter)


def detach(parameter: nn.Parameter, owner: Any) -> None:
    """Ends the ownership, unless another engine owns the parameter."""
    if owner_of(parameter) is owner:
        delattr(parameter, OWNER)
        del parameter.__deepcopy__


def _plain_copy(owner: Any, parameter: nn.Parameter, memo: dict[int, Any]) -> nn.Parameter:
    """The parameter's `__deepcopy__`: a plain parameter with the current weights, on the device that the parameter
    reports, without references to the engine."""
    device = parameter.device
    if owner.is_gathered(parameter):
        value = parameter.detach().clone()
    else:
        value = owner.read(parameter).to(device, copy=True)
        owner.bind_stored(parameter)
    return plain_class(parameter)(value, parameter.requires_grad)
