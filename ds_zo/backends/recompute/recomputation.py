"""What the recomputed blocks of a model have in common: their store, how their weights are made, and the passes.

Weights are stored in the dtype in which they are computed, unless a `Preparation` decodes them. `Recomputation.use`
brings a streamed block to a slot, which is a buffer on the device, and updates are made in that slot. While a block is
not in use, its parameters are views of the stored bytes.

[Note: sharded blocks] At ZeRO stage 3 the ranks of a machine store each block once, in shared memory ([Note: shared
host memory]). For each use, every rank uploads its shard and the shards are gathered. All ranks have the averaged
gradients, so all make the same update in their slots, and each copies its own shard back. Gathers and reductions must
have the same order on all ranks. Therefore every rank uses every trained block in the planned order, also a block that
its own batch skips. (Ranks may skip blocks, or may all repeat a block equally often. They must not run blocks in
different orders.) Modules outside of blocks are on the device of every rank.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from ds_zo.backends.common.stray_weights import refuse_strays
from ds_zo.backends.recompute.compiled_blocks import is_compiled_by_user
from ds_zo.backends.recompute.host_inputs import HostInputs
from ds_zo.backends.recompute.output_check import OutputCheck
from ds_zo.backends.recompute.tile_number import TileNumber
from ds_zo.config import ConfigError, Resolved
from ds_zo.logs import show
from ds_zo.streaming.block_store import BlockStore
from ds_zo.streaming.budget import device_bytes, reset_peak_memory
from ds_zo.streaming.loading import check_frozen_dtype
from ds_zo.streaming.placement import Placement, plan_units
from ds_zo.streaming.transport import MakeTransport
from ds_zo.streaming.units import Unit
from ds_zo.streaming.use import Preparation, Use


def make_block_store(
    module: nn.Module,
    config: Resolved,
    *,
    param_groups: Sequence[Mapping[str, Any]],
    device: torch.device,
    process_group: Any = None,
    placement: Placement | None = None,
    transport: MakeTransport | None = None,
) -> BlockStore:
    """Stores the weights of a model with recomputed blocks. `placement`: the model's units, if the backend divides the
    model itself. None: updates are made in place, in the dtype of the model. `transport`: see `BlockStore`."""
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
        placement.scratch_nbytes = 0
    units, num_slots = placement, stream.device_slots
    store = BlockStore(
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
        transport=transport,
    )
    store.make_buffers()
    if store.may_fill_device:
        reset_peak_memory(device)
    return store


class Recomputation:
    """The store of recomputed blocks, and the uses and passes of them."""

    def __init__(
        self,
        module: nn.Module,
        store: BlockStore,
        config: Resolved,
        *,
        preparation: Preparation,
        state_nbytes: int = 0,
    ) -> None:
        """`state_nbytes`: see `TileNumber`."""
        self.store = store
        self.device = store.device
        self.output_check = OutputCheck(store.device, forwards_per_step=config.gradient_accumulation_steps)
        on_host = config.section.stream.offload_activations
        self.host_inputs = HostInputs(store.streams, pin=config.pin_memory) if on_host else None
        """Where inputs of blocks are kept until the backward. None: on the device."""
        self._module = module
        self._preparation = preparation
        self.tile_number = TileNumber(module, store, config, state_nbytes=state_nbytes)
        """Slices of the batch over which each block runs."""
        self._untiled: set[tuple[type[nn.Module], str]] = set()
        """Classes of blocks that are not tiled, each with the reason that was logged."""
        self._checked_modes: set[bool] = set()
        """Whether gradients were on in the forwards that were checked for weights used outside of their blocks."""

    @property
    def units(self) -> list[Unit]:
        return self.store.placement.blocks

    def use(self, unit: Unit) -> AbstractContextManager[Use]:
        """Context in which the unit's weights are on the device and its parameters show them."""
        return self.store.use(unit, prepare=self._preparation)

    def start_forward(self, downloads: Collection[Unit] = ()) -> None:
        """Schedules the uploads of a forward pass. `downloads`: units that the pass will update."""
        self.store.runtime.start(self.units, downloads=downloads, then=(), collective=False)

    def start_backward(self, order: Sequence[Unit], *, downloads: Collection[Unit] = (), repeats: bool) -> None:
        """Schedules the uploads of a backward pass. `order`: units in the order in which this rank will need them;
        where blocks are sharded, all ranks take all blocks in reverse order instead. `downloads`: units that the pass
        will update. `repeats`: another pass of the same order follows, so that its first uploads begin early."""
        if self.store.is_sharded:
            order = self.units[::-1]
        self.store.runtime.start(order, downloads=downloads, then=None if repeats else (), collective=False)

    @contextmanager
    def forward_checked(self) -> Iterator[None]:
        """Context of each forward. The first one with gradients on, and the first one with them off, raise where a
        block's weight is used outside of its block, unless the user has compiled the module. Outputs of blocks are
        compared too ([Note: outputs are compared])."""
        mode = torch.is_grad_enabled()
        if mode:
            self.output_check.begin_forward()
            self.tile_number.begin_forward()
        checks = mode not in self._checked_modes and not is_compiled_by_user(self._module)
        with refuse_strays(self.units) if checks else nullcontext():
            yield
        self._checked_modes.add(mode)

    def report_untiled(self, unit: Unit, reason: str) -> None:
        """Logs once why blocks of a class are not tiled."""
        found = (type(unit.module), reason)
        if found not in self._untiled:
            self._untiled.add(found)
            show(
                f"ds_zo: block {unit.name} runs on the whole batch, as may other blocks of its class, and not over "
                f"slices of it (ds_zo.stream.tiles): {reason}"
            )

    def saving_inputs(self, tensors: Sequence[torch.Tensor]) -> AbstractContextManager[None]:
        """Context in which autograd saves the input tensors of one call of a block."""
        return nullcontext() if self.host_inputs is None else self.host_inputs.saving(tensors)

    def close(self) -> None:
        if self.host_inputs is not None:
            self.host_inputs.close()
