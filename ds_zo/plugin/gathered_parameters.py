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

from ds_zo.backends.common.module_state import ModuleState

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
    self._ds_zo_listed = list({id(p): p for p in listed if enabled}.values())
    self._ds_zo_modifier_rank = modifier_rank


def _enter(self: Any) -> Any:
    entered = _stock_enter(self)
    states = [(p, getattr(p, "_hp_mapping", None)) for p in self._ds_zo_listed]
    self._ds_zo_lent = [(p, state) for p, state in states if isinstance(state, ModuleState)]
    own: dict[ModuleState, list[nn.Parameter]] = {}
    for parameter, state in self._ds_zo_lent:
        if parameter not in state.gathered_copies:  # else a context around this one shows it, and goes on
            own.setdefault(state, []).append(parameter)
    for state, parameters in own.items():
        state.gather(parameters)
    self._ds_zo_own = {id(parameter) for parameters in own.values() for parameter in parameters}
    return entered


def _exit(self: Any, *exception: Any) -> Any:
    keeps = self._ds_zo_modifier_rank is not None and exception[0] is None
    lent = [(p, state) for p, state in self._ds_zo_lent if p in state.gathered_copies]  # none of an engine that is gone
    # All values first: to write one binds its whole unit to where it is stored.
    values = [
        state.gathered_copies.remove(p) if id(p) in self._ds_zo_own else state.gathered_copies.value_of(p)
        for p, state in lent
    ]
    for (parameter, state), value in zip(lent, values, strict=True):
        if keeps:
            if dist.is_initialized() and dist.get_world_size() > 1:
                value = value.to(state.device)
                dist.broadcast(value, self._ds_zo_modifier_rank)
            state.store(parameter, value)
        if id(parameter) in self._ds_zo_own:
            state.bind_stored(parameter)
    return _stock_exit(self, *exception)
