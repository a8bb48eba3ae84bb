"""The weights of recomputed blocks, as their store keeps them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

import torch
from torch import nn

from ds_zo.backends.common.unit_weights import UnitStorage
from ds_zo.backends.recompute.recomputation import Recomputation
from ds_zo.records.environment import host_free_bytes
from ds_zo.streaming.intercepted import with_interception
from ds_zo.streaming.loading import forget_source, has_source, put_back
from ds_zo.streaming.units import PlacedParameter, Unit

_ROOM = 3
"""Decoded copies of a unit that must fit free host memory before it is decoded."""


class StoredWeights(UnitStorage):
    """The stored bytes are the weights of the current step, once pending updates are applied. Encoded bytes are decoded
    when they are read."""

    def __init__(
        self, module: nn.Module, recomputation: Recomputation, *, settle: Callable[[], None] | None = None
    ) -> None:
        """`settle` applies pending updates. None: there are none."""
        self._module, self._use, self._store = module, recomputation.use, recomputation.store
        self._settle = settle
        self.units, self.device = self._store.placement.units, self._store.device

    def settle(self) -> None:
        if self._settle is not None:
            self._settle()

    def prepare_load(self, unit: Unit) -> None:
        self._store.runtime.host_wait(unit)

    def watches(self, unit: Unit) -> bool:
        return self._settle is not None or self.moves(unit)

    def moves(self, unit: Unit) -> bool:
        return unit.streamed or self._is_read_whole(unit)

    def is_shared(self, unit: Unit) -> bool:
        return unit.is_sharded or (self._store.store.num_sharers > 1 and unit.streamed)

    def _is_read_whole(self, unit: Unit) -> bool:
        """Whether no parameter of the unit can be a view of the stored bytes: they are encoded, or this rank has a
        shard of them ([Note: device shards])."""
        return unit.is_sharded or not unit.viewable

    def step_of(self, unit: Unit) -> int:
        return unit.version

    def show(self, unit: Unit, *, busy: bool) -> bool:
        """A parameter that is sharded over devices stays a placeholder, as under DeepSpeed's stage 3."""
        if busy or unit.is_sharded:
            return True
        if self.is_shared(unit) or self._is_read_whole(unit):
            return False
        self._store.runtime.prepare_host_write(unit)
        return True

    def view(self, unit: Unit, placed: PlacedParameter) -> torch.Tensor | None:
        if self._is_read_whole(unit):
            return None
        if not unit.streamed:
            return placed.parameter.detach()
        self._store.runtime.host_wait(unit)
        planes = unit.planes(unit.store_buffer)
        index = next(i for i, part in enumerate(unit.parts) if any(p is placed for p in part.placed))
        # The clone serves CUDA too, which cannot copy from memory of which only a part is pinned: shared memory.
        return placed.view(planes[index].storage).clone()

    def copy_whole(self, unit: Unit) -> Sequence[torch.Tensor]:
        """All ranks call it, because all read the same parameters in the same order."""
        if unit.is_sharded:
            return [view.to("cpu", copy=True) for view in self._whole(unit)]
        _check_host_memory(unit)
        with self._use(unit), with_interception():  # a matrix may be decoded where torch reads it
            return [placed.parameter.detach().to("cpu", copy=True) for placed in unit.placed]

    def _whole(self, unit: Unit) -> Sequence[torch.Tensor]:
        assert self._store.shards is not None
        return self._store.shards.whole(unit)

    def write(self, unit: Unit, placed: PlacedParameter, value: torch.Tensor) -> None:
        forget_source(self._module, placed.parameter)
        with self._store.rewriting(unit) as writes:
            if unit.is_sharded:
                assert self._store.shards is not None
                self._store.shards.write(unit, placed, value)
            else:
                unit.store_one(placed, value, writes=writes(unit))
        self._store.runtime.invalidate_slots()

    # Checkpoints

    def wait(self) -> None:
        self._store.wait()

    def write_view(self, unit: Unit, target: torch.Tensor, value: torch.Tensor) -> bool:
        unit.may_be_changed = True
        return not self._is_read_whole(unit) and super().write_view(unit, target, value)

    def rewritten(self) -> None:
        self._store.rewritten()

    def collect(self, *, reads: bool) -> dict[int, torch.Tensor]:
        found: dict[int, torch.Tensor] = {}
        for unit in self.units if self._store.shards is not None else ():
            views = self._whole(unit) if unit.is_sharded else [p.parameter for p in unit.placed]
            for placed, view in zip(unit.placed, views, strict=True):
                if reads:
                    found[id(placed.parameter)] = view.detach().to("cpu", copy=True)
        return found

    # The end of an engine

    @torch.no_grad()
    def give_back(self, read: Callable[[nn.Parameter], torch.Tensor]) -> None:
        """Encoded weights are decoded, or left unread if the model's files provide them."""
        for unit in self._store.placement.blocks:
            if unit.viewable:
                continue
            unread = {id(p.parameter) for p in unit.placed if has_source(self._module, p.parameter)}
            values = [p.parameter if id(p.parameter) in unread else read(p.parameter) for p in unit.placed]
            unit.show_copies(values, step=unit.version)
            unit.assign_buffers(unit.store_buffer, None, streamed=False, low_streamed=False)
            for placed in unit.placed:
                if id(placed.parameter) in unread:
                    put_back(self._module, placed.parameter)

    def close(self, *, keep_weights: bool) -> None:
        self._store.close(keep_weights=keep_weights)


def _check_host_memory(unit: Unit) -> None:
    """Raises if host memory has no room for the decoded weights of a unit. The system would end the process instead."""
    if sys.platform != "linux":
        return
    free = host_free_bytes()
    if free < _ROOM * sum(p.numel * p.parameter.element_size() for p in unit.placed):
        raise RuntimeError(
            f"host memory has no room for the decoded base, got {free / 1e9:.1f} GB free at {unit.name}: save the "
            "adapters alone, by save_pretrained of the PEFT model, by save_checkpoint, or from Trainer with "
            "zero_optimization.stage 3"
        )
