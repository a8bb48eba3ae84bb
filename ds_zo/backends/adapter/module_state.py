"""Access by name to the weights of a frozen base with streamed blocks."""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch
from torch import nn

from ds_zo.backends.adapter.trained import with_low_bits
from ds_zo.backends.recompute.module_state import RecomputedModuleState
from ds_zo.backends.recompute.recomputation import Recomputation
from ds_zo.records.environment import host_free_bytes
from ds_zo.streaming.loading import forget_source, has_source, put_back
from ds_zo.streaming.units import PlacedParameter, Unit

_ROOM = 3
"""Decoded copies of a unit that must fit free host memory before it is decoded."""


class FrozenModuleState(RecomputedModuleState):
    """Access by name to the weights of a frozen base. Encoded weights are decoded when they are read."""

    def __init__(self, recomputation: Recomputation, module: nn.Module) -> None:
        self.master_of: Callable[[nn.Parameter], torch.Tensor | None] = lambda parameter: None
        """Returns the float32 master of a trained parameter, which a caller may change. None: it has none."""
        self._changed: set[int] = set()
        """Ids of units whose stored bytes were written to, or handed out where a user may write to them."""
        super().__init__(recomputation, module)

    def refresh(self, parameter: nn.Parameter) -> None:
        super().refresh(parameter)
        unit, _ = self._placement_of[id(parameter)]
        if not self._is_read_whole(unit):  # p.data is a view of the stored bytes, no copy
            self._changed.add(id(unit))

    def may_be_changed(self, unit: Unit) -> bool:
        """Whether the stored bytes may be other ones than those that the unit has encoded."""
        return id(unit) in self._changed

    def _is_read_whole(self, unit: Unit) -> bool:
        return not unit.viewable

    def _copy_whole(self, unit: Unit) -> dict[int, torch.Tensor]:
        _check_host_memory(unit)
        with self._use(unit):
            return {id(p.parameter): p.parameter.detach().to("cpu", copy=True) for p in unit.placed}

    def write(self, parameter: nn.Parameter, value: torch.Tensor) -> None:
        forget_source(self._module, parameter)
        super().write(parameter, value)
        master = self.master_of(parameter)
        if master is not None and value.dtype is master.dtype:  # from safe_set_full_fp32_param
            master.copy_(value)

    def read_stored(self, name: str, value: torch.Tensor) -> torch.Tensor:
        return (self.read(self._parameters[name]) if name in self._parameters else value).cpu()

    def write_stored(self, name: str, target: torch.Tensor, value: torch.Tensor) -> None:
        if name in self._parameters:
            self._changed.add(id(self._placement_of[id(self._parameters[name])][0]))
        super().write_stored(name, target, value)

    def _full_fp32(self, unit: Unit, placed: PlacedParameter) -> torch.Tensor:
        stored, master = super()._full_fp32(unit, placed), self.master_of(placed.parameter)
        return stored if master is None else with_low_bits(stored, master.to(stored.device), placed.parameter.dtype)

    def close(self) -> None:
        if self.owns_module() and not sys.is_finalizing():
            self.stop_intercepting()
            self.release_all(rebind=True)
            self._return_encoded()
        super().close()

    @torch.no_grad()
    def _return_encoded(self) -> None:
        """Leaves encoded weights in the module, which outlives the engine: decoded, or unread if the model's files
        provide them."""
        for unit in self._block_store.placement.blocks:
            if unit.viewable:
                continue
            unread = {id(p.parameter) for p in unit.placed if has_source(self._module, p.parameter)}
            values = [p.parameter if id(p.parameter) in unread else self.read(p.parameter) for p in unit.placed]
            unit.show_copies(values, step=unit.version)
            unit.assign_buffers(unit.store_buffer, None, streamed=False, low_streamed=False)
            for placed in unit.placed:
                if id(placed.parameter) in unread:
                    put_back(self._module, placed.parameter)


def _check_host_memory(unit: Unit) -> None:
    """Raises if host memory has no room for the decoded weights of a unit. The system would end the process instead."""
    if sys.platform != "linux":
        return
    free = host_free_bytes()
    if free < _ROOM * unit.scratch_nbytes:
        raise RuntimeError(
            f"host memory has no room for the decoded base, got {free / 1e9:.1f} GB free at {unit.name}: save the "
            "adapters alone, by save_pretrained of the PEFT model, by save_checkpoint, or from Trainer with "
            "zero_optimization.stage 3"
        )
