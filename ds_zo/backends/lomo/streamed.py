"""Streamed blocks under LOMO: their recomputation, the uploads of each pass, and access to stored weights."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager

import torch
import torch.distributed as dist
from torch import nn

from ds_zo.backends.common.pretrained import PretrainedSaving
from ds_zo.backends.lomo.parameters import ParameterState
from ds_zo.backends.recompute.block_store import RecomputedBlockStore, RecomputedModuleState
from ds_zo.backends.recompute.blocks import (
    BlockConsumer,
    RecomputedBlock,
    refuse_router_logits,
    refuse_shared_modules,
    shared_parameters,
)
from ds_zo.backends.recompute.compiled_blocks import BlockCompiler
from ds_zo.checkpoint.snapshot import host_copy, persistent_buffers
from ds_zo.streaming.intercepted import without_interception


def wrap_blocks(
    module: nn.Module,
    block_store: RecomputedBlockStore,
    states: Sequence[ParameterState],
    *,
    consumer: BlockConsumer,
    compiler: BlockCompiler | None,
) -> list[RecomputedBlock]:
    """Replaces the forward of each streamed block, and sets `ParameterState.block`."""
    refuse_router_logits(module)
    state_of = {id(state.parameter): state for state in states}
    units = block_store.placement.blocks
    refuse_shared_modules(units)
    found = []
    for unit, shared in zip(units, shared_parameters(module, [u.module for u in units]), strict=True):
        block = RecomputedBlock(unit, block_store, consumer=consumer, shared=shared, compiler=compiler)
        elsewhere = {id(getattr(owner, name)) for owner, name in shared}
        for p in unit.module.parameters():
            if id(p) in state_of and id(p) not in elsewhere:
                state_of[id(p)].block = block
                block.parameter_states.append(state_of[id(p)])
        found.append(block)
    return found


@contextmanager
def forward_pass(block_store: RecomputedBlockStore, blocks: Sequence[RecomputedBlock]) -> Iterator[None]:
    """Context of a training forward of streamed blocks. The last blocks stay in their device slots, because the
    backward starts with them."""
    with ExitStack() as stack:
        for block in blocks:
            if getattr(block.unit.module, "gradient_checkpointing", False):
                block.unit.module.gradient_checkpointing = False  # type: ignore[assignment]
                stack.callback(setattr, block.unit.module, "gradient_checkpointing", True)
        stack.callback(block_store.runtime.finish)
        block_store.start_forward()
        yield


def start_backward(
    block_store: RecomputedBlockStore,
    blocks: Sequence[RecomputedBlock],
    *,
    trains: Callable[[ParameterState], bool],
    measures: bool,
) -> None:
    """Schedules the uploads of a backward pass: blocks in the reverse of the order in which they ran. `measures`:
    weights do not change, and uploads for the second pass begin while this one ends."""
    calls = sorted((call for block in blocks for call in block.calls()), key=lambda call: -call.number)
    trained = [block.unit for block in blocks if any(map(trains, block.parameter_states))]
    order = [call.block.unit for call in calls]
    block_store.start_backward(order, downloads=() if measures else trained, repeats=measures)


class StreamedWeights:
    """Access to the stored weights of a model whose blocks are streamed or sharded. Its methods are those of `Backend`
    with the same names."""

    def __init__(self, module: nn.Module, block_store: RecomputedBlockStore) -> None:
        self._module = module
        self._block_store = block_store
        self._state = RecomputedModuleState(block_store, module)
        self._pretrained = PretrainedSaving(module, self._state.read)

    def unwatched(self) -> AbstractContextManager[None]:
        """Context in which parameters do not report reads ([Note: direct access to parameters])."""
        return self._state.unwatched()

    def stored(self) -> dict[str, torch.Tensor]:
        self._block_store.wait()
        collected = self._state.collected
        with without_interception():
            named = self._module.named_parameters(remove_duplicate=False)
            weights = {name: collected.get(id(p), p.detach()) for name, p in named}
        buffers = {name: buffer.detach() for name, buffer in persistent_buffers(self._module)}
        return weights | (host_copy(buffers) if collected else buffers)

    @property
    def stored_are_copies(self) -> bool:
        return bool(self._state.collected)

    def write_stored(self, name: str, target: torch.Tensor, value: torch.Tensor) -> None:
        parameter = self._state.sharded.get(name)
        if parameter is None:
            target.copy_(value)
        else:
            self._state.write(parameter, value)

    @contextmanager
    def readable_on_rank_0(self) -> Iterator[None]:
        if self._block_store.shards is None:
            yield
            return
        with self._state.collecting(keeps=dist.get_rank() == 0):
            yield

    def close(self) -> None:
        self._pretrained.close()
        keep_weights = self._state.owns_module() and not sys.is_finalizing()
        self._state.close()
        self._block_store.close(keep_weights=keep_weights)
