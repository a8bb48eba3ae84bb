"""Access by name to the weights of a module whose blocks a backend has placed.

Between steps the module's parameters need not hold the weights: they may be stored in another form or in host memory,
or updates may be pending. `UnitWeights` makes `state_dict`, `load_state_dict`, DeepSpeed's accessors of full
parameters, `copy.deepcopy` and plain reads of a parameter return and change the weights of the current step. It
registers hooks on each module that owns parameters, so that the `state_dict()` of a submodule is right too.
"""

from __future__ import annotations

import sys
import weakref
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from deepspeed.utils import logger
from torch import nn

from ds_zo.backends.common.ownership import LowBits, attach, detach
from ds_zo.backends.common.plain_copies import Hook, StandIn
from ds_zo.backends.common.pretrained import PretrainedSaving
from ds_zo.checkpoint.snapshot import host_copy, persistent_buffers
from ds_zo.streaming.intercepted import intercept, owner_of, stop_intercepting, without_interception
from ds_zo.streaming.units import PlacedParameter, Unit, UnitState


class UnitStorage(ABC):
    """How a backend reads and writes the weights of its units."""

    units: Sequence[Unit]
    device: torch.device

    @abstractmethod
    def settle(self) -> None:
        """Called before each access: applies updates that no access may find pending."""

    @abstractmethod
    def prepare_load(self, unit: Unit) -> None:
        """Called before `load_state_dict` writes weights of `unit`: applies or waits for its pending updates."""

    def watches(self, unit: Unit) -> bool:
        """Whether user code may find other values in the unit's parameters than the weights of the current step."""
        return self.moves(unit)

    def moves(self, unit: Unit) -> bool:
        """Whether a forward of the unit's module binds its parameters to memory other than the storage."""
        return True

    @abstractmethod
    def is_shared(self, unit: Unit) -> bool:
        """Whether several ranks share the storage of the unit, so that one rank must not write to it."""

    @abstractmethod
    def step_of(self, unit: Unit) -> int:
        """A number that differs between two steps if the unit's weights differ."""

    @abstractmethod
    def show(self, unit: Unit, *, busy: bool) -> bool:
        """Makes the parameters of `unit` show the weights of the current step, if they can be views of the stored
        bytes. Returns False if they must show copies instead. `busy`: a forward or backward uses some unit, whose
        parameters stay as they are."""

    @abstractmethod
    def view(self, unit: Unit, placed: PlacedParameter) -> torch.Tensor | None:
        """The current weights of one parameter: a copy in host memory, or the parameter itself, detached. None: they
        are read with the whole unit."""

    @abstractmethod
    def copy_whole(self, unit: Unit) -> Sequence[torch.Tensor]:
        """Copies of the unit's current weights in host memory, in `placed` order."""

    @abstractmethod
    def write(self, unit: Unit, placed: PlacedParameter, value: torch.Tensor) -> None:
        """Converts `value` to the stored form of the parameter's weights and stores it."""

    def read_full(self, unit: Unit, placed: PlacedParameter) -> torch.Tensor | None:
        """A copy of the current weights in float32, on the device. None: `view` has all bits of them."""
        return None

    # Checkpoints

    @abstractmethod
    def wait(self) -> None:
        """Blocks the host until all stored bytes are those of the current step."""

    def write_view(self, unit: Unit, target: torch.Tensor, value: torch.Tensor) -> bool:
        """Writes a weight to `target`, which shows its stored bytes. Returns False if no tensor shows them."""
        target.copy_(value)
        return True

    @abstractmethod
    def rewritten(self) -> None:
        """Called on every rank after writes by `write_view`."""

    def collect(self, *, reads: bool) -> dict[int, torch.Tensor]:
        """Collective: copies in host memory of weights that are divided among ranks, by the parameter's id, if this
        rank `reads` them. All weights are among them, or none."""
        return {}

    # The end of an engine

    @abstractmethod
    def give_back(self, read: Callable[[nn.Parameter], torch.Tensor]) -> None:
        """Leaves the weights of the current step in the module, which outlives the engine. `read`: see
        `UnitWeights.read`."""

    @abstractmethod
    def close(self, *, keep_weights: bool) -> None:
        """Frees the storage. `keep_weights`: the module stays usable."""


