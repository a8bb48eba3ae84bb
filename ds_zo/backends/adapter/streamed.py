"""A frozen base with streamed blocks: their storage in the format of `frozen_dtype`, and the passes over them.

All parameters that may be trained are on the device. A backward pass adds their gradients to `parameter.grad`, as
autograd does. Stored blocks never change, so nothing is copied back to the host. A block that is not stored in its
parameters' dtype is decoded into one scratch buffer, which all blocks share, each time that it is materialised. Large
blocks are decoded by matrix ([Note: decoding by matrix]).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import nn

from ds_zo.backends.adapter.activations import HostInputs
from ds_zo.backends.adapter.matrix_decoding import attach, detach, placeholders
from ds_zo.backends.adapter.module_state import FrozenModuleState
from ds_zo.backends.adapter.trained import resident_ids
from ds_zo.backends.common.frozen_format import plan_frozen_format
from ds_zo.backends.common.startup import StartupSummary, formats_of, summary_of_blocks
from ds_zo.backends.recompute.block_store import MaterialisedBlock, RecomputedBlockStore
from ds_zo.backends.recompute.blocks import refuse_router_logits
from ds_zo.backends.recompute.wrapping import RecomputedBlocks, forward_pass
from ds_zo.config import Resolved
from ds_zo.ops import Planes
from ds_zo.streaming.budget import budget_nbytes, decodes_by_matrix, decoding_nbytes
from ds_zo.streaming.slot import Slot
from ds_zo.streaming.units import Unit


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
