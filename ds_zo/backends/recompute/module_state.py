"""Access by name to the weights of blocks that are stored in the form in which they are computed."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from ds_zo.backends.common.module_state import ModuleState
from ds_zo.backends.common.pretrained import PretrainedSaving
from ds_zo.backends.recompute.recomputation import Recomputation
from ds_zo.checkpoint.snapshot import host_copy, persistent_buffers
from ds_zo.streaming.intercepted import without_interception
from ds_zo.streaming.units import PlacedParameter, Unit


class RecomputedModuleState(ModuleState):
    """`ModuleState` of recomputed blocks: the stored bytes are the weights of the current step."""

    def __init__(self, recomputation: Recomputation, module: nn.Module) -> None:
        self._use = recomputation.use
        self._block_store = block_store = recomputation.store
        self.collected: dict[int, torch.Tensor] = {}
        """Gathered weights in host memory, by the parameter's id. Filled inside `all_readable`, else empty."""
        self._copies: tuple[int, int, dict[int, torch.Tensor]] | None = None
        """The unit that was read last as a whole: its id, its version, and copies of its weights that have not been
        read yet, by the parameter's id. Callers read a block's parameters one at a time."""
        super().__init__(block_store.placement.units, module, device=block_store.device)
        self._parameters = dict(module.named_parameters(remove_duplicate=False))
        self._pretrained = PretrainedSaving(module, self.read)

    @torch.no_grad()
    def refresh(self, parameter: nn.Parameter) -> None:
        """Waits until updates are copied back, and binds the parameter to its stored bytes. A parameter that is sharded
        over devices stays a placeholder, as under DeepSpeed's stage 3."""
        unit, _ = self._placement_of[id(parameter)]
        if self._is_busy() or unit.is_sharded:
            return
        with torch.inference_mode(False):
            if self._is_shared(unit) or self._is_read_whole(unit):
                self._show_copies(unit, step=unit.version)
            else:
                self._block_store.runtime.prepare_host_write(unit)

    def _is_shared(self, unit: Unit) -> bool:
        return unit.is_sharded or (self._block_store.store.num_sharers > 1 and unit.streamed)

    def _is_read_whole(self, unit: Unit) -> bool:
        """Whether a parameter of the unit is read and written by way of the whole unit. True for units that are sharded
        over devices: this rank has a shard at most ([Note: device shards])."""
        return unit.is_sharded

    @torch.no_grad()
    def read(self, parameter: nn.Parameter) -> torch.Tensor:
        unit, placed = self._placement_of[id(parameter)]
        if id(parameter) in self.collected:
            return self.collected[id(parameter)]
        if self._is_read_whole(unit):
            key = (id(unit), unit.version)
            if self._copies is None or self._copies[:2] != key or id(parameter) not in self._copies[2]:
                self._copies = None  # frees the last unit's copies first
                self._copies = (*key, self._copy_whole(unit))
            return self._copies[2].pop(id(parameter))
        if not unit.streamed:
            return parameter.detach()
        return self._stored(unit, placed).clone()

    def _copy_whole(self, unit: Unit) -> dict[int, torch.Tensor]:
        """Gathers a unit, and returns copies in host memory by the parameter's id. All ranks call it, because all read
        the same parameters in the same order."""
        assert self._block_store.shards is not None
        views = zip(unit.placed, self._block_store.shards.whole(unit), strict=True)
        return {id(p.parameter): view.to("cpu", copy=True) for p, view in views}

    # The methods of `Backend` with the same names

    def stored(self) -> dict[str, torch.Tensor]:
        self._block_store.wait()
        with without_interception():
            named = self._module.named_parameters(remove_duplicate=False)
            weights = {name: self.collected.get(id(p), p.detach()) for name, p in named}
        buffers = {name: buffer.detach() for name, buffer in persistent_buffers(self._module)}
        return weights | (host_copy(buffers) if self.collected else buffers)

    def write_stored(self, name: str, target: torch.Tensor, value: torch.Tensor) -> None:
        parameter = self._parameters.get(name)
        if parameter is not None and self._is_read_whole(self._placement_of[id(parameter)][0]):
            self.write(parameter, value)
        else:
            target.copy_(value)

    def stored_changed(self) -> None:
        self._block_store.rewritten()

    @contextmanager
    def all_readable(self, *, reads: bool) -> Iterator[None]:
        """Context in which this rank can read all weights if it `reads`. Sharded units are gathered, which all ranks
        take part in."""
        shards = self._block_store.shards
        try:
            with torch.no_grad():
                for unit in self._units if shards is not None else ():
                    views = shards.whole(unit) if shards and unit.is_sharded else [p.parameter for p in unit.placed]
                    for placed, view in zip(unit.placed, views, strict=True):
                        if reads:
                            self.collected[id(placed.parameter)] = view.detach().to("cpu", copy=True)
            yield
        finally:
            self.collected = {}

    def close(self) -> None:
        """Frees the block store too. The module keeps its weights, unless another engine stores them."""
        self._pretrained.close()
        keep_weights = self.owns_module() and not sys.is_finalizing()
        super().close()
        self._block_store.close(keep_weights=keep_weights)

    @torch.no_grad()
    def write(self, parameter: nn.Parameter, value: torch.Tensor) -> None:
        unit, placed = self._placement_of[id(parameter)]
        self._copies = None
        with self._block_store.rewriting(unit) as writes:
            if self._block_store.shards is not None and unit.is_sharded:
                self._block_store.shards.write(unit, placed, value)
            else:
                unit.store_one(placed, value, writes=writes(unit))
        unit.bind_stored()
        self._block_store.runtime.invalidate_slots()

    @torch.no_grad()
    def _full_fp32(self, unit: Unit, placed: PlacedParameter) -> torch.Tensor:
        if self._is_read_whole(unit):
            return self.read(placed.parameter).to(self.device, torch.float32)
        # The clone comes first, because CUDA cannot copy from memory of which only a part is pinned: shared memory.
        return self._stored(unit, placed).clone().to(self.device, torch.float32)

    def _before_load(self, unit: Unit) -> None:
        self._block_store.runtime.host_wait(unit)

    def _is_materialised_in_forward(self, unit: Unit) -> bool:
        return unit.streamed or self._is_read_whole(unit)

    def _stored(self, unit: Unit, placed: PlacedParameter) -> torch.Tensor:
        self._block_store.runtime.host_wait(unit)
        planes = unit.planes(unit.store_buffer)
        index = next(i for i, part in enumerate(unit.parts) if any(p is placed for p in part.placed))
        return placed.view(planes[index].storage)