class UnitWeights:
    """The weights of placed units. See this module's docstring."""

    def __init__(self, module: nn.Module, storage: UnitStorage, *, low_bits: LowBits | None = None) -> None:
        self.device = storage.device
        self._module, self._storage = module, storage
        self._low_bits = low_bits or LowBits()
        self._units: Sequence[Unit] = storage.units
        self._placement_of: dict[int, tuple[Unit, PlacedParameter]] = {
            id(p.parameter): (u, p) for u in self._units for p in u.placed
        }
        """The unit and the placement of each parameter, by the parameter's id."""
        self._parameters = dict(module.named_parameters(remove_duplicate=False))
        names = Counter(id(p) for p in self._parameters.values())
        self._tied: dict[int, weakref.ref[torch.Tensor] | None] = {key: None for key, n in names.items() if n > 1}
        """The last copy that `state_dict` was given of each tied parameter, by the parameter's id. None: no copy
        yet."""
        self._copies: tuple[int, int, dict[int, torch.Tensor]] | None = None
        """The unit that was read last as a whole: its id, its step, and copies of its weights that have not been read
        yet, by the parameter's id. Callers read a unit's parameters one at a time."""
        self._collected: dict[int, torch.Tensor] = {}
        """Weights in host memory, by the parameter's id. Filled inside `readable`, else empty."""
        self._staged: list[nn.Parameter] = []
        """Parameters that point at temporary memory while `load_state_dict` writes to them."""
        self._marks_of_copies: dict[int, tuple[int, int]] = {}
        """Version and address of each gathered copy when it was made or last stored, by the parameter's id."""
        self._has_warned_of_copies = False
        self._decodes_frozen = True
        """False: `state_dict` has placeholders without memory for the frozen weights of units that decode some."""
        self._is_given_back = False
        self._stand_ins = [StandIn.put(module, "_apply", self._ignore_move)]
        if hasattr(module, "peft_config") and hasattr(module, "save_pretrained"):
            save: Callable[..., Any] = module.save_pretrained  # type: ignore[assignment]
            self._stand_ins.append(StandIn.put(module, "save_pretrained", partial(self._save_adapters, save)))
        self._handles = []
        for m in module.modules():
            if any(p is not None and id(p) in self._placement_of for p in m._parameters.values()):
                self._handles.append(m.register_state_dict_pre_hook(Hook(self._unwatch_parameters)))
                self._handles.append(m.register_state_dict_post_hook(Hook(self._put_current_weights)))
                self._handles.append(m.register_load_state_dict_pre_hook(Hook(self._stage)))
                self._handles.append(m.register_load_state_dict_post_hook(Hook(self._store_staged)))
        for _, placed in self._placement_of.values():
            attach(placed.parameter, self)
        self._pretrained = PretrainedSaving(module, self.read)
        self._intercept()

    # Reads and writes of a parameter itself: [Note: direct access to parameters]

    def _intercept(self) -> None:
        """From now until `_stop_intercepting`, a read of a parameter calls `refresh` first, and a write `replace`."""
        for unit in self._units:
            if self._storage.watches(unit):
                unit.intercept()

    def _stop_intercepting(self) -> None:
        for unit in self._units:
            if unit.is_intercepted:
                unit.stop_intercepting()

    @contextmanager
    def unwatched(self) -> Iterator[None]:
        """Context of the engine's own work, in which parameters are plain `nn.Parameter`s."""
        try:
            self._stop_intercepting()
            yield
        finally:
            self._intercept()

    @torch.no_grad()
    def refresh(self, parameter: nn.Parameter) -> None:
        """Makes a parameter show the weights of the current step, before a read outside of the engine."""
        unit, _ = self._placement_of[id(parameter)]
        busy = self._is_busy()
        with torch.inference_mode(False):
            if not busy:
                self._storage.settle()
            if not self._storage.show(unit, busy=busy) and not busy:
                self._show_copies(unit)

    def replace(self, parameter: nn.Parameter, value: torch.Tensor) -> bool:
        """Torch makes the assignment if the shape or the dtype differs, while a forward runs, and if several ranks
        share the storage."""
        unit, _ = self._placement_of[id(parameter)]
        if value.shape != parameter.shape or value.dtype is not parameter.dtype or self._is_busy():
            return False
        if self._storage.is_shared(unit):
            self._warn_of_copies(unit)
            return False
        self.store(parameter, value)
        return True

    def _is_busy(self) -> bool:
        """Whether a forward or backward is running and uses a unit."""
        return any(unit.in_use for unit in self._units)

    def _show_copies(self, unit: Unit) -> None:
        """Points the unit's parameters at copies of the current weights, because a user must not see or change the
        storage itself."""
        step = self._storage.step_of(unit)
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

    # Reads and writes by the engine, DeepSpeed's contexts and checkpoints

    @torch.no_grad()
    def read(self, parameter: nn.Parameter) -> torch.Tensor:
        """Returns the current weights of a parameter: a copy in host memory, or the parameter itself, detached, if it
        holds them."""
        unit, placed = self._placement_of[id(parameter)]
        if id(parameter) in self._collected:
            return self._collected[id(parameter)]
        self._storage.settle()
        found = self._storage.view(unit, placed)
        if found is not None:
            return found
        key = (id(unit), self._storage.step_of(unit))
        if self._copies is None or self._copies[:2] != key or id(parameter) not in self._copies[2]:
            self._copies = None  # frees the last unit's copies first
            values = zip(unit.placed, self._storage.copy_whole(unit), strict=True)
            self._copies = (*key, {id(p.parameter): value for p, value in values})
        return self._copies[2].pop(id(parameter))

    @torch.no_grad()
    def _write(self, parameter: nn.Parameter, value: torch.Tensor) -> None:
        unit, placed = self._placement_of[id(parameter)]
        self._copies = None
        self._storage.settle()
        self._storage.write(unit, placed, value)
        unit.bind_stored()

    def store(self, parameter: nn.Parameter, value: torch.Tensor) -> None:
        """Replaces the weights of a parameter, and the copy of them that it shows if it is gathered."""
        self._write(parameter, value)
        if self.is_gathered(parameter):
            copy = self.gathered_value(parameter)
            if copy.data_ptr() != value.data_ptr():
                copy.copy_(value.detach())
            self._mark_unchanged(parameter)

    @torch.no_grad()
    def read_full(self, parameter: nn.Parameter) -> torch.Tensor:
        """Returns a copy of the current weights in float32, on the device."""
        self._storage.settle()
        full = self._storage.read_full(*self._placement_of[id(parameter)])
        if full is None:
            full = self.read(parameter).to(self.device, torch.float32, copy=True)
        return self._low_bits.added(parameter, full)

    def write_full(self, parameter: nn.Parameter, value: torch.Tensor) -> None:
        """Replaces the weights by float32 values, of which the backend keeps what it can."""
        self.store(parameter, value)
        self._low_bits.keep(parameter, value)

    def forget(self) -> None:
        """Drops copies of weights: stored weights were rewritten."""
        self._copies = None

    # The methods of `StateAccess` with the same names

    def stored(self) -> dict[str, torch.Tensor]:
        self._storage.settle()
        self._storage.wait()
        for unit in self._units:
            if unit.copies_step is not None:
                self.bind_stored(next(unit.placed).parameter)  # a write to the copies would be lost
        with without_interception():
            named = self._module.named_parameters(remove_duplicate=False)  # of which a user may have added some
            weights = {name: self._collected.get(id(p), p.detach()) for name, p in named}
        buffers = {name: buffer.detach() for name, buffer in persistent_buffers(self._module)}
        return weights | (host_copy(buffers) if self._collected else buffers)

    def read_stored(self, name: str, value: torch.Tensor) -> torch.Tensor:
        return (self.read(self._parameters[name]) if name in self._parameters else value).cpu()

    def write_stored(self, name: str, target: torch.Tensor, value: torch.Tensor) -> None:
        parameter = self._parameters.get(name)
        if parameter is None:
            target.copy_(value)
        elif not self._storage.write_view(self._placement_of[id(parameter)][0], target, value):
            self._write(parameter, value)

    def stored_changed(self) -> None:
        self.forget()
        self._storage.rewritten()

    @property
    def stored_are_copies(self) -> bool:
        return bool(self._collected)

    @contextmanager
    def readable(self, *, reads: bool) -> Iterator[None]:
        """Context in which this rank can read all weights if it `reads`. Every rank enters it."""
        try:
            with torch.no_grad():
                self._collected = self._storage.collect(reads=reads)
            yield
        finally:
            self._collected = {}

    # The end of an engine

    def owns_module(self) -> bool:
        """False if another engine was made of the same module: that engine then stores the weights."""
        return all(owner_of(placed.parameter) is self for _, placed in self._placement_of.values())

    def give_back(self) -> None:
        """Leaves the weights of the current step in the module, unless another engine stores them. If it fails, for
        lack of memory for example, the stored weights stay, and the caller may try again."""
        # Not while the interpreter exits: nothing refers to the module then, and PyTorch aborts on tensors made in a
        # finalizer.
        keeps = self.owns_module() and not sys.is_finalizing()
        if keeps and not self._is_given_back:
            self._stop_intercepting()
            self._release_all(rebind=True)
            self._storage.give_back(self.read)
        self._is_given_back = True

    def close(self) -> None:
        """Frees the storage too. The module keeps its weights, unless another engine stores them."""
        self.give_back()
        keeps = self.owns_module() and not sys.is_finalizing()
        self._release_all(rebind=keeps)
        self._units = []
        for handle in self._handles:
            handle.remove()
        for stand_in in self._stand_ins:
            stand_in.remove()
        self._pretrained.close()
        for _, placed in self._placement_of.values():
            detach(placed.parameter, self)
        self._storage.close(keep_weights=keeps)

    # The module's `state_dict` and `load_state_dict`

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
            self._storage.settle()
            self._storage.prepare_load(self._placement_of[id(p)][0])
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
        """Points parameters at copies of their current weights, until `release` and `bind_stored`."""
        values = [self.read(p).clone() for p in parameters]  # first, because a read may raise
        for p, value in zip(parameters, values, strict=True):
            self._placement_of[id(p)][0].show_gathered_copy(p, value)
            self._mark_unchanged(p)

    def is_gathered(self, parameter: nn.Parameter) -> bool:
        """Whether the parameter shows a copy of its weights, which `gather` made."""
        return id(parameter) in self._marks_of_copies

    def gathered_value(self, parameter: nn.Parameter) -> torch.Tensor:
        """What the parameter shows inside the context, also while a forward has bound it elsewhere."""
        return self._placement_of[id(parameter)][0].gathered_copy(parameter)

    def release(self, parameter: nn.Parameter) -> None:
        """Drops the parameter's copy. The caller binds the parameter to its storage afterwards."""
        del self._marks_of_copies[id(parameter)]
        self._placement_of[id(parameter)][0].drop_gathered_copy(parameter)

    def _release_all(self, *, rebind: bool) -> None:
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
        units = {key: unit for key, unit in units.items() if self._storage.moves(unit)}
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

    def bind_stored(self, parameter: nn.Parameter) -> None:
        """Points the parameter, with its whole unit, at the storage again."""
        self._placement_of[id(parameter)][0].bind_stored()
