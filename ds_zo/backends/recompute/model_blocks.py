"""The blocks of a model as LOMO, LSP and adapters use them: on the device, or streamed and computed again."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from ds_zo.backends.common.startup import StartupSummary, resident_summary, summary_of_blocks
from ds_zo.backends.recompute.blocks import (
    BlockCall,
    BlockConsumer,
    RecomputedBlock,
    shared_parameters,
)
from ds_zo.backends.recompute.compiled_blocks import BlockCompiler
from ds_zo.backends.recompute.recomputation import Recomputation
from ds_zo.streaming.block_store import BlockStore
from ds_zo.streaming.blocks import find_blocks
from ds_zo.streaming.device_shards import DeviceShards
from ds_zo.streaming.streams import Streams, streams_for
from ds_zo.streaming.units import Unit
from ds_zo.streaming.use import Use


class ModelBlocks:
    """The blocks of a model that is on the device as a whole. Autograd keeps their graph, so most methods do nothing.
    `RecomputedBlocks` overrides them."""

    is_streamed = is_sharded = False
    """`is_sharded`: all ranks must use all blocks in one order ([Note: sharded blocks])."""
    store: BlockStore | None = None
    """Where blocks are stored apart from the module. None: they are not."""
    shards: DeviceShards | None = None
    """This rank's shards of blocks that are sharded over devices. None: not sharded so."""
    wrapped: Sequence[RecomputedBlock] = ()
    """The blocks whose forward was replaced."""
    units: Sequence[Unit] = ()
    """The blocks that are stored apart from the module."""

    def __init__(
        self, module: nn.Module, *, device: torch.device, paths: Any = None, compiler: BlockCompiler | None = None
    ) -> None:
        """`paths`: see `find_blocks`."""
        self._module, self._device, self._paths = module, device, paths
        self._compiler = compiler

    @property
    def streams(self) -> Streams:
        """The streams of the engine, made anew where no store has made them."""
        return streams_for(self._device)

    def wrap(self, consumer: BlockConsumer) -> None:
        """Prepares the blocks for passes whose gradients `consumer` takes."""
        if self._compiler is not None:
            self._compiler.install(find_blocks(self._module, self._paths).values())

    def close(self) -> None:
        """Restores the blocks' forwards."""
        if self._compiler is not None:
            self._compiler.close()

    # Passes

    def forward(self, *, downloads: Collection[Unit] = ()) -> AbstractContextManager[None]:
        """Context of a forward. `downloads`: blocks that the pass will update."""
        return nullcontext()

    def start_backward(self, *, downloads: Collection[Unit] = (), repeats: bool = False) -> None:
        """Called before a backward pass. `downloads`: blocks that the pass will update. `repeats`: another backward of
        the same graph follows."""

    def start_empty(self) -> None:
        """Called before a backward pass that computes no block again."""

    def finish_pass(self) -> None:
        """Called after a pass, complete or not."""

    def use(self, unit: Unit) -> AbstractContextManager[Any]:
        """Context in which the unit's weights are on the device."""
        return nullcontext()

    # Memory

    @property
    def num_tiles(self) -> int | None:
        """The number of tiles that a resumed run keeps. None: there is none yet."""
        return None

    def keep_tiles(self, number: int | None) -> None:
        """Called with `num_tiles` of the run that is resumed."""

    def settle_tiles(self) -> None:
        """Called after each step, at the latest by `fill_device`: see [Note: the number of tiles]."""

    def fill_device(self) -> None:
        """Called after each step: see `BlockStore.fill_device`."""

    def describe(self) -> list[str]:
        return []

    def startup_summary(self) -> StartupSummary:
        return resident_summary(self._module, self._device)


