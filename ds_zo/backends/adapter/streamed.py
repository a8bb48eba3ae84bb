"""The streamed blocks of a frozen base: forward passes, and backward passes that recompute blocks.

A backward pass adds the gradients of a block's trained parameters to `parameter.grad`, as autograd does. Blocks are
never changed, so nothing is copied back.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from ds_zo.backends.adapter.block_store import FrozenBlockStore, FrozenModuleState
from ds_zo.backends.recompute.blocks import BlockCall, RecomputedBlock, refuse_router_logits
from ds_zo.backends.recompute.wrapping import backward_order, forward_pass, wrap_blocks
from ds_zo.config import Resolved


class StreamedBase:
    """The block store of a model, its recomputed blocks, and the passes over them."""

    def __init__(
        self, module: nn.Module, config: Resolved, *, param_groups: Any, device: torch.device, process_group: Any
    ) -> None:
        refuse_router_logits(module)  # before weights are moved
        self._module = module
        self.block_store = FrozenBlockStore(
            module, config, param_groups=param_groups, device=device, process_group=process_group
        )
        self._blocks = wrap_blocks(module, self.block_store, consumer=self, compiler=None)
        self.state = FrozenModuleState(self.block_store, module)
        self._pass_number = 0
        self._in_pass = self._retains = False
        self._has_checked_strays = False

    @contextmanager
    def forward_pass(self, call: Mapping[str, Any]) -> Iterator[None]:
        """Context of a training forward. `call`: the keywords of the forward."""
        refuse_router_logits(self._module, call)
        self.block_store.check_frozen()
        with forward_pass(self.block_store, self._blocks, self.block_store.start_forward), self._strays_refused():
            yield
        self._has_checked_strays = True

    def _strays_refused(self) -> AbstractContextManager[Any]:
        """See `RecomputedBlockStore.strays_refused`. One forward is checked."""
        return nullcontext() if self._has_checked_strays else self.block_store.strays_refused()

    @contextmanager
    def backward_pass(self, *, retain_graph: bool) -> Iterator[None]:
        """Context of a backward pass. Uploads blocks in the reverse of their forward order."""
        self._pass_number += 1
        self._in_pass, self._retains = True, retain_graph
        try:
            self.block_store.start_backward(backward_order(self._blocks), repeats=False)
            yield
        finally:
            self._in_pass = False
            self.block_store.runtime.finish()

    # The methods of `recompute.blocks.BlockConsumer`

    def begin_block_backward(self, call: BlockCall) -> bool:
        if not self._in_pass:
            raise RuntimeError(
                "streamed blocks are uploaded in the order that engine.backward plans, got loss.backward(): call "
                "engine.backward(loss)"
            )
        call.last_pass, call.graph_freed = self._pass_number, not self._retains
        return True

    def end_block_backward(self, block: RecomputedBlock) -> bool:
        return False

    def close(self) -> None:
        for block in self._blocks:
            block.close()
        self.state.close()
        if self.block_store.host_inputs is not None:
            self.block_store.host_inputs.close()
