"""`deepspeed.zero.GatheredParameters` for parameters that one of our backends keeps.

DeepSpeed's own context ignores such parameters. Between steps a parameter may show the weights of an earlier step, or a
placeholder. Inside the context it shows its whole current weights. If the context has a `modifier_rank`, the values
that this rank wrote are stored when the context ends.

[Note: forwards inside] A forward materialises the stored weights, so it would not use values that a user has written to
a copy. It is refused in a context with a `modifier_rank`, and after a change in another one. Training inside is refused
too: the end of the context would overwrite an update of the stored weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from types import SimpleNamespace
from typing import Any

import deepspeed.comm as dist
import torch
from deepspeed.runtime.zero.partition_parameters import GatheredParameters, ZeroParamStatus
from torch import nn
from torch.utils.hooks import RemovableHandle

from ds_zo.backends.common.plain_copies import Hook
from ds_zo.backends.common.weights_by_name import WeightsByName
from ds_zo.streaming.intercepted import owner_of


def init(
    original: Callable[..., None], self: Any, params: Any, modifier_rank: int | None = None, *args: Any, **kwargs: Any
) -> None:
    """`GatheredParameters.__init__` that makes the context an `EngineParameters` where one of our engines has one of
    the parameters. Every other context stays DeepSpeed's own."""
    if isinstance(params, Iterable) and not isinstance(params, torch.Tensor):
        params = list(params)
    original(self, params, modifier_rank, *args, **kwargs)
    enabled = kwargs.get("enabled", args[1] if len(args) > 1 else True)
    listed = params if isinstance(params, list) else [params]
    if enabled and any(owner_of(p) is not None for p in listed):
        cls = type(self)  # a user's own subclass is put on top of ours
        own = EngineParameters if cls is GatheredParameters else type(cls.__name__, (cls, EngineParameters), {})
        self.__class__ = own
        self._ds_zo_listed = list({id(p): p for p in listed}.values())
        self._ds_zo_modifier_rank = modifier_rank


class EngineParameters(GatheredParameters):
    """A `GatheredParameters` context with parameters of one of our engines."""

    _ds_zo_listed: list[nn.Parameter]
    _ds_zo_modifier_rank: int | None
    _ds_zo_shown: list[tuple[nn.Parameter, WeightsByName]]
    """Parameters that show copies inside the context, with the weights of their engine."""
    _ds_zo_own: set[int]
    """Ids of the parameters that this context made copies for; an enclosing context made the other copies."""
    _ds_zo_handles: list[RemovableHandle]

    def __enter__(self) -> Any:
        entered = super().__enter__()
        owners = [(p, owner_of(p)) for p in self._ds_zo_listed]
        self._ds_zo_shown = [(p, owner) for p, owner in owners if owner is not None]
        listed: dict[WeightsByName, list[nn.Parameter]] = {}
        for parameter, owner in self._ds_zo_shown:
            listed.setdefault(owner, []).append(parameter)
        self._ds_zo_own = {id(p) for p, owner in self._ds_zo_shown if not owner.is_gathered(p)}
        self._ds_zo_handles = []
        is_written = self._ds_zo_modifier_rank is not None
        for owner, parameters in listed.items():
            owner.gather([p for p in parameters if id(p) in self._ds_zo_own])
            for module, its in owner.modules_that_materialise(parameters).items():
                check = torch.compiler.disable(partial(owner.check_forward, its, is_written))
                self._ds_zo_handles.append(module.register_forward_pre_hook(Hook(check), prepend=True))
        _open_contexts.append(self)
        return entered

    def __exit__(self, *exception: Any) -> Any:
        _open_contexts.remove(self)
        for handle in self._ds_zo_handles:
            handle.remove()
        keeps = self._ds_zo_modifier_rank is not None and exception[0] is None
        shown = [(p, owner) for p, owner in self._ds_zo_shown if owner_of(p) is owner]  # empty after destroy()
        # All values are read before the first is stored: storing one binds its whole unit to its stored buffers.
        values = [owner.gathered_value(p) for p, owner in shown]
        for p, owner in shown:
            if id(p) in self._ds_zo_own and owner.is_gathered(p):
                owner.release(p)
        for (parameter, owner), value in zip(shown, values, strict=True):
            if keeps:
                if dist.is_initialized() and dist.get_world_size() > 1:
                    value = value.to(owner.device, copy=True)
                    dist.broadcast(value, self._ds_zo_modifier_rank)
                owner.store(parameter, value)
            if id(parameter) in self._ds_zo_own:
                owner.bind_stored(parameter)
        return super().__exit__(*exception)


_open_contexts: list[EngineParameters] = []
"""Contexts that are entered and not left."""


def refuse_to_train_inside(module: nn.Module) -> None:
    """Raises inside a context that has a parameter of `module`. See [Note: forwards inside]."""
    if not _open_contexts:
        return
    own = {id(p) for p in module.parameters()}
    if any(id(p) in own for context in _open_contexts for p in context._ds_zo_listed):
        raise RuntimeError(
            "a model must not train inside deepspeed.zero.GatheredParameters, where its parameters may show copies, "
            "got a training forward or backward there: leave it first; a forward under torch.no_grad() works there"
        )


def set_zero3_attributes(optimizer: Any, module: nn.Module) -> Callable[[], None]:
    """Sets the attributes of ZeRO-3 that TRL reads where the JSON says stage 3, and returns a function that removes
    them.

    Before TRL generates inside `GatheredParameters`, it removes the hooks of `optimizer.parameter_offload`, and it
    registers them afterwards: there are none. Its fused losses gather parameters whose `ds_status` is not AVAILABLE:
    our engines show a weight wherever it is read.
    """
    parameters = list(module.parameters())
    optimizer.parameter_offload = SimpleNamespace(
        module=_NoParameters(), forward_hooks=[], backward_hooks=[], _register_deepspeed_module=lambda module: None
    )
    for parameter in parameters:
        parameter.ds_status = ZeroParamStatus.AVAILABLE  # type: ignore[attr-defined]

    def remove() -> None:
        vars(optimizer).pop("parameter_offload", None)
        for parameter in parameters:
            vars(parameter).pop("ds_status", None)

    return remove


class _NoParameters(nn.Module):
    """A module without parameters. It has the method that ZeRO-3 adds to modules."""

    def ds_external_parameters(self) -> Iterable[tuple[str, nn.Parameter]]:
        return ()
