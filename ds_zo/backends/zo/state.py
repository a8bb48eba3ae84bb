"""Reading and writing the weights of a model under ZO, whose updates may be pending."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from ds_zo.backends.common.module_state import ModuleState
from ds_zo.backends.zo.block_store import ZOBlockStore
from ds_zo.streaming.units import Placed, Unit


class ReplayedState(ModuleState):
    """ZO's: updates may be pending, and the stored form another."""

    def __init__(self, block_store: ZOBlockStore, module: nn.Module) -> None:
        self._block_store = block_store
        self._cached: tuple[int, int, dict[int, torch.Tensor]] | None = None
        """The last unit read, at which step: a block's parameters are asked for one owner at a time."""
        self.on_write: Callable[[], None] = lambda: None
        """Told that a weight was replaced."""
        self.in_forward: Callable[[], bool] = lambda: False
        """Whether units are being visited."""
        super().__init__(block_store.placement.units, module, device=block_store.device)

    @torch.no_grad()
    def bring_up(self, parameter: nn.Parameter) -> None:
        """A fold that the next forward would make is made now: the bits are the same. So is one that rounds nothing.
        Any other would round out of turn, and training would depend on who looks: a copy is shown instead."""
        unit, _ = self._placement_of[id(parameter)]
        if self._is_busy() and (unit.streamed or unit.low_streamed):
            return
        visits = self._block_store.materialiser
        pending = visits.pending(unit) > 0
        is_exact = all(part.direct or part.wire is torch.float32 for part in unit.parts)
        keeps_bits = is_exact or visits.folds(unit, step=visits.log.length)
        with torch.inference_mode(False):
            if self._is_shared(unit) or not all(part.viewable for part in unit.parts) or (pending and not keeps_bits):
                if not self._is_busy():
                    self._show_copies(unit, step=visits.log.length)
                return
            if pending:
                visits.fold_now(unit)
            elif unit.shown_step is not None:
                unit.bind_stored()
            visits.runtime.expose(unit)

    def _is_busy(self) -> bool:
        return self.in_forward()

    def _is_shared(self, unit: Unit) -> bool:
        return self._block_store.shared is not None and unit.streamed

    def forget(self) -> None:
        """Stored weights were rewritten."""
        self._cached = None

    @torch.no_grad()
    def read(self, parameter: nn.Parameter) -> torch.Tensor:
        unit, _ = self._placement_of[id(parameter)]
        if (
            not unit.streamed
            and not self._block_store.materialiser.pending(unit)
            and all(part.viewable for part in unit.parts)
        ):
            return parameter.detach()
        key = (id(unit), self._block_store.materialiser.log.length)
        if self._cached is None or self._cached[:2] != key:
            with torch.inference_mode(False):
                views = self._block_store.materialiser.clean(
                    unit, scratch=self._block_store.materialiser.scratch_for(unit)
                )
                copies = {
                    id(p.parameter): view.to("cpu", copy=True) for p, view in zip(unit.placed, views, strict=True)
                }
                self._block_store.materialiser.leave_clean(unit)
            self._cached = (*key, copies)
        copy = self._cached[2].pop(id(parameter), None)
        if copy is None:  # a tied weight's second name, or a second reader
            self._cached = None
            return self.read(parameter)
        return copy

    @torch.no_grad()
    def write(self, parameter: nn.Parameter, value: torch.Tensor) -> None:
        unit, placed = self._placement_of[id(parameter)]
        self._block_store.materialiser.fold_now(unit)
        with self._block_store.rewriting(unit) as writes:
            if writes(unit):
                unit.store_one(placed, value)
        unit.bind_stored()
        self._block_store.materialiser.runtime.forget()
        self._cached = None
        self.on_write()

    def _before_load(self, unit: Unit) -> None:
        self._block_store.materialiser.fold_now(unit)

    @torch.no_grad()
    def _full_fp32(self, unit: Unit, placed: Placed) -> torch.Tensor:
        views = self._block_store.materialiser.master(unit)
        found = next(v for p, v in zip(unit.placed, views, strict=True) if p is placed).clone()
        self._block_store.materialiser.leave_clean(unit)
        return found
