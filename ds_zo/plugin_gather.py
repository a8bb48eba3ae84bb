"""`deepspeed.zero.GatheredParameters` for parameters that a backend of ours keeps.

DeepSpeed's own context does nothing for them, and what they show between steps may lag the current step or be a
placeholder. Inside the context they are whole and current; after one with a `modifier_rank`, what that rank wrote is
kept.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import deepspeed.comm as dist
import torch
from deepspeed.runtime.zero.partition_parameters import GatheredParameters
from torch import nn

from ds_zo.engines.module_state import ModuleState

_stock_init = GatheredParameters.__init__
_stock_enter = GatheredParameters.__enter__
_stock_exit = GatheredParameters.__exit__


def install() -> None:
    GatheredParameters.__init__ = _init
    GatheredParameters.__enter__ = _enter
    GatheredParameters.__exit__ = _exit


def _init(
    self: Any,
    params: nn.Parameter | Iterable[nn.Parameter],
    modifier_rank: int | None = None,
    *args: Any,
    **kwargs: Any,
) -> None:
    if not isinstance(params, torch.Tensor):
        params = list(params)
    _stock_init(self, params, modifier_rank, *args, **kwargs)
    enabled = kwargs.get("enabled", args[1] if len(args) > 1 else True)
    listed = [params] if isinstance(params, torch.Tensor) else params
    ours = {id(p): p for p in listed if enabled and isinstance(getattr(p, "_hp_mapping", None), ModuleState)}
    self._ds_zo_lent = list(ours.values())
    self._ds_zo_modifier_rank = modifier_rank


def _enter(self: Any) -> Any:
    entered = _stock_enter(self)
    # All values first, here and below: to read or write one binds its whole unit to where it is stored.
    values = [parameter._hp_mapping.read(parameter).clone() for parameter in self._ds_zo_lent]
    for parameter, value in zip(self._ds_zo_lent, values, strict=True):
        parameter.data = value
        parameter._hp_mapping.lent.add(id(parameter))
    return entered


def _exit(self: Any, *exception: Any) -> Any:
    values = [parameter.data for parameter in self._ds_zo_lent]
    for parameter, value in zip(self._ds_zo_lent, values, strict=True):
        parameter._hp_mapping.lent.discard(id(parameter))
        if self._ds_zo_modifier_rank is None or exception[0] is not None:
            parameter._hp_mapping.return_home(parameter)
            continue
        if dist.is_initialized() and dist.get_world_size() > 1:
            value = value.to(parameter._hp_mapping.device)
            dist.broadcast(value, self._ds_zo_modifier_rank)
        parameter._hp_mapping.write(parameter, value)
    return _stock_exit(self, *exception)
