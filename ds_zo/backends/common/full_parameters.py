"""The attributes of a parameter that `deepspeed.utils.safe_get_full_fp32_param` and its relatives use."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import nn

from ds_zo.streaming.intercepted import plain_class

_NAMES = ("_hp_mapping", "get_full_hp_param", "set_full_hp_param", "get_full_hp_grad", "set_full_hp_grad")


def attach(
    parameter: Any, owner: object, *, read: Callable[[], torch.Tensor], write: Callable[[torch.Tensor], None]
) -> None:
    """Sets the attributes. `read` returns the weights in float32, and `write` replaces them."""
    parameter._hp_mapping = owner
    parameter.get_full_hp_param = partial(_get, read)
    parameter.set_full_hp_param = partial(_set, write)
    parameter.get_full_hp_grad = _no_gradient
    parameter.set_full_hp_grad = _refuse_gradient


def detach(parameter: nn.Parameter, owner: object) -> bool:
    """Removes the attributes, unless they are another engine's. Returns whether they were the owner's."""
    if getattr(parameter, "_hp_mapping", None) is not owner:
        return False
    for name in _NAMES:
        delattr(parameter, name)
    return True


def _get(read: Callable[[], torch.Tensor], optim_state_key: str | None = None) -> torch.Tensor | None:
    return read() if optim_state_key is None else None


def _set(write: Callable[[torch.Tensor], None], value: torch.Tensor, optim_state_key: str | None = None) -> None:
    if optim_state_key is not None:
        raise ValueError(
            "safe_set_full_optimizer_state needs ZeRO's optimizer states, which ds_zo's backends do not have, got "
            f"{optim_state_key!r}: load the state with a checkpoint (load_checkpoint)"
        )
    write(value)


def _no_gradient() -> None:
    """DeepSpeed asks for it where `parameter.grad` is None."""


def _refuse_gradient(value: torch.Tensor) -> None:
    raise ValueError(
        "safe_set_full_grad needs a gradient to replace, and this parameter has none: scale the loss instead, or "
        "change the weight by safe_set_full_fp32_param"
    )


class ResidentParameters:
    """Full access to parameters that are their own storage, until `close`."""

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        *,
        read: Callable[[nn.Parameter], torch.Tensor],
        write: Callable[[nn.Parameter, torch.Tensor], None],
    ) -> None:
        """`read` and `write` must not refer to the engine, which a module that outlives it would keep alive."""
        self._parameters: list[Any] = list(parameters)
        for p in self._parameters:
            attach(p, self, read=partial(read, p), write=partial(write, p))
            p.__reduce_ex__ = partial(_reduced, p)

    def close(self) -> None:
        for p in self._parameters:
            if detach(p, self):
                del p.__reduce_ex__
        self._parameters = []


def _reduced(parameter: nn.Parameter, protocol: Any) -> Any:
    """The parameter's `__reduce_ex__`, so that `torch.save(module)` writes a plain parameter."""
    plain = plain_class(parameter)(parameter.data, parameter.requires_grad)
    own = {*_NAMES, "__reduce_ex__"}
    vars(plain).update({name: value for name, value in vars(parameter).items() if name not in own})
    return plain.__reduce_ex__(protocol)
