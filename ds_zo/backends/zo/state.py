"""Reads and writes the weights of a model under ZO, which may have pending updates."""

from __future__ import annotations

from collections.abc import Callable

import torch
from deepspeed.utils import logger
from torch import nn

from ds_zo.backends.common.module_state import ModuleState
from ds_zo.backends.zo.block_store import ZOBlockStore
from ds_zo.backends.zo.materialise import Materialiser
from ds_zo.streaming.loading import forget_source, has_source, put_back
from ds_zo.streaming.shared_store import SharedStore
from ds_zo.streaming.units import PlacedParameter, Unit


class ReplayedState(ModuleState):
    """Access to ZO's weights. Their updates may be pending, and their stored form may differ from the parameters'."""

    def __init__(self, block_store: ZOBlockStore, module: nn.Module) -> None:
        self._block_store = block_store
        self._cached: tuple[int, int, dict[int, torch.Tensor]] | None = None
        """The last unit read, by id and step, and copies of its parameters by id. Callers read a block one parameter at
        a time."""
        self.on_write: Callable[[], None] = lambda: None
        """Called after a weight is replaced."""
        super().__init__(block_store.placement.units, module, device=block_store.device)

    @property
    def _materialiser(self) -> Materialiser:
        return self._block_store.materialiser  # another one after the slots were made anew

    @torch.no_grad()
    def refresh(self, parameter: nn.Parameter) -> None:
        """Makes a parameter show the weights of the current step before a bare read. If the unit's next forward would
        fold, or folding rounds nothing, the fold is made now, with the same bits. Any other fold would round at another
        step, so that training would depend on reads. Then the parameters show copies instead."""
        unit, _ = self._placement_of[id(parameter)]
        if self._is_busy() and (unit.streamed or unit.low_streamed):
            return
        materialiser = self._materialiser
        pending = materialiser.pending(unit) > 0
        is_exact = all(part.frozen or part.wire is torch.float32 for part in unit.parts)
        keeps_bits = is_exact or materialiser.folds(unit, step=materialiser.log.length)
        with torch.inference_mode(False):
            if self._is_shared(unit) or not unit.viewable or (pending and not keeps_bits):
                if not self._is_busy():
                    self._show_copies(unit, step=materialiser.log.length)
                return
            if pending:
                materialiser.fold_now(unit)
            elif unit.copies_step is not None:
                unit.bind_stored()
            materialiser.runtime.prepare_host_write(unit)

    def _is_shared(self, unit: Unit) -> bool:
        """Whether the unit lies in a host store that ranks share."""
        return self._block_store.store.num_sharers > 1 and unit.streamed

    def forget(self) -> None:
        """Drops the cached copies: stored weights were rewritten."""
        self._cached = None

    @torch.no_grad()
    def read(self, parameter: nn.Parameter) -> torch.Tensor:
        """The parameter's weights of the current step: itself if they are stored so on the device, else a copy on the
        host."""
        unit, placed = self._placement_of[id(parameter)]
        if not self._materialiser.pending(unit) and unit.viewable:
            # Not from cached copies: user code may have written to the stored weights through a view of them.
            return self._stored(unit, placed).clone() if unit.streamed else parameter.detach()
        key = (id(unit), self._materialiser.log.length)
        if self._cached is None or self._cached[:2] != key:
            with torch.inference_mode(False):
                views = self._materialiser.materialise_clean(unit, scratch=self._materialiser.scratch_for(unit))
                pairs = zip(unit.placed, views, strict=True)
                copies = {id(p.parameter): view.to("cpu", copy=True) for p, view in pairs}
                self._materialiser.release_clean(unit)
            self._cached = (*key, copies)
        copy = self._cached[2].pop(id(parameter), None)
        if copy is None:  # read before: by a tied weight's other name, or by another caller
            self._cached = None
            return self.read(parameter)
        return copy

    def _stored(self, unit: Unit, placed: PlacedParameter) -> torch.Tensor:
        """The parameter's elements in its unit's store buffer."""
        self._materialiser.runtime.host_wait(unit)
        planes = zip(unit.parts, unit.planes(unit.store_buffer), strict=True)
        return next(placed.view(p.storage) for part, p in planes if any(other is placed for other in part.placed))

    @torch.no_grad()
    def write(self, parameter: nn.Parameter, value: torch.Tensor) -> None:
        """Replaces the parameter's weights. Where ranks share a host store, all of them must call it."""
        unit, placed = self._placement_of[id(parameter)]
        self._materialiser.fold_now(unit)
        with self._block_store.rewriting(unit) as writes:
            unit.store_one(placed, value, writes=writes(unit))
        self._block_store.base.discard(placed.name)
        unit.bind_stored()
        self._materialiser.runtime.invalidate_slots()
        self._cached = None
        self.on_write()

    def _before_load(self, unit: Unit) -> None:
        """Folds the unit before new values are loaded into it."""
        self._materialiser.fold_now(unit)

    @torch.no_grad()
    def _full_fp32(self, unit: Unit, placed: PlacedParameter) -> torch.Tensor:
        views = self._materialiser.materialise_fp32(unit)
        found = next(v for p, v in zip(unit.placed, views, strict=True) if p is placed).clone()
        self._materialiser.release_clean(unit)
        return found

    # Closing

    @torch.no_grad()
    def return_weights(self) -> None:
        """Leaves the weights of the current step in the module, which outlives the engine: scripts save it, Trainer
        trains it again. A unit whose stored form differs from its parameters' dtype gets new memory. Frozen parameters
        that were stored in fewer bits are left unread if their source provides the same values again."""
        store, are_current = self._block_store, True
        for unit in store.placement.units:
            if not unit.viewable:
                self._return_narrow_unit(unit)
            elif isinstance(store.store, SharedStore) and unit.streamed:
                are_current &= self._return_shared_unit(unit, store.store)
            else:
                store.materialiser.fold_now(unit)
                store.runtime.host_wait(unit)
        if not are_current:
            logger.warning(
                "ds_zo: the engine is destroyed, and this machine has no memory for one whole model per rank, so the "
                "module keeps weights that lack the last updates: save, or read state_dict(), before engine.destroy()"
            )

    def _return_narrow_unit(self, unit: Unit) -> None:
        """Leaves a unit in the module whose stored form differs from its parameters' dtype."""
        for placed in unit.placed:
            if placed.name not in self._block_store.base:
                forget_source(self._module, placed.parameter)
        unread = {
            id(placed.parameter)
            for part in unit.parts
            for placed in part.placed
            if part.frozen and not part.direct and has_source(self._module, placed.parameter)
        }
        unit.bind([p.parameter if id(p.parameter) in unread else self.read(p.parameter) for p in unit.placed])
        for placed in unit.placed:
            if id(placed.parameter) in unread:
                put_back(self._module, placed.parameter)

    def _return_shared_unit(self, unit: Unit, store: SharedStore) -> bool:
        """Leaves a unit of a host store that ranks share in the module. Ranks close at different times, so nothing in
        the shared memory is changed. If updates are pending, every rank needs a private copy. Returns False if the
        machine has no memory for these copies: the module then keeps the stored weights, which lack these updates."""
        pending = self._materialiser.pending(unit)
        if pending and not store.has_room_for(unit.nbytes * store.partition.size):
            return False
        self._block_store.runtime.host_wait(unit)
        values = [self.read(placed.parameter) for placed in unit.placed] if pending else None
        unit.assign_buffers(store.private(unit.store_buffer), None, streamed=False, low_streamed=False)
        unit.bind_stored()
        for placed, value in zip(unit.placed, values or (), strict=False):
            placed.parameter.data.copy_(value)
        return True
