"""The storage of weights for LOMO and LSP with streaming: blocks in host or device memory, other modules on the device.

Weights are stored in the dtype in which they are computed. `RecomputedBlockStore.materialise` copies a streamed block
to a slot, which is a buffer on the device, and updates are made in that slot. While a block is not materialised, its
parameters are views of the stored bytes.

[Note: sharded blocks] At ZeRO stage 3 the ranks of a machine store each block once, in shared memory ([Note: shared
host memory]). To materialise a block, every rank uploads its shard and the shards are gathered. All ranks have the
averaged gradients, so all make the same update in their slots, and each copies its own shard back. Gathers and
reductions must have the same order on all ranks. Therefore every rank materialises every trained block in the planned
order, also a block that its own batch skips. (Ranks may skip blocks, or may all repeat a block equally often. They must
not run blocks in different orders.) Modules outside of blocks are on the device of every rank.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from ds_zo.backends.common.startup import StartupSummary, summary_of_blocks
from ds_zo.backends.common.stray_weights import refuse_strays
from ds_zo.backends.recompute.compiled_blocks import is_compiled_by_user
from ds_zo.backends.recompute.output_check import OutputCheck
from ds_zo.config import ConfigError, Resolved
from ds_zo.streaming.block_store import BlockStore
from ds_zo.streaming.budget import device_bytes, reset_peak_memory
from ds_zo.streaming.loading import check_frozen_dtype
from ds_zo.streaming.placement import Placement, plan_units
from ds_zo.streaming.shared_store import SharedStore
from ds_zo.streaming.slot import Slot
from ds_zo.streaming.units import Unit, UnitState


class MaterialisedBlock:
    """A block whose weights are on the device, for as long as the context of `RecomputedBlockStore.materialise`."""

    def __init__(self) -> None:
        self.changed = False
        """Set by the user of the context: weights were updated, so they are copied back to their storage."""


class RecomputedBlockStore(BlockStore):
    """Stores the weights of a model with recomputed blocks, and materialises a block's weights on the device."""

    def __init__(
        self,
        module: nn.Module,
        config: Resolved,
        *,
        param_groups: Sequence[Mapping[str, Any]],
        device: torch.device,
        process_group: Any = None,
        placement: Placement | None = None,
    ) -> None:
        """`placement`: the model's units, if a subclass divides the model itself."""
        if config.shards_device and config.section.rounding == "kahan":
            raise ConfigError(
                "kahan rounding keeps a residue of every weight on each device, and stage 3 divides the weights among "
                'devices, got both: write "stochastic"',
                at="ds_zo.rounding",
            )
        stream = config.section.stream
        if placement is None:
            check_frozen_dtype(module, "auto")
            placement = plan_units(module, param_groups, block_paths=stream.blocks, split=False)
            placement.scratch_nbytes = 0  # updates are made in place
        units, num_slots = placement, stream.device_slots
        super().__init__(
            module,
            config,
            placement=placement,
            num_resident=min(len(placement.blocks), stream.resident_blocks or 0),
            needed=lambda num_resident: replace(
                device_bytes(units, num_resident=num_resident, num_slots=num_slots), scratch=units.scratch_nbytes
            ),
            device=device,
            process_group=process_group,
            remedy="raise it or keep fewer blocks resident",
        )
        self._module = module
        self.output_check = OutputCheck(device, forwards_per_step=config.gradient_accumulation_steps)
        self._checked_modes: set[bool] = set()
        """Whether gradients were on in the forwards that were checked for weights used outside of their blocks."""
        self._views: dict[tuple[int, int], list[torch.Tensor]] = {}
        """The parameters' views of a slot, by the ids of unit and slot."""
        self._make_buffers()
        if self.may_fill_device:
            reset_peak_memory(device)

    # Materialising blocks

    def start_forward(self) -> None:
        """Schedules the uploads of a forward pass."""
        self.runtime.start(self.placement.blocks, then=(), collective=False)

    def start_backward(self, order: Sequence[Unit], *, downloads: Collection[Unit] = (), repeats: bool) -> None:
        """Schedules the uploads of a backward pass. `order`: units in the order in which this rank will need them;
        where blocks are sharded, all ranks take all blocks in reverse order instead. `downloads`: units that the pass
        will update. `repeats`: another pass of the same order follows, so that its first uploads begin early."""
        if self.is_sharded:
            order = self.placement.blocks[::-1]
        self.runtime.start(order, downloads=downloads, then=None if repeats else (), collective=False)

    @contextmanager
    def materialise(self, unit: Unit) -> Iterator[MaterialisedBlock]:
        """Context in which the unit's parameters are on the device. On exit the weights are copied back if `changed`
        was set; after an error the slot's contents are dropped."""
        self._refuse_nested(unit)
        materialised = MaterialisedBlock()
        slot: Slot | None = None
        try:
            with torch.inference_mode(False), torch.no_grad():
                slot = self.runtime.acquire(unit)
                if slot is not None:
                    self.streams.compute.wait(unit.written_back)  # the last update, before this slot is changed
                    unit.bind(self._views_in(unit, slot))
            if slot is None:
                unit.use_in_place()
            yield materialised
        except BaseException:
            if slot is not None:
                self.runtime.abandon(slot)
                slot.invalidate()
            raise
        else:
            if slot is not None:
                with torch.inference_mode(False), torch.no_grad():
                    if materialised.changed:
                        slot.updated(unit.version + 1)
                    self.runtime.release(unit, slot, download=materialised.changed)
        finally:
            if unit.streamed:
                unit.bind_stored()
            else:
                unit.leave_in_place()

    def _refuse_nested(self, unit: Unit) -> None:
        """Raises if the memory that the unit's weights need may hold those of another block."""
        needs_memory = unit.streamed or not unit.viewable
        for other in self.placement.blocks:
            if (other is unit and unit.in_use) or (needs_memory and other.state is UnitState.MATERIALISED):
                raise ValueError(
                    "a block must not run inside another block, whose weights occupy its memory, got block "
                    f"{unit.name} inside block {other.name}: name the list whose entries are called whole, or [] for "
                    "none (ds_zo.stream.blocks)"
                )

    def saving_inputs(self, tensors: Sequence[torch.Tensor]) -> AbstractContextManager[None]:
        """Context in which autograd saves the input tensors of one call of a block. A subclass may save them in another
        place."""
        return nullcontext()

    @contextmanager
    def updating_shard(self, unit: Unit) -> Iterator[torch.Tensor]:
        """Context in which this rank's shard of a sharded unit may be changed. Yields the bytes of the shard."""
        with torch.inference_mode(False), torch.no_grad(), self.runtime.updating(unit) as shard:
            yield shard

    def is_materialised(self, unit: Unit) -> bool:
        return unit.in_use

    @contextmanager
    def forward_checked(self) -> Iterator[None]:
        """Context of each forward. The first one with gradients on, and the first one with them off, raise where a
        block's weight is used outside of its block, unless the user has compiled the module. Outputs of blocks are
        compared too ([Note: outputs are compared])."""
        mode = torch.is_grad_enabled()
        if mode:
            self.output_check.begin_forward()
        checks = mode not in self._checked_modes and not is_compiled_by_user(self._module)
        with refuse_strays(self.placement.blocks) if checks else nullcontext():
            yield
        self._checked_modes.add(mode)

    @property
    def has_materialised(self) -> bool:
        """Some unit is materialised now."""
        return any(unit.in_use for unit in self.placement.blocks)

    def _views_in(self, unit: Unit, slot: Slot) -> list[torch.Tensor]:
        key = (id(unit), id(slot))
        if key not in self._views:
            self._views[key] = unit.views(unit.planes(slot.buffer), [None] * len(unit.parts))
        return self._views[key]

    def _free_buffers(self) -> None:
        self._views.clear()
        super()._free_buffers()

    # Reading and writing

    def rewritten(self) -> None:
        """Called by every rank after writes to stored bytes: slots are uploaded again before their next use."""
        self.runtime.invalidate_slots()
        self.store.barrier()

    def describe(self) -> str:
        blocks, units = self.placement.blocks, self.placement.units
        return (
            f"ds_zo: {self.placement.numel:,} parameters in {len(blocks)} blocks and {len(units) - len(blocks)} other "
            f"modules: {self.startup_summary().weights}; {len(self.runtime.slots)} slots; the backward pass recomputes "
            "every block from its inputs"
        )

    def startup_summary(self) -> StartupSummary:
        return summary_of_blocks(self)

    def close(self, *, keep_weights: bool) -> None:
        """Frees slots and storage. `keep_weights`: the module remains usable, so its weights move to memory of this
        process. Parameters that are sharded over devices are left without elements, as by DeepSpeed, because no rank
        has more than a shard of them."""
        self.wait()
        for unit in self.placement.blocks if keep_weights else ():
            if unit.is_sharded:
                unit.bind(torch.empty(0, dtype=p.parameter.dtype, device=self.device) for p in unit.placed)
                for placed in unit.placed:
                    placed.parameter._ds_zo_left = True  # type: ignore[attr-defined]
            elif isinstance(self.store, SharedStore) and unit.streamed:
                own = self.store.private(unit.store_buffer)
                unit.assign_buffers(own, None, streamed=False, low_streamed=False)
                unit.bind_stored()
        self.runtime.wait_for_copies()
        self._views.clear()
        self.runtime.free_buffers()
        self.store.close()
