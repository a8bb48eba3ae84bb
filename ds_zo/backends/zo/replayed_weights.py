"""The weights of a model under ZO, whose updates may be pending, and whose stored form may differ from the
parameters'."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from deepspeed.utils import logger
from torch import nn

from ds_zo.backends.common.unit_weights import UnitStorage
from ds_zo.backends.zo.materialise import Materialiser
from ds_zo.backends.zo.store import ZOStore
from ds_zo.streaming.loading import forget_source, has_source, put_back
from ds_zo.streaming.shared_store import SharedStore
from ds_zo.streaming.units import PlacedParameter, Unit


class ReplayedWeights(UnitStorage):
    """Replays the pending updates of the weights that are read."""

    def __init__(self, module: nn.Module, store: ZOStore, *, on_write: Callable[[], None]) -> None:
        """`on_write` is called after a weight is replaced."""
        self._module, self._store, self._on_write = module, store, on_write
        self.units, self.device = store.blocks.placement.units, store.blocks.device

    @property
    def _materialiser(self) -> Materialiser:
        return self._store.materialiser  # another one after the slots were made anew

    def settle(self) -> None:
        """Does nothing: each access folds or replays what is pending."""

    def wait(self) -> None:
        self._store.blocks.wait()

    def rewritten(self) -> None:
        self._store.blocks.rewritten()

    def prepare_load(self, unit: Unit) -> None:
        self._materialiser.fold_now(unit)

    def is_shared(self, unit: Unit) -> bool:
        return self._store.blocks.store.num_sharers > 1 and unit.streamed

    def step_of(self, unit: Unit) -> int:
        return self._materialiser.log.length

    def show(self, unit: Unit, *, busy: bool) -> bool:
        """If the unit's next forward would fold, or folding rounds nothing, the fold is made now, with the same bits.
        Any other fold would round at another step, so that training would depend on reads. Then the parameters show
        copies instead."""
        if busy and (unit.streamed or unit.low_streamed):
            return True
        materialiser = self._materialiser
        pending = materialiser.pending(unit) > 0
        is_exact = all(part.frozen or part.wire is torch.float32 for part in unit.parts)
        keeps_bits = is_exact or materialiser.folds(unit, step=materialiser.log.length)
        if self.is_shared(unit) or not unit.viewable or (pending and not keeps_bits):
            return False
        if pending:
            materialiser.fold_now(unit)
        elif unit.copies_step is not None:
            unit.bind_stored()
        materialiser.runtime.prepare_host_write(unit)
        return True

    def view(self, unit: Unit, placed: PlacedParameter) -> torch.Tensor | None:
        """Not a copy of an earlier read, because user code may write to stored weights through a view of them."""
        if self._materialiser.pending(unit) or not unit.viewable:
            return None
        return self._stored(unit, placed).clone() if unit.streamed else placed.parameter.detach()

    def copy_whole(self, unit: Unit) -> Sequence[torch.Tensor]:
        with torch.inference_mode(False):
            views = self._materialiser.materialise_clean(unit, scratch=self._materialiser.scratch_for(unit))
            copies = [view.to("cpu", copy=True) for view in views]
            self._materialiser.release_clean(unit)
        return copies

    def _stored(self, unit: Unit, placed: PlacedParameter) -> torch.Tensor:
        """The parameter's elements in its unit's store buffer."""
        self._materialiser.runtime.host_wait(unit)
        planes = zip(unit.parts, unit.planes(unit.store_buffer), strict=True)
        return next(placed.view(p.storage) for part, p in planes if any(other is placed for other in part.placed))

    def write(self, unit: Unit, placed: PlacedParameter, value: torch.Tensor) -> None:
        """Where ranks share a host store, all of them must call it."""
        self._materialiser.fold_now(unit)
        with self._store.blocks.rewriting(unit) as writes:
            unit.store_one(placed, value, writes=writes(unit))
        self._store.base.discard(placed.name)
        self._materialiser.runtime.invalidate_slots()
        self._on_write()

    def read_full(self, unit: Unit, placed: PlacedParameter) -> torch.Tensor:
        views = self._materialiser.materialise_fp32(unit)
        found = next(v for p, v in zip(unit.placed, views, strict=True) if p is placed).clone()
        self._materialiser.release_clean(unit)
        return found

    # Closing

    @torch.no_grad()
    def give_back(self, read: Callable[[nn.Parameter], torch.Tensor]) -> None:
        """A unit whose stored form differs from its parameters' dtype gets new memory. Frozen parameters that were
        stored in fewer bits are left unread if their source provides the same values again."""
        store, are_current = self._store.blocks, True
        for unit in store.placement.units:
            if not unit.viewable:
                self._return_narrow_unit(unit, read)
            elif isinstance(store.store, SharedStore) and unit.streamed:
                are_current &= self._return_shared_unit(unit, store.store, read)
            else:
                self._materialiser.fold_now(unit)
                store.runtime.host_wait(unit)
        if not are_current:
            logger.warning(
                "ds_zo: the engine is destroyed, and this machine has no memory for one whole model per rank, so the "
                "module keeps weights that lack the last updates: save, or read state_dict(), before engine.destroy()"
            )

    def _return_narrow_unit(self, unit: Unit, read: Callable[[nn.Parameter], torch.Tensor]) -> None:
        """Leaves a unit in the module whose stored form differs from its parameters' dtype."""
        for placed in unit.placed:
            if placed.name not in self._store.base:
                forget_source(self._module, placed.parameter)
        unread = {
            id(placed.parameter)
            for part in unit.parts
            for placed in part.placed
            if part.frozen and not part.direct and has_source(self._module, placed.parameter)
        }
        unit.bind([p.parameter if id(p.parameter) in unread else read(p.parameter) for p in unit.placed])
        for placed in unit.placed:
            if id(placed.parameter) in unread:
                put_back(self._module, placed.parameter)

    def _return_shared_unit(self, unit: Unit, store: SharedStore, read: Callable[[nn.Parameter], torch.Tensor]) -> bool:
        """Leaves a unit of a host store that ranks share in the module. Ranks close at different times, so nothing in
        the shared memory is changed. If updates are pending, every rank needs a private copy. Returns False if the
        machine has no memory for these copies: the module then keeps the stored weights, which lack these updates."""
        pending = self._materialiser.pending(unit)
        if pending and not store.has_room_for(unit.nbytes * store.partition.size):
            return False
        self._store.blocks.runtime.host_wait(unit)
        values = [read(placed.parameter) for placed in unit.placed] if pending else None
        unit.assign_buffers(store.private(unit.store_buffer), None, streamed=False, low_streamed=False)
        unit.bind_stored()
        for placed, value in zip(unit.placed, values or (), strict=False):
            placed.parameter.data.copy_(value)
        return True

    def close(self, *, keep_weights: bool) -> None:
        self._store.blocks.close(keep_weights=False)
