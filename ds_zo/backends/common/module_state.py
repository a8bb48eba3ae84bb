"""`state_dict`, `load_state_dict` and DeepSpeed's full-parameter accessors for a module whose stored weights lag or
live elsewhere.

Hooks on the modules that own parameters, so that a submodule's `state_dict()` is as right as the whole model's.
"""

from __future__ import annotations

import sys
import weakref
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from deepspeed.utils import logger
from torch import nn

from ds_zo.backends.common.gathered_copies import GatheredCopies
from ds_zo.backends.common.plain_copies import Hook, StandIn
from ds_zo.streaming.units import Placed, Unit
from ds_zo.streaming.watched import plain_class, unwatch, watch


class ModuleState(ABC):
    """Makes reading and writing a module's weights by name mean the weights of the current step."""

    def __init__(self, units: Iterable[Unit], module: nn.Module, *, device: torch.device) -> None:
        self.device = device
        self._units = list(units)
        self._placement_of: dict[int, tuple[Unit, Placed]] = {
            id(p.parameter): (u, p) for u in self._units for p in u.placed
        }
        names = Counter(id(p) for _, p in module.named_parameters(remove_duplicate=False))
        self._tied: dict[int, weakref.ref[torch.Tensor] | None] = {key: None for key, n in names.items() if n > 1}
        """Parameters with several names, and the copy of each that was last handed out."""
        self._staged: list[nn.Parameter] = []
        self.gathered_copies = GatheredCopies()
        self._has_warned_of_copies = False
        self._handles = []
        for m in module.modules():
            if any(p is not None and id(p) in self._placement_of for p in m._parameters.values()):
                self._handles.append(m.register_state_dict_pre_hook(Hook(self._unwatch_owner)))
                self._handles.append(m.register_state_dict_post_hook(Hook(self._put_current_weights)))
                self._handles.append(m.register_load_state_dict_pre_hook(Hook(self._stage)))
                self._handles.append(m.register_load_state_dict_post_hook(Hook(self._store_staged)))
        for unit, placed in self._placement_of.values():
            self._attach_accessors(placed.parameter, partial(self._full_fp32, unit, placed))
        self._module = module
        self._apply = StandIn(self._ignore_move, module._apply) if self._placement_of else None
        if self._apply is not None:
            object.__setattr__(module, "_apply", self._apply)
        self.watch()

    # Reads and writes that ask nobody: [Note: bare reads]

    def watch(self) -> None:
        """From now on parameters tell who reads them, until `unwatch`."""
        for unit in self._units:
            if self._is_watched(unit):
                unit.watch()

    def unwatch(self) -> None:
        for unit in self._units:
            if unit.is_watched:
                unit.unwatch()

    @contextmanager
    def unwatched(self) -> Iterator[None]:
        """Around the engine's own work: parameters are plain."""
        try:
            self.unwatch()
            yield
        finally:
            self.watch()

    def _is_watched(self, unit: Unit) -> bool:
        return self._is_materialised_in_forward(unit)

    @abstractmethod
    def bring_up(self, parameter: nn.Parameter) -> None:
        """Makes it show the weights of the current step. A read inside a forward finds what visits have left."""

    def replace(self, parameter: nn.Parameter, value: torch.Tensor) -> bool:
        """What somebody assigns to `parameter.data` becomes the stored weight. False: it is none of the weight's
        kind, or not this rank's alone to store."""
        unit, _ = self._placement_of[id(parameter)]
        if value.shape != parameter.shape or value.dtype is not parameter.dtype or self._is_busy():
            return False
        if self._is_shared(unit):
            self._warn_of_copies(unit)
            return False
        self.store(parameter, value)
        return True

    def _is_busy(self) -> bool:
        """A forward has bound parameters to what it brought up."""
        return False

    def _is_shared(self, unit: Unit) -> bool:
        """Ranks keep what is stored together, so that one rank must not write to it."""
        return False

    def _show_copies(self, unit: Unit, *, step: int) -> None:
        """Where what is stored is not for others to see."""
        if unit.shown_step != step:
            self._warn_of_copies(unit)
            values = [self.read(placed.parameter).to(placed.parameter.device, copy=True) for placed in unit.placed]
            unit.show(values, step=step)

    def _warn_of_copies(self, unit: Unit) -> None:
        if self._has_warned_of_copies:
            return
        self._has_warned_of_copies = True
        logger.warning(
            f"ds_zo: weights of {unit.name} were read between steps by their parameters, which show copies in host "
            "memory until the next forward: what is written to a copy in place is lost. Write under "
            "deepspeed.zero.GatheredParameters(..., modifier_rank=0) or by load_state_dict; before "
            "merge_and_unload(), where several ranks keep blocks together, call engine.destroy()"
        )

    def _ignore_move(self, convert: Callable[..., Any], recurse: bool = True) -> nn.Module:
        """What `to`, `half`, `cpu` and the like call: moved, weights would leave their homes behind."""
        logger.warning(
            "ds_zo: an engine has this module's weights, so .to(), .half(), .cpu() and Trainer's bf16_full_eval and "
            "fp16_full_eval leave them as they are: move a copy.deepcopy of it, or call engine.destroy() first"
        )
        return self._module

    def _attach_accessors(self, parameter: Any, full: Callable[[], torch.Tensor]) -> None:
        # What deepspeed.utils.safe_get_full_fp32_param and safe_set_full_fp32_param look for.
        parameter._hp_mapping = self
        parameter.get_full_hp_param = full
        parameter.set_full_hp_param = partial(self.store, parameter)
        parameter.__deepcopy__ = partial(self._plain_copy, parameter)

    def _detach_accessors(self, parameter: nn.Parameter) -> None:
        if getattr(parameter, "_hp_mapping", None) is self:
            for name in ("_hp_mapping", "get_full_hp_param", "set_full_hp_param", "__deepcopy__"):
                delattr(parameter, name)

    def owns_module(self) -> bool:
        """False once another engine has been made of the same module: its weights are no longer ours to touch."""
        return all(getattr(placed.parameter, "_hp_mapping", None) is self for _, placed in self._placement_of.values())

    @abstractmethod
    def read(self, parameter: nn.Parameter) -> torch.Tensor:
        """A copy of the current weights in host memory; the parameter itself where it holds them already."""

    @abstractmethod
    def write(self, parameter: nn.Parameter, value: torch.Tensor) -> None:
        """Stores a weight, in whatever form."""

    @abstractmethod
    def _full_fp32(self, unit: Unit, placed: Placed) -> torch.Tensor:
        """A copy of the current weights in float32."""

    @abstractmethod
    def _before_load(self, unit: Unit) -> None:
        """Weights of `unit` are about to be written."""

    def close(self) -> None:
        self.gathered_copies.close(rebind=self.owns_module() and not sys.is_finalizing())
        if self.owns_module():
            self.unwatch()
        self._units = []
        for handle in self._handles:
            handle.remove()
        if self._apply is not None and self._module.__dict__.get("_apply") is self._apply:
            object.__delattr__(self._module, "_apply")
        for _, placed in self._placement_of.values():
            self._detach_accessors(placed.parameter)

    def _unwatch_owner(self, module: nn.Module, prefix: str, keep_vars: bool) -> None:
        """`state_dict` takes what parameters show, which `_put_current_weights` replaces."""
        unwatch(p for p in module._parameters.values() if p is not None)

    def _put_current_weights(self, module: nn.Module, state_dict: dict[str, Any], prefix: str, metadata: Any) -> None:
        for name, p in module._parameters.items():
            if p is None or id(p) not in self._placement_of or p in self.gathered_copies:
                continue
            if prefix + name in state_dict:
                state_dict[prefix + name] = self._read_into(state_dict, p)
            if self._placement_of[id(p)][0].is_watched:
                watch([p])

    def _read_into(self, state_dict: Mapping[str, Any], p: nn.Parameter) -> torch.Tensor:
        """A tied weight is one tensor under all its names there, as in any `state_dict`."""
        if id(p) not in self._tied:
            return self.read(p)
        before = self._tied[id(p)]
        shared = None if before is None else before()
        if shared is None or not any(value is shared for value in state_dict.values()):
            shared = self.read(p)
            self._tied[id(p)] = weakref.ref(shared)
        return shared

    def _stage(self, module: nn.Module, state_dict: Mapping[str, Any], prefix: str, *rest: Any) -> None:
        """Real memory for `load_state_dict` to copy into: the stored bytes may have another form, and updates
        pending."""
        staged = [
            p
            for name, p in module._parameters.items()
            if p is not None and prefix + name in state_dict and id(p) in self._placement_of
        ]
        for p in staged:
            self._before_load(self._placement_of[id(p)][0])
        # Read first: a read binds the whole unit to its home again.
        values = [torch.empty(p.shape, dtype=p.dtype, device="cpu").copy_(self.read(p)) for p in staged]
        unwatch(staged)
        for p, value in zip(staged, values, strict=True):
            p.data = value
        self._staged += staged

    def _store_staged(self, module: nn.Module, incompatible_keys: Any) -> None:
        # All values first: a write binds the whole unit to its home again.
        values = [(p, p.data) for p in self._staged]
        self._staged.clear()
        for p, value in values:
            self.store(p, value)

    def gather(self, parameters: Sequence[nn.Parameter]) -> None:
        """Points parameters at copies of the current weights, which are theirs until `lending.take_back`."""
        owners: dict[int, list[nn.Module]] = {id(p): [] for p in parameters}
        for m in self._module.modules():
            for p in m._parameters.values():
                if id(p) in owners:
                    owners[id(p)].append(m)
        # All values first: to read one may fail.
        values = [self.read(p).clone() for p in parameters]
        for p, value in zip(parameters, values, strict=True):
            unit = self._placement_of[id(p)][0] if id(p) in self._placement_of else None
            checked_modules: list[nn.Module] = []
            if unit is not None and self._is_materialised_in_forward(
                unit
            ):  # a block's as a whole, others by each module that has them
                checked_modules = [
                    unit.module,
                    *(m for m in owners[id(p)] if m is not unit.module and not unit.is_block),
                ]
            self.gathered_copies.add(p, value, unit=unit, checked_modules=checked_modules)

    def _is_materialised_in_forward(self, unit: Unit) -> bool:
        """Its parameters are pointed elsewhere while its module runs."""
        return True

    def bind_stored(self, parameter: nn.Parameter) -> None:
        """After somebody pointed it at memory of their own."""
        self._placement_of[id(parameter)][0].bind_stored()

    def _plain_copy(self, parameter: nn.Parameter, memo: dict[int, Any]) -> nn.Parameter:
        """The current weights, and nothing that refers to an engine; the device is the one that it shows."""
        device = parameter.device
        if parameter in self.gathered_copies:
            value = parameter.detach().clone()
        else:
            value = self.read(parameter).to(device, copy=True)
            self.bind_stored(parameter)
        return plain_class(parameter)(value, parameter.requires_grad)

    def store(self, parameter: nn.Parameter, value: torch.Tensor) -> None:
        """Writes a weight, and shows it where a copy is shown."""
        self.write(parameter, value)
        if parameter in self.gathered_copies:
            self.gathered_copies.update(parameter, value)
