"""The attributes of a parameter that `deepspeed.utils.safe_get_full_fp32_param` and its relatives use."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from ds_zo.backends.common.weights_by_name import WeightsByName
from ds_zo.streaming.intercepted import OWNER, owner_of, plain_class

_NAMES = ("_hp_mapping", "get_full_hp_param", "set_full_hp_param", "get_full_hp_grad", "set_full_hp_grad")
_OWN = {*_NAMES, OWNER, "__deepcopy__", "__reduce_ex__"}
"""Attributes that a plain copy of a parameter does not have."""


def attach(module: nn.Module) -> Callable[[], None]:
    """Gives DeepSpeed's accessors the parameters that one of our engines owns, and returns a function that takes them
    away."""
    owned = [(p, owner) for p in module.parameters() if (owner := owner_of(p)) is not None]
    for parameter, owner in owned:
        _attach(parameter, owner)
    return partial(_detach, owned)


def _attach(parameter: Any, owner: WeightsByName) -> None:
    parameter._hp_mapping = owner
    parameter.get_full_hp_param = partial(_get, owner, parameter)
    parameter.set_full_hp_param = partial(_set, owner, parameter)
    parameter.get_full_hp_grad = _no_gradient
    parameter.set_full_hp_grad = _refuse_gradient
    parameter.__reduce_ex__ = partial(_reduced, owner, parameter)


def _detach(owned: list[tuple[nn.Parameter, WeightsByName]]) -> None:
    """Another engine of the same module may have set its own attributes, which stay."""
    for parameter, owner in owned:
        if getattr(parameter, "_hp_mapping", None) is owner:
            for name in (*_NAMES, "__reduce_ex__"):
                delattr(parameter, name)


def _get(owner: WeightsByName, parameter: nn.Parameter, optim_state_key: str | None = None) -> torch.Tensor | None:
    return owner.read_full(parameter) if optim_state_key is None else None


def _set(
    owner: WeightsByName, parameter: nn.Parameter, value: torch.Tensor, optim_state_key: str | None = None
) -> None:
    if optim_state_key is not None:
        raise ValueError(
            "safe_set_full_optimizer_state needs ZeRO's optimizer states, which ds_zo's backends do not have, got "
            f"{optim_state_key!r}: load the state with a checkpoint (load_checkpoint)"
        )
    owner.write_full(parameter, value)


def _no_gradient() -> None:
    """DeepSpeed asks for it where `parameter.grad` is None."""


def _refuse_gradient(value: torch.Tensor) -> None:
    raise ValueError(
        "safe_set_full_grad needs a gradient to replace, and this parameter has none: scale the loss instead, or "
        "change the weight by safe_set_full_fp32_param"
    )


def _reduced(owner: WeightsByName, parameter: nn.Parameter, protocol: Any) -> Any:
    """The parameter's `__reduce_ex__`, so that `torch.save(module)` writes a plain parameter."""
    plain = plain_class(parameter)(owner.read(parameter), parameter.requires_grad)
    vars(plain).update({name: value for name, value in vars(parameter).items() if name not in _OWN})
    return plain.__reduce_ex__(protocol)
