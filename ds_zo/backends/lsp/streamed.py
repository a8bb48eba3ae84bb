"""LSP with blocks on the host: the next time that a block is on the device, its pending update is applied.

[Note: updates of streamed blocks] A block's weights are on the device only during its forward and its backward
([Note: recomputed blocks]). The backward compresses the block's gradients and needs nothing else of them. Adam's
direction is applied the next time that the block is on the device, for any purpose, before any computation. The changed
weights are then copied back to the host. So a block is uploaded twice a step and downloaded once.

The weights equal those of a resident run bit for bit, if that run's Adam is on the CPU too (a GPU rounds differently).
Projectors, sums and other states of the block's parameters stay on the device. A whole parameter's gradient is moved
from `.grad` to `MatrixState.held_gradient`, because `.grad` must not outlive the weights' time on the device. Adam of a
streamed block's vectors runs on the CPU too, because their weights are streamed with the block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from ds_zo.backends.common.caches import Caches
from ds_zo.backends.common.interrupts import interrupts
from ds_zo.backends.lsp.streamed_state import StreamedUpdateOnAccessState
from ds_zo.backends.recompute.block_store import MaterialisedBlock, RecomputedBlockStore
from ds_zo.backends.recompute.blocks import RecomputedBlock, refuse_router_logits
from ds_zo.backends.recompute.compiled_blocks import BlockCompiler
from ds_zo.backends.recompute.wrapping import RecomputedBlocks, forward_pass
from ds_zo.config import Resolved
from ds_zo.streaming.units import Unit


class UpdatingBlockStore(RecomputedBlockStore):
    """Applies a block's pending update whenever the block is on the device ([Note: updates of streamed blocks])."""

    def __init__(
        self, module: nn.Module, config: Resolved, *, apply_pending_update: Callable[[Unit], bool], **options: Any
    ) -> None:
        """`apply_pending_update` brings the weights of a unit on the device to the last step. True: it changed them."""
        super().__init__(module, config, **options)
        self.apply_pending_update = apply_pending_update

    def start_forward_of(self, pending_units: Sequence[Unit]) -> None:
        """Starts the uploads of a forward pass. `pending_units` have a pending update and will be copied back."""
        self.runtime.start(self.placement.blocks, downloads=pending_units, then=())

    @contextmanager
    def materialise(self, unit: Unit) -> Iterator[MaterialisedBlock]:
        """Brings a unit to the device, applies its pending update, and copies changed weights back at the end.

        An applied direction cannot be applied again, so the weights are copied back even if the body raises."""
        error: BaseException | None = None
        with interrupts.deferred(), super().materialise(unit) as materialised:
            with torch.inference_mode(False), torch.no_grad():
                was_updated = self.apply_pending_update(unit)
            try:
                yield materialised
            except BaseException as raised:
                if not was_updated:
                    raise
                error = raised
            materialised.changed = materialised.changed or was_updated
        if error is not None:
            raise error


def without_caches(module: nn.Module) -> AbstractContextManager[None]:
    """Returns a context in which the model makes no key-value caches."""
    return Caches(module).off()


class StreamedBlocks(RecomputedBlocks):
    """The streamed blocks of a model: their store, and the forward and backward passes over them."""

    block_store: UpdatingBlockStore

    def __init__(
        self,
        module: nn.Module,
        config: Resolved,
        *,
        param_groups: Any,
        device: torch.device,
        apply_pending_update: Callable[[Unit], bool],
        apply_pending_updates: Callable[[], None],
        end_block_backward: Callable[[Unit, bool], None],
        compiler: BlockCompiler | None = None,
    ) -> None:
        """`apply_pending_update`: see `UpdatingBlockStore`. `apply_pending_updates`: applies those of all groups.

        `end_block_backward(unit, more_to_come)` is called when all gradients of a block's backward have come.
        `more_to_come`: the block runs again in this backward pass."""
        refuse_router_logits(module)  # before weights are moved
        block_store = UpdatingBlockStore(
            module, config, apply_pending_update=apply_pending_update, param_groups=param_groups, device=device
        )
        super().__init__(module, block_store, compiler=compiler)
        self._module = module
        self._end_block_backward = end_block_backward
        self.unit_of = {
            id(placed.parameter): unit for unit in self.block_store.placement.blocks for placed in unit.placed
        }
        """The block of each streamed parameter, by the parameter's id."""
        self.state = StreamedUpdateOnAccessState(self.block_store, module, apply_pending_updates)

    # Passes

    @contextmanager
    def forward_pass(self, pending_units: Sequence[Unit]) -> Iterator[None]:
        """Around a forward pass. `pending_units`: blocks whose pending update the pass will apply."""
        start = partial(self.block_store.start_forward_of, pending_units)
        with without_caches(self._module), forward_pass(self.block_store, self.blocks, start):
            yield

    def end_block_backward(self, block: RecomputedBlock) -> bool:
        self._end_block_backward(block.unit, block.has_pending_calls(self.pass_number))
        return False

    # Weights

    def is_materialised(self, parameter: nn.Parameter) -> bool:
        """Whether the parameter's block is on the device."""
        return self.block_store.is_materialised(self.unit_of[id(parameter)])

    def set_update_callback(self, apply_pending_update: Callable[[Unit], bool]) -> None:
        """Replaces a weak callback by a strong one, so that blocks can be brought up to date while the engine
        closes."""
        self.block_store.apply_pending_update = apply_pending_update

    def bring_up_to_date(self, unit: Unit) -> None:
        """Uploads a unit, applies its pending update and copies it back."""
        with self.block_store.materialise(unit):
            pass

    def stored(self) -> dict[str, torch.Tensor]:
        return self.state.stored()

    def close(self) -> None:
        super().close()
        self.state.close()
