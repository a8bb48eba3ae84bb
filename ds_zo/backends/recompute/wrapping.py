"""The streamed blocks of a model: their recomputation, and the passes over all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

from torch import nn

from ds_zo.backends.recompute.block_store import RecomputedBlockStore
from ds_zo.backends.recompute.blocks import (
    BlockCall,
    BlockConsumer,
    RecomputedBlock,
    refuse_router_logits,
    shared_parameters,
)
from ds_zo.backends.recompute.compiled_blocks import BlockCompiler
from ds_zo.streaming.units import Unit


def wrap_blocks(
    module: nn.Module, block_store: RecomputedBlockStore, *, consumer: BlockConsumer, compiler: BlockCompiler | None
) -> list[RecomputedBlock]:
    """Replaces the forward of each streamed block."""
    refuse_router_logits(module)
    units = block_store.placement.blocks
    return [
        RecomputedBlock(unit, block_store, consumer=consumer, shared=shared, compiler=compiler)
        for unit, shared in zip(units, shared_parameters(module, [unit.module for unit in units]), strict=True)
    ]


@contextmanager
def forward_pass(
    block_store: RecomputedBlockStore, blocks: Sequence[RecomputedBlock], start: Callable[[], None]
) -> Iterator[None]:
    """Context of a training forward. `start` schedules its uploads. The last blocks stay in their device slots, because
    the backward starts with them. Checkpointing around blocks is switched off."""
    with ExitStack() as stack:
        for block in blocks:
            if getattr(block.unit.module, "gradient_checkpointing", False):
                block.unit.module.gradient_checkpointing = False  # type: ignore[assignment]
                stack.callback(setattr, block.unit.module, "gradient_checkpointing", True)
        stack.callback(block_store.runtime.finish)
        start()
        yield


def backward_order(blocks: Sequence[RecomputedBlock]) -> list[Unit]:
    """The units in the order in which a backward pass needs them: the reverse of the order in which they ran."""
    calls = sorted((call for block in blocks for call in block.calls()), key=lambda call: -call.number)
    return [call.block.unit for call in calls]


class RecomputedBlocks:
    """The streamed blocks of a model, which are computed again in the one backward pass that `engine.backward` runs."""

    def __init__(
        self, module: nn.Module, block_store: RecomputedBlockStore, *, compiler: BlockCompiler | None = None
    ) -> None:
        self.block_store = block_store
        self.blocks = wrap_blocks(module, block_store, consumer=self, compiler=compiler)
        self.pass_number = 0
        self._in_pass = self._retains = False

    @contextmanager
    def backward_pass(self, *, retain_graph: bool) -> Iterator[None]:
        """Context of a backward pass. Uploads blocks in the reverse of their forward order."""
        self.pass_number += 1
        self._in_pass, self._retains = True, retain_graph
        try:
            self.block_store.start_backward(backward_order(self.blocks), repeats=False)
            yield
        finally:
            self._in_pass = False
            self.block_store.runtime.finish()

    def begin_block_backward(self, call: BlockCall) -> bool:
        if not self._in_pass:
            raise RuntimeError(
                "streamed blocks are uploaded in the order that engine.backward plans, got loss.backward(): call "
                "engine.backward(loss)"
            )
        call.last_pass, call.graph_freed = self.pass_number, not self._retains
        return True

    def end_block_backward(self, block: RecomputedBlock) -> bool:
        return False

    def close(self) -> None:
        for block in self.blocks:
            block.close()
