"""Where streamed LOMO's weights live: blocks on the host or on the device, everything around them on the device.

Weights are stored as they are computed with, and updated in the slot that a visit brings them to. Between visits a
parameter is its stored bytes.

[Note: sharded blocks] At ZeRO stage 3 the ranks of a machine keep the stored bytes together ([Note: shared host
memory]): a visit gathers the pieces that ranks upload, every rank updates the slot alike, from gradients that all have
the average of, and each sends its own piece home. So that gathers and reductions meet in one order, every rank visits
every trained block in its turn, also one that its own batch skipped. (Ranks may skip blocks, or repeat them all
alike, but not run them in an order of their own.) What stands around blocks is on every rank's device.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.utils import logger
from torch import nn

from ds_zo.backends.common.module_state import ModuleState
from ds_zo.backends.common.stray_weights import refuse_strays
from ds_zo.backends.recompute.compiled_blocks import is_compiled_by_user
from ds_zo.config import ConfigError, Resolved
from ds_zo.streaming.allocator import Room
from ds_zo.streaming.budget import check_fits, device_bytes, give_back_unused, measure_from_here
from ds_zo.streaming.device_shards import DeviceShardRuntime, DeviceShards
from ds_zo.streaming.filling import DeviceBuffers, fill_device
from ds_zo.streaming.host_store import HostStore
from ds_zo.streaming.loading import reader_of
from ds_zo.streaming.node import Node, Share
from ds_zo.streaming.placement import move_buffers, plan_units, settle, spread
from ds_zo.streaming.runtime import Runtime
from ds_zo.streaming.sharded import ShardedRuntime
from ds_zo.streaming.shared_store import SharedStore
from ds_zo.streaming.sharing import share_store
from ds_zo.streaming.slots import Slot
from ds_zo.streaming.units import Placed, Unit


class MaterialisedBlock:
    """One stay of a block on the device."""

    def __init__(self) -> None:
        self.changed = False
        """Its weights were updated, so they have to be sent back."""


class RecomputedBlockStore:
    """The placement, the host store, and visits to it."""

    def __init__(
        self,
        module: nn.Module,
        config: Resolved,
        *,
        param_groups: Sequence[Mapping[str, Any]],
        device: torch.device,
        process_group: Any = None,
    ) -> None:
        self._module = module
        self._stream = config.section.stream
        self.device = device
        self.placement = plan_units(module, param_groups, block_paths=self._stream.blocks, split=False)
        self.placement.scratch_nbytes = 0  # updates are made in place
        blocks = self.placement.blocks
        num_resident = min(len(blocks), self._stream.resident_blocks or 0)
        stays = {id(blocks[i]) for i in spread(len(blocks), num_resident)}
        num_ranks = dist.get_world_size(process_group) if dist.is_initialized() else 1
        needed = device_bytes(self.placement, num_resident=num_resident, **self._sizes(num_resident))
        if config.shards_device:
            pieces = sum(Share(0, num_ranks).piece_nbytes(u.nbytes) for u in blocks if id(u) not in stays)
            needed = replace(needed, blocks=needed.blocks + pieces)
        check_fits(needed, budget_gb=self._stream.device_memory_gb, remedy="raise it or keep fewer blocks resident")
        self.shared: SharedStore | None = None
        """The host store, where ranks of a machine keep it together."""
        self.shards: DeviceShards | None = None
        """The weights, where all ranks' devices keep them together."""
        if num_ranks > 1 and config.shards_device:
            self._check_shards(config)
            self.shards = DeviceShards(Node(process_group, device=device, everywhere=True), device=device)
        elif num_ranks > 1 and config.zero_stage == 3 and num_resident < len(blocks):
            self.shared = share_store(
                self.placement,
                num_resident=num_resident,
                process_group=process_group,
                device=device,
                pin=config.pin_memory,
            )
        self.store = self.shards or self.shared or HostStore(device, pin=config.pin_memory)
        give_back_unused(device)
        settle(self.placement, self.store, device, resident=lambda unit: id(unit) in stays, read=reader_of(module))
        move_buffers(module, device)
        self._views: dict[tuple[int, int], tuple[torch.Tensor, list[torch.Tensor]]] = {}
        """Slices of slots by unit and slot, with the buffer that they are of."""
        self._materialised: set[int] = set()
        self.runtime = self._make_runtime()
        self._may_fill = self._stream.resident_blocks is None and device.type == "cuda" and self.shards is None
        """Activations are known only after a step, so an automatic choice starts with every block on the host."""
        self._room = Room(device)
        if self._may_fill:
            measure_from_here(device)

    def _sizes(self, num_resident: int) -> dict[str, Any]:
        return {
            "num_slots": self._stream.device_slots if self._stream.overlap else 1,
            "num_low_slots": 0,
            "num_passes": 0,
            "num_replay_slots": 0,
            "pairs": False,
        }

    def _check_shards(self, config: Resolved) -> None:
        if config.section.rounding == "kahan":
            raise ConfigError(
                "kahan rounding keeps what it drops of every weight on each device, which stage 3 is to divide, got "
                "both; write stochastic",
                at="ds_zo.rounding",
            )
        if not self.placement.blocks:
            logger.warning(
                "ds_zo: this model has no list of like blocks, so every rank keeps all of it on its device: name the "
                "list (ds_zo.stream.blocks)"
            )

    @property
    def is_sharded(self) -> bool:
        """Blocks are gathered from several ranks, so that all of them visit all blocks in one order."""
        return self.shared is not None or self.shards is not None

    def _make_runtime(self) -> Runtime:
        make: Any = Runtime
        if self.shards is not None:
            make = partial(DeviceShardRuntime, store=self.shards)
        elif self.shared is not None:
            make = partial(ShardedRuntime, store=self.shared)
        made: Runtime = make(
            self.placement.blocks,
            self.device,
            num_slots=self._stream.device_slots,
            num_low_slots=0,
            overlap=self._stream.overlap,
            reuse_buffers=self._stream.reuse_buffers,
        )
        return made

    # Visits

    def start_forward(self) -> None:
        self.runtime.join(ahead=False)
        self.runtime.start(self.placement.blocks, then=())

    def start_backward(self, order: Sequence[Unit], *, downloads: Collection[Unit] = (), repeats: bool) -> None:
        """`again`: the next pass is another of the same order. Ranks that share blocks bring all of them, whatever this
        one expects to visit."""
        if self.is_sharded:
            order = self.placement.blocks[::-1]
        self.runtime.join(ahead=False)
        self.runtime.start(order, downloads=downloads, then=None if repeats else ())

    @contextmanager
    def materialise(self, unit: Unit) -> Iterator[MaterialisedBlock]:
        """Inside, the unit's parameters are on the device."""
        assert id(unit) not in self._materialised, f"{unit.name} runs inside itself"
        materialised = MaterialisedBlock()
        slot: Slot | None = None
        self._materialised.add(id(unit))
        try:
            if unit.streamed:
                with torch.inference_mode(False), torch.no_grad():
                    slot = self.runtime.arrive(unit)
                    if unit.landed is not None:  # an update must not overtake the last one on its way home
                        torch.cuda.current_stream(self.device).wait_event(unit.landed)
                    unit.bind(self._views_in(unit, slot))
            yield materialised
        except BaseException:
            if slot is not None:
                self.runtime.abandon(slot)
                slot.give_up()
            raise
        else:
            if slot is not None:
                with torch.inference_mode(False), torch.no_grad():
                    if materialised.changed:
                        slot.version = unit.version + 1
                    self.runtime.depart(unit, slot, send_back=materialised.changed)
        finally:
            self._materialised.discard(id(unit))
            if unit.streamed:
                unit.bind_stored()

    @contextmanager
    def updating_piece(self, unit: Unit) -> Iterator[torch.Tensor]:
        """Inside, this rank's piece of a unit may be changed."""
        assert isinstance(self.runtime, DeviceShardRuntime)
        with torch.inference_mode(False), torch.no_grad(), self.runtime.updating(unit) as piece:
            yield piece

    def is_materialised(self, unit: Unit) -> bool:
        return id(unit) in self._materialised

    def strays_refused(self) -> AbstractContextManager[None]:
        """Around a forward: a block's weight that is used outside of its block is refused by name."""
        if is_compiled_by_user(self._module):
            return nullcontext()
        return refuse_strays(self.placement.blocks, self._materialised)

    @property
    def has_materialised(self) -> bool:
        return bool(self._materialised)

    def _views_in(self, unit: Unit, slot: Slot) -> list[torch.Tensor]:
        key = (id(unit), id(slot))
        found = self._views.get(key)
        if found is None or found[0] is not slot.buffer:
            found = (slot.buffer, unit.views(unit.planes(slot.buffer), [None] * len(unit.parts)))
            self._views[key] = found
        return found[1]

    # Residency

    def fill_device(self) -> None:
        """After the first step: what its activations and gradients leave of the budget is filled with blocks that never
        leave again."""
        self._room.check()
        if not self._may_fill:
            return
        self._may_fill = False
        self.wait()
        self.runtime.forget()
        filled = fill_device(
            self.placement,
            store=self.store,
            device=self.device,
            budget_gb=self._stream.device_memory_gb,
            sizes=self._sizes,
            buffers=DeviceBuffers(self._free_buffers, self._make_buffers),
        )
        if filled:
            self._room.watch()

    def _make_buffers(self) -> None:
        self.runtime = self._make_runtime()

    def _free_buffers(self) -> None:
        self._views.clear()
        self.runtime.let_go()

    # Reading and writing

    def wait(self) -> None:
        """Until every update has come home."""
        for unit in self.placement.blocks:
            self.runtime.host_wait(unit)

    def collect(self, keep: Callable[[Placed, torch.Tensor], None]) -> None:
        """Shows every parameter's weights on the device, a unit's at a time. By all ranks."""
        for unit in self.placement.units:
            views = [placed.parameter.detach() for placed in unit.placed]
            if self.shards is not None and unit.is_cut:
                views = self.shards.whole(unit)
            for placed, view in zip(unit.placed, views, strict=True):
                keep(placed, view)

    @contextmanager
    def rewriting(self, unit: Unit) -> Iterator[bool]:
        """Around a write to a home, by all ranks alike: whether this one has to make it."""
        self.runtime.host_wait(unit)
        if self.shared is None or not unit.streamed:
            yield True
            return
        self.shared.node.barrier()
        yield self.shared.writes(self.placement.units.index(unit))
        self.shared.node.barrier()

    def rewritten(self) -> None:
        """Every rank has written to block_store."""
        self.runtime.forget()
        if self.shared is not None:
            self.shared.node.barrier()

    def describe(self) -> str:
        gib = 2**30
        blocks, units = self.placement.blocks, self.placement.units
        num_streamed = sum(u.streamed for u in blocks)
        weights = sum(u.nbytes for u in units if not u.streamed)
        slots = sum(slot.buffer.numel() for slot in self.runtime.slots)
        together = "" if self.shared is None else f" (one of {self.shared.share.size} ranks' parts)"
        how = "stream" if self.shards is None else f"are sharded over {self.shards.share.size} ranks' devices"
        host = (
            f"host: {self.store.nbytes / gib:.2f} GiB{together}, {self.store.pinned_nbytes / gib:.2f} GiB of it pinned"
            if self.shards is None
            else f"this rank's pieces {self.shards.nbytes / gib:.2f} GiB"
        )
        return (
            f"ds_zo: {self.placement.numel:,} parameters in {len(blocks)} blocks and {len(units) - len(blocks)} "
            f"modules around them; {num_streamed} blocks {how}, {len(blocks) - num_streamed} stay on the device; all "
            "are computed again in the backward pass from their inputs\n"
            f"ds_zo: device: weights {weights / gib:.2f} GiB, {len(self.runtime.slots)} slots {slots / gib:.2f} GiB; "
            f"{host}"
        )

    def close(self, *, keep_weights: bool) -> None:
        """`keep_weights`: the module goes on with the weights, which are then its own process's. Of sharded ones no rank
        has more than a piece: like DeepSpeed's, they are left without elements."""
        self.wait()
        if self.shards is not None and keep_weights:
            for unit in self.placement.blocks:
                if unit.is_cut:
                    unit.bind(torch.empty(0, dtype=p.parameter.dtype, device=self.device) for p in unit.placed)
                    for placed in unit.placed:
                        placed.parameter._ds_zo_left = True  # type: ignore[attr-defined]
        if self.shared is not None and keep_weights:
            for unit in self.placement.blocks:
                if unit.streamed:
                    unit.settle(self.shared.private(unit.store_buffer), None, streamed=False, low_streamed=False)
                    unit.bind_stored()
        self.runtime.end_copies()
        self._free_buffers()
        self.store.close()


