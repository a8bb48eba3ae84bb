"""The stored weights of a model with streamed blocks: its units, their memory, and the runtime that moves blocks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.utils import logger
from torch import nn

from ds_zo.config import Resolved
from ds_zo.logs import show
from ds_zo.streaming.allocator import AllocatorRetryCheck
from ds_zo.streaming.budget import (
    Needed,
    check_fits,
    release_cached_memory,
    residents_after_a_step,
    unallocated_nbytes,
)
from ds_zo.streaming.device_shards import DeviceShards
from ds_zo.streaming.host_store import HostStore
from ds_zo.streaming.intercepted import check_class
from ds_zo.streaming.interrupts import interrupts
from ds_zo.streaming.loading import reader_of, source_of
from ds_zo.streaming.node import Node, RankPartition
from ds_zo.streaming.placement import Placement, evenly_spaced, move_buffers, place_units
from ds_zo.streaming.rank_values import compare_values
from ds_zo.streaming.runtime import BeforeOverwrite, Runtime
from ds_zo.streaming.shared_store import SharedStore
from ds_zo.streaming.streams import streams_for
from ds_zo.streaming.transport import (
    GatheringTransport,
    LocalCopy,
    MakeTransport,
    NodeGather,
    ShardGather,
    Transport,
)
from ds_zo.streaming.units import Unit, UnitState
from ds_zo.streaming.use import Preparation, Use


class OwnBuffers:
    """What a backend keeps beside the slots of its blocks. In this class it keeps nothing."""

    blocks: BlockStore
    """Set by the store of the blocks, before it allocates anything."""
    before_overwrite: BeforeOverwrite | None = None
    """See `Runtime`."""

    @property
    def num_low_slots(self) -> int:
        return 0

    def make(self) -> None:
        """Called after the slots were made, for the blocks that are streamed now."""

    def free(self) -> None:
        """Called before the slots are freed."""

    def settle(self) -> None:
        """Called before stored bytes are moved or replaced: nothing may read them, or keep what was made of them."""


class BlockStore:
    """Stores a model's units within a memory budget, and later moves blocks to the device where memory is left.

    `make_buffers` is called when the backend's own buffers are known.
    """

    runtime: Runtime

    def __init__(
        self,
        module: nn.Module,
        config: Resolved,
        *,
        placement: Placement,
        num_resident: int,
        needed: Needed,
        device: torch.device,
        process_group: Any,
        remedy: str,
        transport: MakeTransport | None = None,
        own: OwnBuffers | None = None,
    ) -> None:
        """Allocates and fills the units' buffers. `num_resident`: blocks that are on the device from the start.
        `needed`: the device memory of weights and buffers. `remedy`: what a user can do if it exceeds the budget.
        `transport` makes the transport of blocks that ranks do not divide among them. None: `LocalCopy`.
        `own`: the backend's own buffers. Raises before it changes the module if a parameter's class cannot be
        stored."""
        for placed in (placed for unit in placement.units for placed in unit.placed):
            if not placed.parameter.is_meta:  # else it becomes a plain parameter
                check_class(placed.parameter, name=placed.name)
        self.device, self.process_group = device, process_group
        self._own = own or OwnBuffers()
        self.num_rewrites = 0
        """Number of writes to stored bytes that were not updates."""
        self._own.blocks = self
        self.placement = placement
        self._stream = config.section.stream
        self._needed = needed
        self.streams = streams_for(device)
        resident_ids = {id(placement.blocks[i]) for i in evenly_spaced(len(placement.blocks), num_resident)}
        num_ranks = dist.get_world_size(process_group) if dist.is_initialized() else 1
        self.shards: DeviceShards | None = None
        """This rank's shards of blocks that are sharded over the devices of all ranks. None: not sharded so."""
        shared: SharedStore | None = None
        if num_ranks > 1 and config.shards_device:
            self.shards = DeviceShards(Node(process_group, streams=self.streams, all_machines=True))
            if not placement.blocks:
                logger.warning(
                    "ds_zo: no list of blocks of one class was found in this model, so every rank keeps the whole "
                    "model on its device: name the list (ds_zo.stream.blocks)"
                )
        elif num_ranks > 1 and config.zero_stage == 3 and config.stream and num_resident < len(placement.blocks):
            sizes = [n for u in placement.blocks if id(u) not in resident_ids for n in (u.nbytes, u.low_nbytes)]
            shared = SharedStore.of_machine(
                sizes,
                num_units=len(placement.blocks),
                process_group=process_group,
                streams=self.streams,
                pin=config.pin_memory,
            )
        self.store: HostStore
        self.transport: Transport
        if self.shards is not None:
            self.store, self.transport = self.shards, ShardGather(self.shards)
        elif shared is not None:
            self.store, self.transport = shared, NodeGather(shared)
        else:
            self.store = HostStore(device, pin=config.pin_memory)
            self.transport = (transport or LocalCopy)(self.streams, self.store)
        if config.stream or config.shards_device:
            at_first = needed(num_resident)
            if config.shards_device:
                partition = RankPartition(0, num_ranks)
                shards = sum(partition.shard_nbytes(u.nbytes) for u in placement.blocks if id(u) not in resident_ids)
                at_first = replace(at_first, blocks=at_first.blocks + shards)
            check_fits(at_first, budget_gb=self._stream.device_memory_gb, remedy=remedy)
        release_cached_memory(device)
        place_units(placement, self.store, device, resident=lambda u: id(u) in resident_ids, read=reader_of(module))
        if num_ranks > 1:
            shares = self.store.num_sharers > 1
            compare_values(placement, source=source_of(module), shares_memory=shares, process_group=process_group)
        move_buffers(module, device)
        self.may_fill_device = (
            config.stream and self._stream.resident_blocks is None and device.type == "cuda" and self.shards is None
        )
        """Whether `fill_device` has yet to choose resident blocks. The bytes of activations are known only after a
        step, so all blocks are streamed until then."""
        self._retry_check = AllocatorRetryCheck(device)

    @property
    def is_sharded(self) -> bool:
        """Blocks are gathered from several ranks, so that all ranks must materialise all blocks in one order."""
        return isinstance(self.transport, GatheringTransport)

    @property
    def num_resident(self) -> int:
        return sum(not unit.streamed for unit in self.placement.blocks)

    @property
    def resident_nbytes(self) -> int:
        """Bytes of stored weights that are whole on the device."""
        units = self.placement.units
        return sum(u.nbytes for u in units if not u.streamed) + sum(u.low_nbytes for u in units if not u.low_streamed)

    @property
    def slots_nbytes(self) -> int:
        return sum(slot.buffer.numel() for slot in self.runtime.slots)

    def unallocated_nbytes(self) -> int | None:
        """Bytes of device memory that a step may take beside what is allocated. None: there is no limit."""
        claimed = self._needed(self.num_resident).total
        return unallocated_nbytes(self.device, budget_gb=self._stream.device_memory_gb, claimed_nbytes=claimed)

    # Buffers on the device that blocks share

    def make_buffers(self) -> None:
        """Makes the runtime, with slots for the blocks that are streamed now, and the backend's own buffers."""
        if self.device.type == "cuda":
            # Else small buffers could be carved from the memory of a large freed one, which would not fit again.
            torch.cuda.empty_cache()
        self.runtime = Runtime(
            self.placement.blocks,
            self.transport,
            num_slots=self._stream.device_slots if self.streams.overlaps else 1,
            num_low_slots=self._own.num_low_slots,
            before_overwrite=self._own.before_overwrite,
        )
        self._own.make()

    def free_buffers(self) -> None:
        """Frees the slots and the backend's own buffers."""
        self.runtime.invalidate_slots()
        self._own.free()
        self.runtime.free_buffers()

    def remake_buffers(self) -> None:
        """Called after a change of the sizes or the number of the backend's own buffers."""
        self.free_buffers()
        self.make_buffers()
        self._retry_check.restart()

    def fill_device(self) -> None:
        """Called after each step. After the first one, whose activations show how much memory is left, it makes blocks
        resident on the device, as many as fit into the budget beside a step. Resident blocks are not streamed.
        Collective for a shared store."""
        self._retry_check.check()
        if not self.may_fill_device:
            return
        self.may_fill_device = False
        self._own.settle()
        self.wait()
        num_blocks = len(self.placement.blocks)
        wanted, figures = residents_after_a_step(
            self.placement, device=self.device, budget_gb=self._stream.device_memory_gb, needed=self._needed
        )
        wanted = self.store.smallest(wanted)
        if wanted <= 0:
            if num_blocks:
                show(f"ds_zo: all {num_blocks} blocks stay streamed: none fits on the device beside a step ({figures})")
            return
        num_resident = self._make_resident(wanted)
        if num_resident < wanted:
            logger.warning(
                f"ds_zo: the device ran out of memory when {wanted} of {num_blocks} blocks were moved there "
                f"({figures}): {num_resident} blocks are resident and training continues; another process may use this "
                "device; lower ds_zo.stream.device_memory_gb, or set ds_zo.stream.resident_blocks"
            )
        else:
            show(f"ds_zo: {num_resident} of {num_blocks} blocks stay on the device from now on ({figures})")
        self._retry_check.start()

    def _make_resident(self, num_resident: int) -> int:
        """Moves `num_resident` blocks to the device, or fewer if memory runs out; returns how many were moved. Frees
        the blocks' host memory only after everything is allocated, so that blocks can return to it."""
        blocks = self.placement.blocks
        while True:
            self.free_buffers()
            torch.cuda.empty_cache()  # so that resident blocks are not put into cached segments that activations used
            moved: list[tuple[Unit, torch.Tensor, torch.Tensor | None]] = []
            low_moves = num_resident == len(blocks) or self.store.num_sharers > 1
            reached = num_resident
            try:
                for unit in (blocks[i] for i in sorted(evenly_spaced(len(blocks), num_resident))):
                    before = (unit, unit.store_buffer, unit.low_buffer)
                    self._move_to_device(unit, low_moves=low_moves)
                    moved.append(before)
                self.make_buffers()
            except torch.OutOfMemoryError as error:
                if not num_resident:
                    raise RuntimeError(
                        "ds_zo: the device has no memory left for the buffers of streamed blocks, which it held in the "
                        "first step: another process uses its memory; start again from the last checkpoint with a "
                        "smaller budget (ds_zo.stream.device_memory_gb)"
                    ) from error
                reached = min(len(moved), num_resident - max(1, num_resident // 8))
            if reached < num_resident:  # outside the except clause: the error's traceback keeps device tensors alive
                _put_back(moved)
                self.free_buffers()
            agreed = self.store.smallest(reached)
            if agreed == num_resident:
                break
            _put_back(moved)
            num_resident = agreed
        for unit, buffer, low_buffer in moved:
            self.store.free(buffer)
            if low_buffer is not None and not unit.low_streamed:
                self.store.free(low_buffer)
        return num_resident

    def _move_to_device(self, unit: Unit, *, low_moves: bool) -> None:
        """Assigns the unit a device copy of its `store_buffer`, and of its `low_buffer` if `low_moves`. The old buffers
        stay unchanged."""
        buffer, low = self._copy_to_device(unit.store_buffer), unit.low_buffer
        if low is not None and low_moves:
            low = self._copy_to_device(low)
        unit.assign_buffers(buffer, low, streamed=False, low_streamed=not low_moves)
        unit.bind_stored()

    def _copy_to_device(self, buffer: torch.Tensor) -> torch.Tensor:
        copy = torch.empty_like(buffer, device=self.device)
        self.store.copy_whole(copy, buffer)
        return copy

    # Uses

    @contextmanager
    def use(self, unit: Unit, *, prepare: Preparation) -> Iterator[Use]:
        """Context in which the unit's weights are on the device and its parameters show them. Ctrl-C is deferred."""
        with interrupts.deferred():
            self._refuse_nested(unit)
            use = Use(unit, self.runtime)
            try:
                try:
                    with torch.inference_mode(False), torch.no_grad():
                        use.open()
                        prepare.prepare(use)
                    yield use
                finally:
                    prepare.finish(use)
            except BaseException:
                use.abandon()
                raise
            else:
                with torch.inference_mode(False), torch.no_grad():
                    use.release_slot()
            finally:
                use.close()

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

    # Stored bytes

    def wait(self) -> None:
        """Blocks the host until every update has been copied back to its storage."""
        for unit in self.placement.blocks:
            self.runtime.host_wait(unit)

    @contextmanager
    def rewriting(self, *units: Unit) -> Iterator[Callable[[Unit], bool]]:
        """Context around writes to stored bytes that are not updates; all ranks enter it. Yields a function that tells
        whether this rank writes a unit: one rank of a machine writes to shared memory. Downloads to the units have
        completed on entry. On exit, every rank sees the writes."""
        self.num_rewrites += 1
        self._own.settle()
        for unit in units:
            self.runtime.host_wait(unit)
            unit.may_be_changed = True
        meets = any(unit.streamed for unit in units)
        numbers = {id(u): i for i, u in enumerate(self.placement.units)}
        if meets:
            self.store.barrier()
        yield lambda unit: not unit.streamed or self.store.writes(numbers[id(unit)])
        if meets:
            self.store.barrier()

    def rewritten(self) -> None:
        """Called by every rank after writes to stored bytes: slots are uploaded again before their next use."""
        self.runtime.invalidate_slots()
        self.store.barrier()

    @contextmanager
    def updating_shard(self, unit: Unit) -> Iterator[torch.Tensor]:
        """Context in which this rank's shard of a sharded unit may be changed. Yields the bytes of the shard."""
        with torch.inference_mode(False), torch.no_grad(), self.runtime.updating(unit) as shard:
            yield shard

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
        self.runtime.free_buffers()
        self.store.close()


def _put_back(moved: Sequence[tuple[Unit, torch.Tensor, torch.Tensor | None]]) -> None:
    """Assigns the units their host buffers again."""
    for unit, buffer, low_buffer in moved:
        unit.assign_buffers(buffer, low_buffer, streamed=True, low_streamed=True)
        unit.bind_stored()
