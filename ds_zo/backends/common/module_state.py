"""Access by name to the current weights of a module whose parameters do not hold them between steps.

A backend may store weights in another form or in host memory, or have updates pending. `ModuleState` makes
`state_dict`, `load_state_dict`, DeepSpeed's accessors of full parameters, `copy.deepcopy` and plain reads of a
parameter return and change the weights of the current step. It registers hooks on each module that owns parameters, so
that the `state_dict()` of a submodule is right too.
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

from ds_zo.backends.common import full_parameters
from ds_zo.backends.common.plain_copies import Hook, StandIn
from ds_zo.streaming.intercepted import intercept, plain_class, stop_intercepting
from ds_zo.streaming.units import PlacedParameter, Unit, UnitState


class ModuleState(ABC):
    """Gives access to the weights of the current step through the module's parameters. See this module's docstring.

    A backend implements `refresh`, `read`, `write`, `_full_fp32` and `_before_load`.
    """

    def __init__(self, units: Iterable[Unit], module: nn.Module, *, device: torch.device) -> None:
        """`units`: the groups of parameters that the backend has placed."""
        self.device = device
        self._units = list(units)
        self._placement_of: dict[int, tuple[Unit, PlacedParameter]] = {
            id(p.parameter): (u, p) for u in self._units for p in u.placed
        }
        """The unit and the placement of each parameter, by the parameter's id."""
        names = Counter(id(p) for _, p in module.named_parameters(remove_duplicate=False))
        self._tied: dict[int, weakref.ref[torch.Tensor] | None] = {key: None for key, n in names.items() if n > 1}
        """The last copy that `state_dict` was given of each tied parameter, by the parameter's id. None: no copy
        yet."""
        self._staged: list[nn.Parameter] = []
        """Parameters that point at temporary memory while `load_state_dict` writes to them."""
        self._marks_of_copies: dict[int, tuple[int, int]] = {}
        """Version and address of each gathered copy when it was made or last stored, by the parameter's id."""
        self._has_warned_of_copies = False
        self._decodes_frozen = True
        """False: `state_dict` has placeholders without memory for the frozen weights of units that decode some."""
        self._save: StandIn | None = None
        if hasattr(module, "peft_config") and hasattr(module, "save_pretrained"):
            save: Callable[..., Any] = module.save_pretrained  # type: ignore[assignment]
            self._save = StandIn.put(module, "save_pretrained", partial(self._save_adapters, save))
        self._handles = []
        for m in module.modules():
            if any(p is not None and id(p) in self._placement_of for p in m._parameters.values()):
                self._handles.append(m.register_state_dict_pre_hook(Hook(self._unwatch_parameters)))
                self._handles.append(m.register_state_dict_post_hook(Hook(self._put_current_weights)))
                self._handles.append(m.register_load_state_dict_pre_hook(Hook(self._stage)))
                self._handles.append(m.register_load_state_dict_post_hook(Hook(self._store_staged)))
        for unit, placed in self._placement_of.values():
            self._attach_accessors(placed.parameter, partial(self._full_fp32, unit, placed))
        self._module = module
        self._apply = StandIn.put(module, "_apply", self._ignore_move) if self._placement_of else None
        self.intercept()

    # Reads and writes of a parameter itself: [Note: direct access to parameters]

    def intercept(self) -> None:
        """From now until `stop_intercepting`, a read of a parameter calls `refresh` first, and a write `replace`."""
        for unit in self._units:
            if self._is_watched(unit):
                unit.intercept()

    def stop_intercepting(self) -> None:
        for unit in self._units:
            if unit.is_intercepted:
                unit.stop_intercepting()

    @contextmanager
    def unwatched(self) -> Iterator[None]:
        """Context of the engine's own work, in which parameters are plain `nn.Parameter`s."""
        try:
            self.stop_intercepting()
            yield
        finally:
            self.intercept()

    def _is_watched(self, unit: Unit) -> bool:
        """Whether `intercept` applies to the unit's parameters."""
        return self._is_materialised_in_forward(unit)

    @abstractmethod
    def refresh(self, parameter: nn.Parameter) -> None:
        """Makes a parameter show the weights of the current step. Called before a read outside of the engine. Inside a
        forward it must leave parameters as the forward has bound them."""

    def replace(self, parameter: nn.Parameter, value: torch.Tensor) -> bool:
        """Called when a user assigns `value` to `parameter.data`: stores it as the weight. Returns False where torch is
        to make the assignment instead. This is so if the shape or the dtype differs, while a forward runs, and if
        several ranks share the storage."""
        unit, _ = self._placement_of[id(parameter)]
        if value.shape != parameter.shape or value.dtype is not parameter.dtype or self._is_busy():
            return False
        if self._is_shared(unit):
            self._warn_of_copies(unit)
            return False
        self.store(parameter, value)
        return True

    def _is_busy(self) -> bool:
        """Whether a forward or backward is running and uses a unit."""
        return any(unit.in_use for unit in self._units)

    def _is_shared(self, unit: Unit) -> bool:
        """Whether several ranks share the storage of the unit, so that one rank must not write to it."""
        return False

    def _show_copies(self, unit: Unit, *, step: int) -> None:
        """Points the unit's parameters at copies of the weights of `step`, because a user must not see or change the
        storage itself."""
        if unit.copies_step != step:
            self._warn_of_copies(unit)
            values = [self.read(placed.parameter).to(placed.parameter.device, copy=True) for placed in unit.placed]
            unit.show_copies(values, step=step)

    def _warn_of_copies(self, unit: Unit) -> None:
        if self._has_warned_of_copies:
            return
        self._has_warned_of_copies = True
        logger.warning(
            f"ds_zo: weights of {unit.name} were read between steps through their parameters, which hold copies in "
            "host memory until the next forward: a write in place to such a copy is lost. Write under "
            "deepspeed.zero.GatheredParameters(..., modifier_rank=0) or by load_state_dict; before "
            "merge_and_unload(), where several ranks share the storage of blocks, call engine.destroy()"
        )

    def _ignore_move(self, convert: Callable[..., Any], recurse: bool = True) -> nn.Module:
        """Replaces the module's `_apply`, which `to`, `half`, `cpu` and similar methods call. It warns and moves
        nothing, because moved parameters would not be views of their storage."""
        logger.warning(
            "ds_zo: an engine stores this module's weights, so .to(), .half(), .cpu() and Trainer's bf16_full_eval and "
            "fp16_full_eval do not change them: move a copy.deepcopy of the module, or call engine.destroy() first"
        )
        return self._module

    def _attach_accessors(self, parameter: Any, full: Callable[[], torch.Tensor]) -> None:
        """Sets the attributes of a parameter that deepspeed.utils.safe_get_full_fp32_param and safe_set_full_fp32_param
        use, and its `__deepcopy__`. `full` returns the weights in float32."""
        full_parameters.attach(parameter, self, read=full, write=partial(self.store, parameter))
        parameter.__deepcopy__ = partial(self._plain_copy, parameter)

    def _detach_accessors(self, parameter: Any) -> None:
        """Removes the attributes of `_attach_accessors`, unless they are another engine's."""
        if full_parameters.detach(parameter, self):
            del parameter.__deepcopy__

    def owns_module(self) -> bool:
        """False if another engine was made of the same module: that engine then stores the weights."""
        return all(getattr(placed.parameter, "_hp_mapping", None) is self for _, placed in self._placement_of.values())

    @abstractmethod
    def read(self, parameter: nn.Parameter) -> torch.Tensor:
        """Returns the current weights of a parameter: a copy in host memory, or the parameter itself, detached, if it
        holds them."""

    @abstractmethod
    def write(self, parameter: nn.Parameter, value: torch.Tensor) -> None:
        """Converts `value` to the stored form of the parameter's weights and stores it."""

    @abstractmethod
    def _full_fp32(self, unit: Unit, placed: PlacedParameter) -> torch.Tensor:
        """Returns a copy of the current weights in float32, on the device."""

    @abstractmethod
    def _before_load(self, unit: Unit) -> None:
        """Called before `load_state_dict` writes weights of `unit`: applies or waits for pending updates."""

    def close(self) -> None:
        """Removes all hooks and attributes from the module and its parameters."""
        self.release_all(rebind=self.owns_module() and not sys.is_finalizing())
        if self.owns_module():
            self.stop_intercepting()
        self._units = []
        for handle in self._handles:
            handle.remove()
        for stand_in in (self._apply, self._save):
            if stand_in is not None:
                stand_in.remove()
        for _, placed in self._placement_of.values():
            self._detach_accessors(placed.parameter)

    def _unwatch_parameters(self, module: nn.Module, prefix: str, keep_vars: bool) -> None:
        """Hook before a module's `state_dict`: reading the parameters must not call `refresh`, because
        `_put_current_weights` replaces the values afterwards."""
        stop_intercepting(p for p in module._parameters.values() if p is not None)

    def _put_current_weights(self, module: nn.Module, state_dict: dict[str, Any], prefix: str, metadata: Any) -> None:
        """Hook after a module's `state_dict`: puts the weights of the current step in it. Reads call `refresh` again
        also if Ctrl-C ends it."""
        placed = {
            name: p
            for name, p in module._parameters.items()
            if p is not None and id(p) in self._placement_of and not self.is_gathered(p)
        }
        try:
            for name, p in placed.items():
                if prefix + name in state_dict:
                    state_dict[prefix + name] = self._read_into(state_dict, p)
        finally:
            intercept(p for p in placed.values() if self._placement_of[id(p)][0].is_intercepted)

    @contextmanager
    def frozen_undecoded(self) -> Iterator[None]:
        """Context in which `state_dict` decodes no frozen weights, because the caller drops them."""
        self._decodes_frozen, before = False, self._decodes_frozen
        try:
            yield
        finally:
            self._decodes_frozen = before

    def _save_adapters(self, save: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Replaces PEFT's `save_pretrained`, which takes the adapters out of a `state_dict` of the whole model."""
        with self.frozen_undecoded():
            return save(*args, **kwargs)

    def _read_into(self, state_dict: Mapping[str, Any], p: nn.Parameter) -> torch.Tensor:
        """Reads a weight for `state_dict`. A tied weight is the same tensor under all its names, as in any
        `state_dict`."""
        unit, placed = self._placement_of[id(p)]
        if not self._decodes_frozen and unit.decodes_frozen and not placed.trainable:
            return torch.zeros((), dtype=p.dtype).expand(p.shape)
        if id(p) not in self._tied:
            return self.read(p)
        before = self._tied[id(p)]
        shared = None if before is None else before()
        if shared is None or not any(value is shared for value in state_dict.values()):
            shared = self.read(p)
            self._tied[id(p)] = weakref.ref(shared)
        return shared

    def _stage(self, module: nn.Module, state_dict: Mapping[str, Any], prefix: str, *rest: Any) -> None:
        """Hook before a module's `load_state_dict`: points parameters at temporary memory, to which torch can copy. The
        storage may have another form or pending updates."""
        staged = [
            p
            for name, p in module._parameters.items()
            if p is not None and prefix + name in state_dict and id(p) in self._placement_of
        ]
        for p in staged:
            self._before_load(self._placement_of[id(p)][0])
        # All reads come before the first assignment, because a read binds the whole unit to its storage again.
        values = [torch.empty(p.shape, dtype=p.dtype, device="cpu").copy_(self.read(p)) for p in staged]
        stop_intercepting(staged)
        for p, value in zip(staged, values, strict=True):
            p.data = value
        self._staged += staged

    def _store_staged(self, module: nn.Module, incompatible_keys: Any) -> None:
        """Hook after a module's `load_state_dict`: stores the values that torch has copied."""
        # All values are taken before the first write, because a write binds the whole unit to its storage again.
        values = [(p, p.data) for p in self._staged]
        self._staged.clear()
        for p, value in values:
            self.store(p, value)

    # Copies that parameters show inside DeepSpeed's `GatheredParameters`

    def gather(self, parameters: Sequence[nn.Parameter]) -> None:
        """Points parameters at copies of the current weights, until `release` and `bind_stored`."""
        values = [self.read(p).clone() for p in parameters]  # first, because a read may raise
        for p, value in zip(parameters, values, strict=True):
            self._placement_of[id(p)][0].show_gathered_copy(p, value)
            self._mark_unchanged(p)

    def is_gathered(self, parameter: nn.Parameter) -> bool:
        return id(parameter) in self._marks_of_copies

    def gathered_value(self, parameter: nn.Parameter) -> torch.Tensor:
        """The parameter's copy, also while a forward has bound the parameter elsewhere."""
        return self._placement_of[id(parameter)][0].gathered_copy(parameter)

    def release(self, parameter: nn.Parameter) -> None:
        """Drops the parameter's copy. The caller binds the parameter to its storage afterwards."""
        del self._marks_of_copies[id(parameter)]
        self._placement_of[id(parameter)][0].drop_gathered_copy(parameter)

    def release_all(self, *, rebind: bool) -> None:
        """Called where an engine is closed inside the context: drops all copies without storing them. `rebind`: the
        parameters are bound to their storage."""
        for unit, placed in self._placement_of.values() if self._marks_of_copies else ():
            if self.is_gathered(placed.parameter):
                self.release(placed.parameter)
                if rebind:
                    unit.bind_stored()

    def _mark_unchanged(self, parameter: nn.Parameter) -> None:
        self._marks_of_copies[id(parameter)] = parameter._version, self.gathered_value(parameter).data_ptr()

    def modules_that_materialise(self, parameters: Sequence[nn.Parameter]) -> dict[nn.Module, list[nn.Parameter]]:
        """The modules whose forwards use the stored weights of gathered parameters and not the copies, with these
        parameters."""
        units = {id(p): self._placement_of[id(p)][0] for p in parameters if self.is_gathered(p)}
        units = {key: unit for key, unit in units.items() if self._is_materialised_in_forward(unit)}
        found: dict[nn.Module, list[nn.Parameter]] = {}
        for m in self._module.modules() if units else ():
            # A block is materialised as a whole, another unit also by each module that owns one of its parameters.
            its = [p for p in parameters if id(p) in units and units[id(p)].module is m]
            own = [p for p in m._parameters.values() if p is not None and id(p) in units]
            its += [p for p in own if units[id(p)].module is not m and not units[id(p)].is_block]
            if its:
                found[m] = its
        return found

    def check_forward(self, parameters: Sequence[nn.Parameter], is_written: bool, *hooked: Any) -> None:
        """Hook before the forward of a module. Refuses a forward that would use the stored weights of gathered
        parameters, if `is_written` or if a copy was changed. A write through `.data` leaves no trace."""
        for p in parameters:
            if not self.is_gathered(p) or self._placement_of[id(p)][0].state is UnitState.MATERIALISED:
                continue
            if is_written or self._marks_of_copies[id(p)] != (p._version, self.gathered_value(p).data_ptr()):
                raise RuntimeError(
                    "a forward uses the stored weights, so it must not run inside deepspeed.zero.GatheredParameters "
                    "with a modifier_rank, nor after a change of a gathered weight, got one that uses "
                    f"{self._placement_of[id(p)][1].name}: leave it first"
                )

    def _is_materialised_in_forward(self, unit: Unit) -> bool:
        """Whether a forward of the unit's module binds its parameters to memory other than the storage."""
        return True

    def bind_stored(self, parameter: nn.Parameter) -> None:
        """Points the parameter, with its whole unit, at the storage again."""
        self._placement_of[id(parameter)][0].bind_stored()

    def _plain_copy(self, parameter: nn.Parameter, memo: dict[int, Any]) -> nn.Parameter:
        """The parameter's `__deepcopy__`: a plain parameter with the current weights, on the device that the parameter
        reports, without references to the engine."""
        device = parameter.device
        if self.is_gathered(parameter):
            value = parameter.detach().clone()
        else:
            value = self.read(parameter).to(device, copy=True)
            self.bind_stored(parameter)
        return plain_class(parameter)(value, parameter.requires_grad)

    def store(self, parameter: nn.Parameter, value: torch.Tensor) -> None:
        """Stores a weight. If the parameter points at a gathered copy, the copy is updated too."""
        self.write(parameter, value)
        if self.is_gathered(parameter):
            copy = self.gathered_value(parameter)
            if copy.data_ptr() != value.data_ptr():
                copy.copy_(value.detach())
            self._mark_unchanged(parameter)
