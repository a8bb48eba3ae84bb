"""A frozen base with streamed blocks: their storage in the format of `frozen_dtype`, and the passes over them.

All parameters that may be trained are on the device. A backward pass adds their gradients to `parameter.grad`, as
autograd does. Stored blocks never change, so nothing is copied back to the host. A block that is not stored in its
parameters' dtype is decoded into one scratch buffer, which all blocks share, each time that it is used. Large blocks
are decoded by matrix ([Note: decoding by matrix]), and experts in groups ([Note: experts in groups]).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from ds_zo.backends.adapter.experts import ExpertLayers, log_whole_stacks, stack_ids
from ds_zo.backends.adapter.matrix_decoding import attach, detach
from ds_zo.backends.adapter.trained import resident_ids
from ds_zo.backends.common.frozen_format import plan_frozen_format
from ds_zo.backends.common.startup import formats_of
from ds_zo.backends.recompute.model_blocks import RecomputedBlocks
from ds_zo.backends.recompute.recomputation import Recomputation, make_block_store
from ds_zo.config import Resolved
from ds_zo.streaming.budget import budget_nbytes, decodes_by_matrix, decoding_nbytes, groups_nbytes
from ds_zo.streaming.placement import Placement
from ds_zo.streaming.units import Unit
from ds_zo.streaming.use import Preparation, Use

_STATE_NBYTES = 8
"""Bytes of Adam's moments for each trained element."""


class Decoding(Preparation):
    """Decodes a unit that is not stored in its parameters' dtype, into scratch that all units share."""

    def __init__(self, placement: Placement, device: torch.device, *, by_matrix: bool) -> None:
        self._by_matrix = by_matrix
        self._scratch, self._of_groups = (
            torch.empty(nbytes, dtype=torch.uint8, device=device)
            for nbytes in (decoding_nbytes(placement, by_matrix=by_matrix), groups_nbytes(placement))
        )
        self._layers = {unit: ExpertLayers(unit) for unit in placement.blocks}

    def prepare(self, use: Use) -> None:
        unit = use.unit
        if unit.viewable:
            super().prepare(use)
            return
        planes = unit.planes(use.buffer)
        outs = [None] * len(unit.parts) if self._by_matrix else unit.outs(self._scratch)
        for part, out, stored in zip(unit.parts, outs, planes, strict=True):
            if out is not None:
                part.decode_(out, stored)
        use.show(unit.views(planes, outs))
        for part, out, stored in zip(unit.parts, outs, planes, strict=True):
            if out is None and not part.direct:
                attach(part, stored, self._of_groups if part.in_groups else self._scratch)
        self._layers[unit].attach()

    def finish(self, use: Use) -> None:
        self._layers[use.unit].detach()
        detach(use.unit)


class StreamedBase(RecomputedBlocks):
    """The streamed blocks of a frozen base."""

    def __init__(
        self, module: nn.Module, config: Resolved, *, param_groups: Any, device: torch.device, process_group: Any
    ) -> None:
        placement = plan_frozen_format(
            module,
            param_groups,
            config,
            split=False,
            outside_blocks=resident_ids(module, param_groups),
            in_groups=stack_ids(module, device),
        )
        log_whole_stacks(placement)
        budget = budget_nbytes(device, budget_gb=config.section.stream.device_memory_gb)
        by_matrix = decodes_by_matrix(placement, budget_nbytes=budget)
        placement.scratch_nbytes = decoding_nbytes(placement, by_matrix=by_matrix) + groups_nbytes(placement)
        store = make_block_store(
            module,
            config,
            param_groups=param_groups,
            device=device,
            process_group=process_group,
            placement=placement,
        )
        formats, decoded = formats_of(placement.blocks), " and decoded matrix by matrix" if by_matrix else ""
        decoded += ", experts in groups" if groups_nbytes(placement) else ""
        super().__init__(
            module,
            Recomputation(
                module,
                store,
                config,
                preparation=Decoding(placement, device, by_matrix=by_matrix),
                state_nbytes=_STATE_NBYTES,
            ),
            stored_as=f", blocks stored as {formats}{decoded}" if formats else "",
            fills_after="the second step",
        )

    @contextmanager
    def forward(self, *, downloads: Collection[Unit] = ()) -> Iterator[None]:
        if torch.is_grad_enabled() and self._module.training:
            self._check_frozen()
        with super().forward(downloads=downloads):
            yield

    def _check_frozen(self) -> None:
        """Raises if a parameter that is stored with its block requires a gradient."""
        for unit in self.store.placement.blocks:
            for part in unit.parts:
                for placed in part.placed:
                    if placed.parameter.requires_grad:
                        raise ValueError(
                            f"parameter {placed.name} was frozen when deepspeed.initialize ran, and is stored as "
                            f"{part.stored_as}, which cannot be trained: unfreeze it before initialize and give it to "
                            "the optimizer, or freeze it again"
                        )