class RecomputedBlocks(ModelBlocks):
    """The streamed blocks of a model, which keep only their inputs."""

    is_streamed = True

    def __init__(
        self,
        module: nn.Module,
        recomputation: Recomputation,
        *,
        compiler: BlockCompiler | None = None,
        stored_as: str = "",
        fills_after: str = "the first step",
    ) -> None:
        """`stored_as`, `fills_after`: see `summary_of_blocks`."""
        super().__init__(module, device=recomputation.device, compiler=compiler)
        self.recomputation = recomputation
        self.store: BlockStore = recomputation.store
        self.units = recomputation.units
        self.is_sharded, self.shards = self.store.is_sharded, self.store.shards
        self._stored_as, self._fills_after = stored_as, fills_after

    @property
    def streams(self) -> Streams:
        return self.store.streams

    def wrap(self, consumer: BlockConsumer) -> None:
        units = self.recomputation.units
        shared = shared_parameters(self._module, [unit.module for unit in units])
        self.wrapped = [
            RecomputedBlock(unit, self.recomputation, consumer=consumer, shared=its, compiler=self._compiler)
            for unit, its in zip(units, shared, strict=True)
        ]

    def close(self) -> None:
        super().close()
        for block in self.wrapped:
            block.close()
        self.recomputation.close()

    @contextmanager
    def forward(self, *, downloads: Collection[Unit] = ()) -> Iterator[None]:
        """In training, the last blocks stay in their device slots, because the backward starts with them. Checkpointing
        around blocks is switched off."""
        with self.recomputation.forward_checked(), ExitStack() as stack:
            if torch.is_grad_enabled() and self._module.training:
                for block in self.wrapped:
                    if getattr(block.unit.module, "gradient_checkpointing", False):
                        block.unit.module.gradient_checkpointing = False  # type: ignore[assignment]
                        stack.callback(setattr, block.unit.module, "gradient_checkpointing", True)
                stack.callback(self.finish_pass)
                self.recomputation.start_forward(downloads)
            yield

    def start_backward(self, *, downloads: Collection[Unit] = (), repeats: bool = False) -> None:
        """Schedules the uploads in the reverse of the order in which blocks ran."""
        calls = sorted((call for block in self.wrapped for call in block.calls()), key=lambda call: -call.number)
        order = [call.block.unit for call in calls]
        self.recomputation.start_backward(order, downloads=downloads, repeats=repeats)

    def use(self, unit: Unit) -> AbstractContextManager[Use]:
        return self.recomputation.use(unit)

    def start_empty(self) -> None:
        self.store.runtime.start((), then=())

    def finish_pass(self) -> None:
        self.store.runtime.finish()

    @property
    def num_tiles(self) -> int | None:
        return self.recomputation.tile_number.chosen

    def keep_tiles(self, number: int | None) -> None:
        self.recomputation.tile_number.keep(number)

    def settle_tiles(self) -> None:
        self.recomputation.tile_number.settle()

    def fill_device(self) -> None:
        self.settle_tiles()
        self.store.fill_device()

    def describe(self) -> list[str]:
        placement = self.store.placement
        num_blocks = len(placement.blocks)
        return [
            f"ds_zo: {placement.numel:,} parameters in {num_blocks} blocks and {len(placement.units) - num_blocks} "
            f"other modules: {self.startup_summary().weights}; {len(self.store.runtime.slots)} slots; the backward "
            "pass recomputes every block from its inputs"
        ]

    def startup_summary(self) -> StartupSummary:
        tiles = self.recomputation.tile_number.value
        return summary_of_blocks(
            self.store,
            stored_as=self._stored_as + (f"; a block runs over up to {tiles} slices of the batch" if tiles > 1 else ""),
            scratch_nbytes=self.store.placement.scratch_nbytes,
            fills_after=self._fills_after,
        )


class OneBackward:
    """The consumer of blocks whose gradients stay in `parameter.grad`: each block is computed again in one pass that
    `engine.backward` runs."""

    def __init__(self, blocks: ModelBlocks, *, on_block_end: Callable[[Unit, bool], bool | None] | None = None) -> None:
        """`on_block_end(unit, more_to_come)` is called when the gradients of one call of a block have come, while its
        weights are on the device. `more_to_come`: the block runs again in this pass. It returns True if it has changed
        the weights, which are then copied back."""
        self._blocks, self._on_block_end = blocks, on_block_end
        self._number = 0
        """Number of the last pass."""
        self._is_running = self._retains = False

    @contextmanager
    def run(self, *, retain_graph: bool, downloads: Collection[Unit] = ()) -> Iterator[None]:
        """Context of a backward pass. `downloads`: blocks whose weights `on_block_end` may change."""
        self._number += 1
        self._is_running, self._retains = True, retain_graph
        try:
            self._blocks.start_backward(downloads=downloads)
            yield
        finally:
            self._is_running = False
            self._blocks.finish_pass()

    def begin_block_backward(self, call: BlockCall) -> bool:
        if not self._is_running:
            raise RuntimeError(
                "streamed blocks are uploaded in the order that engine.backward plans, got loss.backward(): call "
                "engine.backward(loss)"
            )
        call.last_pass, call.graph_freed = self._number, not self._retains
        return True

    def end_block_backward(self, block: RecomputedBlock) -> bool:
        if self._on_block_end is None:
            return False
        return bool(self._on_block_end(block.unit, block.has_pending_calls(self._number)))
