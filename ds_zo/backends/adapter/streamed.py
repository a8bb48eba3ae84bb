"""A frozen base with streamed blocks: their storage in the format of `frozen_dtype`, and the passes over them.

All parameters that may be trained are on the device. A backward pass adds their gradients to `parameter.grad`, as
autograd does. Stored blocks never change, so nothing is copied back to the host. A block that is not stored in its
parameters' dtype is decoded into one scratch buffer, which all blocks share, each time that it is materialised. Large
blocks are decoded by matrix ([Note: decoding by matrix]).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import nn

from ds_zo.backends.adapter.activations import HostInputs
from ds_zo.backends.adapter.matrix_decoding import attach, detach, placeholders
from ds_zo.backends.adapter.trained import resident_ids, with_low_bits
from ds_zo.backends.common.frozen_format import plan_frozen_format
from ds_zo.backends.common.startup import StartupSummary, formats_of, summary_of_blocks
from ds_zo.backends.recompute.block_store import MaterialisedBlock, RecomputedBlockStore, RecomputedModuleState
from ds_zo.backends.recompute.blocks import refuse_router_logits
from ds_zo.backends.recompute.wrapping import RecomputedBlocks, forward_pass
from ds_zo.config import Resolved
from ds_zo.ops import Planes
from ds_zo.records.environment import host_free_bytes
from ds_zo.streaming.budget import budget_nbytes, decodes_by_matrix, decoding_nbytes
from ds_zo.streaming.loading import forget_source, has_source, put_back
from ds_zo.streaming.slot import Slot
from ds_zo.streaming.units import PlacedParameter, Unit

_ROOM = 3
"""Decoded copies of a unit that must fit free host memory before it is decoded."""


class FrozenBlockStore(RecomputedBlockStore):
    """Stores the frozen parameters of blocks, and decodes a block's weights when it is materialised."""

    def __init__(
        self,
        module: nn.Module,
        config: Resolved,
        *,
        param_groups: Sequence[dict[str, Any]],
        device: torch.device,
        process_group: Any = None,
    ) -> None:
        placement = plan_frozen_format(
            module, param_groups, config, split=False, outside_blocks=resident_ids(module, param_groups)
        )
        budget = budget_nbytes(device, budget_gb=config.section.stream.device_memory_gb)
        self.decodes_by_matrix = decodes_by_matrix(placement, budget_nbytes=budget)
        placement.scratch_nbytes = decoding_nbytes(placement, by_matrix=self.decodes_by_matrix)
        super().__init__(
            module,
            config,
            param_groups=param_groups,
            device=device,
            process_group=process_group,
            placement=placement,
        )
        self._planes: list[Planes] = []
        """The stored tensors of the unit that is materialised, on the device, if it is decoded by matrix."""
        self._scratch = torch.empty(placement.scratch_nbytes, dtype=torch.uint8, device=device)
        self.host_inputs = (
            HostInputs(self.streams, pin=config.pin_memory) if config.section.stream.offload_activations else None
        )

    @contextmanager
    def materialise(self, unit: Unit) -> Iterator[MaterialisedBlock]:
        with super().materialise(unit) as materialised:
            if unit.viewable:
                yield materialised
                return
            if not unit.streamed:
                with torch.inference_mode(False), torch.no_grad():
                    unit.bind(self._decoded(unit, unit.store_buffer))
            try:
                if self.decodes_by_matrix:
                    attach(unit, self._planes, self._scratch)
                yield materialised
            finally:
                detach(unit)
                if not unit.streamed:
                    unit.bind_stored()

    def _views_in(self, unit: Unit, slot: Slot) -> list[torch.Tensor]:
        """The unit's weights in the slot, decoded, or placeholders where they are decoded by matrix."""
        return super()._views_in(unit, slot) if unit.viewable else self._decoded(unit, slot.buffer)

    def _decoded(self, unit: Unit, buffer: torch.Tensor) -> list[torch.Tensor]:
        planes = unit.planes(buffer)
        if self.decodes_by_matrix:
            self._planes = planes
            return placeholders(unit, planes)
        outs = unit.outs(self._scratch)
        for part, out, stored in zip(unit.parts, outs, planes, strict=True):
            if out is not None:
                part.decode_(out, stored)
        return unit.views(planes, outs)

    def saving_inputs(self, tensors: Sequence[torch.Tensor]) -> AbstractContextManager[None]:
        return super().saving_inputs(tensors) if self.host_inputs is None else self.host_inputs.saving(tensors)

    def startup_summary(self) -> StartupSummary:
        formats = formats_of(self.placement.blocks)
        by_matrix = " and decoded matrix by matrix" if self.decodes_by_matrix else ""
        return summary_of_blocks(
            self,
            stored_as=f", blocks stored as {formats}{by_matrix}" if formats else "",
            scratch_nbytes=self._scratch.numel(),
            fills_after="the second step",
        )

    def check_frozen(self) -> None:
        """Raises if a parameter that is stored with its block requires a gradient."""
        for unit in self.placement.blocks:
            for part in unit.parts:
                for placed in part.placed:
                    if placed.parameter.requires_grad:
                        raise ValueError(
                            f"parameter {placed.name} was frozen when deepspeed.initialize ran, and is stored as "
                            f"{part.stored_as}, which cannot be trained: unfreeze it before initialize and give it to "
                            "the optimizer, or freeze it again"
                        )


class FrozenModuleState(RecomputedModuleState):
    """Access by name to the weights of a `FrozenBlockStore`. Encoded weights are decoded when they are read."""

    _block_store: FrozenBlockStore

    def __init__(self, block_store: FrozenBlockStore, module: nn.Module) -> None:
        self.master_of: Callable[[nn.Parameter], torch.Tensor | None] = lambda parameter: None
        """Returns the float32 master of a trained parameter, which a caller may change. None: it has none."""
        self._changed: set[int] = set()
        """Ids of units whose stored bytes were written to, or handed out where a user may write to them."""
        super().__init__(block_store, module)

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
        with self._block_store.materialise(unit):
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


class StreamedBase(RecomputedBlocks):
    """The block store of a model, its recomputed blocks, and the passes over them."""

    block_store: FrozenBlockStore

    def __init__(
        self, module: nn.Module, config: Resolved, *, param_groups: Any, device: torch.device, process_group: Any
    ) -> None:
        refuse_router_logits(module)  # before weights are moved
        block_store = FrozenBlockStore(
            module, config, param_groups=param_groups, device=device, process_group=process_group
        )
        super().__init__(module, block_store)
        self._module = module
        self.state = FrozenModuleState(block_store, module)

    @contextmanager
    def forward_pass(self, call: Mapping[str, Any]) -> Iterator[None]:
        """Context of a training forward. `call`: the keywords of the forward."""
        refuse_router_logits(self._module, call)
        self.block_store.check_frozen()
        with forward_pass(self.block_store, self.blocks, self.block_store.start_forward):
            yield

    def close(self) -> None:
        super().close()
        self.state.close()
        if self.block_store.host_inputs is not None:
            self.block_store.host_inputs.close()


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