class RecomputedModuleState(ModuleState):
    """Weights by name, where stored bytes are the weights."""

    def __init__(self, block_store: RecomputedBlockStore, module: nn.Module) -> None:
        self._block_store = block_store
        self.collected: dict[int, torch.Tensor] = {}
        """Weights in host memory that this rank may read alone, by the parameter's id."""
        self._gathered: tuple[int, int, dict[int, torch.Tensor]] | None = None
        """The last sharded unit read, and its version: a block's parameters are asked for one at a time."""
        super().__init__(block_store.placement.units, module, device=block_store.device)
        named = module.named_parameters(remove_duplicate=False)
        self.sharded = {name: p for name, p in named if self._placement_of[id(p)][0].is_cut}
        """Parameters of which this rank has a piece at most ([Note: device shards])."""

    @torch.no_grad()
    def bring_up(self, parameter: nn.Parameter) -> None:
        """Updates come home by themselves: all there is to do is to wait. Where no rank has more than a piece, a
        parameter stays a placeholder, as under DeepSpeed's own stage 3."""
        unit, _ = self._placement_of[id(parameter)]
        if self._is_busy() or unit.is_cut:
            return
        with torch.inference_mode(False):
            if self._is_shared(unit):
                self._show_copies(unit, step=unit.version)
            else:
                self._block_store.runtime.expose(unit)

    def _is_busy(self) -> bool:
        return self._block_store.has_materialised

    def _is_shared(self, unit: Unit) -> bool:
        return unit.is_cut or (self._block_store.shared is not None and unit.streamed)

    @torch.no_grad()
    def read(self, parameter: nn.Parameter) -> torch.Tensor:
        unit, placed = self._placement_of[id(parameter)]
        if id(parameter) in self.collected:
            return self.collected[id(parameter)]
        if unit.is_cut:
            return self._read_sharded(unit, parameter)
        if not unit.streamed:
            return parameter.detach()
        return self._stored(unit, placed).clone()

    def _read_sharded(self, unit: Unit, parameter: nn.Parameter) -> torch.Tensor:
        """By all ranks, as they read the same parameters in the same order."""
        if self._gathered is None or self._gathered[:2] != (id(unit), unit.version):
            assert self._block_store.shards is not None
            views = zip(unit.placed, self._block_store.shards.whole(unit), strict=True)
            copies = {id(p.parameter): view.to("cpu", copy=True) for p, view in views}
            self._gathered = (id(unit), unit.version, copies)
        copy = self._gathered[2].pop(id(parameter), None)
        if copy is None:  # a second reader
            self._gathered = None
            return self._read_sharded(unit, parameter)
        return copy

    @contextmanager
    def collecting(self, *, keeps: bool) -> Iterator[None]:
        """Entered by all ranks; inside, one that `keeps` reads weights without the others."""

        def keep(placed: Placed, view: torch.Tensor) -> None:
            if keeps:
                self.collected[id(placed.parameter)] = view.to("cpu", copy=True)

        try:
            with torch.no_grad():
                self._block_store.collect(keep)
            yield
        finally:
            self.collected = {}

    @torch.no_grad()
    def write(self, parameter: nn.Parameter, value: torch.Tensor) -> None:
        unit, placed = self._placement_of[id(parameter)]
        self._gathered = None
        with self._block_store.rewriting(unit) as writes:
            if self._block_store.shards is not None and unit.is_cut:
                self._block_store.shards.write(unit, placed, value)
            elif writes:
                unit.store_one(placed, value)
        unit.bind_stored()
        self._block_store.runtime.forget()

    @torch.no_grad()
    def _full_fp32(self, unit: Unit, placed: Placed) -> torch.Tensor:
        if unit.is_cut:
            return self._read_sharded(unit, placed.parameter).to(self.device, torch.float32)
        # A copy first: CUDA does not read memory that is pinned in part, as shared memory is.
        return self._stored(unit, placed).clone().to(self.device, torch.float32)

    def _before_load(self, unit: Unit) -> None:
        self._block_store.runtime.host_wait(unit)

    def _is_materialised_in_forward(self, unit: Unit) -> bool:
        return unit.streamed

    def _stored(self, unit: Unit, placed: Placed) -> torch.Tensor:
        self._block_store.runtime.host_wait(unit)
        planes = unit.planes(unit.store_buffer)
        index = next(i for i, part in enumerate(unit.parts) if any(p is placed for p in part.placed))
        return placed.view(planes[index].storage)
