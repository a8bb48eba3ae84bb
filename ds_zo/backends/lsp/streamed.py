"""LSP with blocks on the host: a direction waits for the block's next visit, and goes home with it.

[Note: settled where it is visited] A block's weights are on the device in its forward and in its backward visit alone
([Note: recomputed blocks]). The backward visit compresses its gradients, which is all that it needs of them; Adam's
direction is applied at the next visit, whatever that is for, before anything is computed, and that visit sends the
block back. So a block comes up twice a step and goes down once, and weights are the resident run's, bit for bit, where
that run's Adam is on the CPU too (a GPU's rounds otherwise). All that a block's parameters keep between visits lives on
the device as ever; a whole parameter's gradient is taken out of `.grad`, which must not outlive the visit. Vectors of a
block travel with it, so their Adam runs on the CPU too.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from ds_zo.backends.common.caches import Caches
from ds_zo.backends.common.interrupts import interrupts
from ds_zo.backends.common.pretrained import PretrainedSaving
from ds_zo.backends.recompute.block_store import MaterialisedBlock, RecomputedBlockStore, RecomputedModuleState
from ds_zo.backends.recompute.blocks import (
    BlockCall,
    RecomputedBlock,
    refuse_router_logits,
    refuse_shared_modules,
    shared_parameters,
)
from ds_zo.backends.recompute.compiled_blocks import BlockCompiler
from ds_zo.checkpoint.snapshot import persistent_buffers
from ds_zo.config import Resolved
from ds_zo.streaming.units import Placed, Unit
from ds_zo.streaming.watched import told_to_nobody


class SettlingHomes(RecomputedBlockStore):
    """See [Note: settled where it is visited]."""

    def __init__(self, module: nn.Module, config: Resolved, *, settle: Callable[[Unit], bool], **places: Any) -> None:
        """`settle` brings a visited unit's weights up to date; True: it changed them."""
        super().__init__(module, config, **places)
        self.settle = settle

    def start_forward_of(self, due: Sequence[Unit]) -> None:
        self.runtime.start(self.placement.blocks, downloads=due, then=())

    @contextmanager
    def materialise(self, unit: Unit) -> Iterator[MaterialisedBlock]:
        """A direction that was applied goes home whatever the visit was for, and however it ends: it is spent."""
        error: BaseException | None = None
        with interrupts.deferred(), super().materialise(unit) as materialised:
            with torch.inference_mode(False), torch.no_grad():
                settled = self.settle(unit)
            try:
                yield materialised
            except BaseException as raised:
                if not settled:
                    raise
                error = raised
            materialised.changed = materialised.changed or settled
        if error is not None:
            raise error


class SettledHomesState(RecomputedModuleState):
    """Weights by name, brought up to date before somebody looks."""

    def __init__(self, block_store: RecomputedBlockStore, module: nn.Module, settle: Callable[[], None]) -> None:
        self._settle = settle
        super().__init__(block_store, module)

    def _is_watched(self, unit: Unit) -> bool:
        return True

    def bring_up(self, parameter: nn.Parameter) -> None:
        if not self._is_busy():
            self._settle()
            super().bring_up(parameter)

    def read(self, parameter: nn.Parameter) -> torch.Tensor:
        self._settle()
        return super().read(parameter)

    def write(self, parameter: nn.Parameter, value: torch.Tensor) -> None:
        self._settle()
        super().write(parameter, value)

    def _full_fp32(self, unit: Unit, placed: Placed) -> torch.Tensor:
        self._settle()
        return super()._full_fp32(unit, placed)

    def _before_load(self, unit: Unit) -> None:
        self._settle()
        super()._before_load(unit)


def without_caches(module: nn.Module) -> AbstractContextManager[None]:
    return Caches(module).off()


class StreamedBlocks:
    """The blocks of a model: their block_store, and the passes over them."""

    def __init__(
        self,
        module: nn.Module,
        config: Resolved,
        *,
        param_groups: Any,
        device: torch.device,
        settle: Callable[[Unit], bool],
        settle_all: Callable[[], None],
        ended: Callable[[Unit, bool], None],
        compiler: BlockCompiler | None = None,
    ) -> None:
        """`ended`: all gradients of a visit have come; the flag says that the unit is visited again in this pass."""
        refuse_router_logits(module)
        self.block_store = SettlingHomes(module, config, settle=settle, param_groups=param_groups, device=device)
        self._module = module
        self._ended = ended
        self._pass = 0
        self._is_passing = self._retains = False
        units = self.block_store.placement.blocks
        refuse_shared_modules(units)
        self._blocks = [
            RecomputedBlock(unit, self.block_store, consumer=self, shared=shared, compiler=compiler)
            for unit, shared in zip(units, shared_parameters(module, [u.module for u in units]), strict=True)
        ]
        self.unit_of = {id(placed.parameter): unit for unit in units for placed in unit.placed}
        """Of parameters that come and go."""
        self.state = SettledHomesState(self.block_store, module, settle_all)
        self._pretrained = PretrainedSaving(module, self.state.read)

    # Passes

    @contextmanager
    def forward_pass(self, due: Sequence[Unit]) -> Iterator[None]:
        """`due`: blocks whose weights will change at their visit."""
        with ExitStack() as stack:
            stack.enter_context(without_caches(self._module))
            for block in self._blocks:
                if getattr(block.unit.module, "gradient_checkpointing", False):
                    block.unit.module.gradient_checkpointing = False  # type: ignore[assignment]
                    stack.callback(setattr, block.unit.module, "gradient_checkpointing", True)
            stack.callback(self.block_store.runtime.finish)
            self.block_store.start_forward_of(due)
            yield

    @contextmanager
    def backward_pass(self, *, retain_graph: bool) -> Iterator[None]:
        """Blocks in the reverse of the order that they ran in."""
        self._pass += 1
        self._is_passing, self._retains = True, retain_graph
        calls = sorted((call for block in self._blocks for call in block.calls()), key=lambda call: -call.number)
        try:
            self.block_store.start_backward([call.block.unit for call in calls], repeats=False)
            yield
        finally:
            self._is_passing = False
            self.block_store.runtime.finish()

    def begin_block_backward(self, call: BlockCall) -> bool:
        if not self._is_passing:
            raise RuntimeError("loss.backward() cannot order the visits of streamed blocks: call engine.backward(loss)")
        call.last_pass, call.graph_freed = self._pass, not self._retains
        return True

    def end_block_backward(self, block: RecomputedBlock) -> bool:
        self._ended(block.unit, block.has_pending_calls(self._pass))
        return False

    # Weights

    def settle_by(self, settle: Callable[[Unit], bool]) -> None:
        """By one that is kept alive: the last visits are yet to come."""
        self.block_store.settle = settle

    def bring_up_to_date(self, unit: Unit) -> None:
        with self.block_store.materialise(unit):
            pass

    def stored(self) -> dict[str, torch.Tensor]:
        self.block_store.wait()
        with told_to_nobody():
            weights = {name: p.detach() for name, p in self._module.named_parameters(remove_duplicate=False)}
        return weights | {name: buffer.detach() for name, buffer in persistent_buffers(self._module)}

    def close(self) -> None:
        for block in self._blocks:
            block.close()
        self._pretrained.close()
        keep_weights = self.state.owns_module() and not sys.is_finalizing()
        self.state.close()
        self.block_store.close(keep_weights=keep_weights)
