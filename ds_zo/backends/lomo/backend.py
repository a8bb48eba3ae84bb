"""LOMO: full-parameter training in the memory of inference. Each gradient is consumed by its update inside the backward
pass, so that one is alive at a time and `step` has nothing left to do but to report.

[Note: two passes] A norm over all gradients is known only when all of them are gone. Where one is needed (clipping by
the global norm, overflow under fp16) the same graph is run backward twice: the first pass measures and drops, the
second updates with the factor that follows, or drops the step where the norm is not finite. With one pass, updates are
skipped one by one ([Note: skipped updates]). No second forward, no change of weights between the passes; both kinds of
activation checkpointing recompute the same twice, dropout masks included. A step that is dropped still makes its second
pass, with nothing kept: it frees the graph, which the next forward could not afford beside its own.

[Note: once a backward] A parameter's hook runs when all its uses have added to the gradient. Reentrant checkpointing
makes a backward of its own for each segment, so a weight shared between segments, or with what is outside them, would
be updated by parts, and later segments recomputed with new weights. It is refused; `use_reentrant=False` is exact.

With `ds_zo.compile_blocks` a block's gradients come together, and one block's are alive at a time
(`compiled_blocks`).

With `offload_param` blocks stream, and each is computed again in a backward of its own ([Note: recomputed blocks],
[Note: gradients in parts]); passes, updates and rounding bits are the same.

On several ranks gradients are averaged a layer at a time on their way to the update ([Note: one order of buckets]). At
stage 3 without `offload_param` blocks come from all ranks' devices instead of the host ([Note: device shards]).
"""

from __future__ import annotations

import math
import sys
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from deepspeed.utils import logger
from torch import nn
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakTensorKeyDictionary

from ds_zo.backends.common.backend import Backend, StepOutcome
from ds_zo.backends.common.caches import Caches
from ds_zo.backends.common.chunked_loss import losses_in_chunks, models_with_causal_loss
from ds_zo.backends.common.deferred_scalar import DeferredScalar
from ds_zo.backends.common.param_groups import ParamGroupIndex
from ds_zo.backends.common.pretrained import PretrainedSaving
from ds_zo.backends.common.stray_weights import used_outside
from ds_zo.backends.lomo.adapters import adapter_parameters, note_initial_lr
from ds_zo.backends.lomo.foreign_leaves import ForeignLeaves
from ds_zo.backends.lomo.gradients import BackwardPhase, Layer, ParameterState
from ds_zo.backends.lomo.reducer import Bucket, GradientReducer, Gradients, Pieces, buckets_of
from ds_zo.backends.lomo.skipped_updates import SkippedUpdates
from ds_zo.backends.recompute.block_store import RecomputedBlockStore, RecomputedModuleState
from ds_zo.backends.recompute.blocks import (
    BlockCall,
    RecomputedBlock,
    refuse_router_logits,
    refuse_shared_modules,
    shared_parameters,
)
from ds_zo.backends.recompute.compiled_blocks import BlockCompiler, is_compiled, run_backward_twice
from ds_zo.checkpoint.errors import CheckpointError
from ds_zo.checkpoint.snapshot import host_copy, persistent_buffers
from ds_zo.config import ConfigError, LOMOParams, Resolved
from ds_zo.optim import (
    OFFSET_ALIGNMENT,
    AdamMoments,
    Dither,
    FactoredMoments,
    LossScaler,
    adamw_update_,
    gradient_guard,
    sgd_update_,
)
from ds_zo.streaming.allocator import SETTING, segments_expand
from ds_zo.streaming.blocks import find_blocks
from ds_zo.streaming.device_shards import ParameterShard
from ds_zo.streaming.node import wait_as_long_as_the_world
from ds_zo.streaming.watched import told_to_nobody

_NORM_FLOOR = 1e-6
_UPDATED = (torch.float32, torch.bfloat16, torch.float16)
_LARGE_LR_FOR_VALUE_CLIPPING = 1e-3
_BARE_STREAMED = "loss.backward() cannot order the visits of streamed blocks: call engine.backward(loss)"

_hooks: Any = WeakTensorKeyDictionary()
"""The handle on each parameter: a second engine for the same module takes the place of the first."""


class LOMOBackend(Backend):
    name: ClassVar[str] = "lomo"
    accumulates: ClassVar[bool] = False
    updates_pieces: ClassVar[bool] = True
    """Its rule needs no more of a parameter than the elements that it changes."""
    settings: LOMOParams

    def __init__(
        self,
        module: nn.Module,
        config: Resolved,
        *,
        optimizer: torch.optim.Optimizer,
        device: torch.device,
        process_group: Any = None,
    ) -> None:
        super().__init__(module, config, optimizer=optimizer, device=device, process_group=process_group)
        assert isinstance(config.optimizer, LOMOParams)
        self.settings = config.optimizer
        half = torch.float16 in (config.dtype, config.autocast)
        self._scaler = LossScaler(config.loss_scale) if half else None
        clips = config.gradient_clipping > 0
        self._by_layer = clips and self.settings.norm_scope == "group"
        self._two_passes = half or (clips and not self._by_layer)
        self._rounding = config.section.rounding
        self._phase = BackwardPhase.IDLE
        self._pass = 0
        self._num_updates = 0
        """Updates made so far, one a backward; chooses the rounding bits."""
        self._coef: torch.Tensor | None = None
        """What gradients of this backward are multiplied by: clipping and unscaling."""
        self._norms: list[torch.Tensor] = []
        self._skipped = SkippedUpdates(device)
        self._membership = ParamGroupIndex()
        self._initial_lrs = [float(group.get("initial_lr", group["lr"])) for group in self.param_groups]
        self._outcome = StepOutcome(applied=True)
        self._pending = False
        """A backward has been made since the last step."""
        self._bare = False
        """A bare backward has, and its update is not counted yet."""
        self._in_bare = False
        """The same of the last forward."""
        self._has_updated = False
        """An update was made since the last step or `zero_grad`."""
        self._retains = False
        self._checked = False
        """A forward was watched for weights of streamed blocks that are used where they are not brought up."""
        self._block_store = None
        if self.places_parameters(config):
            self._block_store = RecomputedBlockStore(
                module, config, param_groups=self.param_groups, device=device, process_group=process_group
            )
        self._models_with_causal_loss = models_with_causal_loss(module)
        self._caches = Caches(module)
        self._compiler = BlockCompiler(twice=self._two_passes) if config.section.compile_blocks else None
        if self._compiler is not None and self._block_store is None:
            self._compiler.install(find_blocks(module, config.section.stream.blocks).values())
        self._slots = self._make_slots()
        self._foreign = ForeignLeaves(module.parameters()) if self._two_passes else None
        self._blocks = self._wrap_blocks()
        self._layers = list({id(s.layer): s.layer for s in self._slots if s.layer is not None}.values())
        self._reducer = self._make_reducer()
        self._handles = [self._hook(slot) for slot in self._slots]
        self._membership.follow(self.param_groups)
        self._show_scale(overflow=False)
        self._state: RecomputedModuleState | None = None
        self._pretrained: PretrainedSaving | None = None
        if self._block_store is not None:
            self._state = RecomputedModuleState(self._block_store, module)
            self._pretrained = PretrainedSaving(module, self._state.read)
        self._warn()

    @classmethod
    def places_parameters(cls, config: Resolved) -> bool:
        several = dist.is_initialized() and dist.get_world_size() > 1
        return config.stream or (config.shards_device and several)

    @classmethod
    def take_optimizer(cls, optimizer: torch.optim.Optimizer, config: Resolved) -> None:
        if isinstance(config.optimizer, LOMOParams) and config.optimizer.adapter is not None:
            note_initial_lr(optimizer)

    # Parameters

    def _make_slots(self) -> list[ParameterState]:
        adapters = adapter_parameters(self.module) if self.settings.adapter is not None else frozenset()
        if self.settings.adapter is not None and not adapters:
            raise ConfigError(
                "adapter trains the adapter parameters of a PEFT model, and this model has none: wrap it with "
                "peft.get_peft_model before deepspeed.initialize, or leave adapter out",
                at=f"{self.config.params_at}.adapter",
            )
        layer_of: dict[int, Layer] = {}
        if self._by_layer:
            blocks = list(find_blocks(self.module, self.config.section.stream.blocks).values())
            for block, shared in zip(blocks, shared_parameters(self.module, blocks), strict=True):
                layer = Layer()
                elsewhere = {id(getattr(owner, name)) for owner, name in shared}
                layer_of |= {id(p): layer for p in block.parameters() if id(p) not in elsewhere}
        slots: list[ParameterState] = []
        offset = 0
        for name, p in self.module.named_parameters():
            if p.requires_grad and p.is_floating_point() and p.dtype not in _UPDATED:
                raise ConfigError(
                    f"parameters are updated in float32, got {name} of {p.dtype}: convert the model before "
                    "deepspeed.initialize, or freeze it",
                    at=self.config.params_at,
                )
            if p.is_floating_point() and p.numel():
                own_layer = layer_of.get(id(p), Layer()) if self._by_layer else None
                slots.append(ParameterState(name, p, offset, id(p) in adapters, own_layer))
                if own_layer is not None:
                    own_layer.slots.append(slots[-1])
            offset += -(-p.numel() // OFFSET_ALIGNMENT) * OFFSET_ALIGNMENT
        return slots

    def _wrap_blocks(self) -> list[RecomputedBlock]:
        if self._block_store is None:
            return []
        refuse_router_logits(self.module)
        slot_of = {id(slot.parameter): slot for slot in self._slots}
        units = self._block_store.placement.blocks
        refuse_shared_modules(units)
        found = []
        for unit, shared in zip(units, shared_parameters(self.module, [u.module for u in units]), strict=True):
            block = RecomputedBlock(unit, self._block_store, consumer=self, shared=shared, compiler=self._compiler)
            elsewhere = {id(getattr(owner, name)) for owner, name in shared}
            for p in unit.module.parameters():
                if id(p) in slot_of and id(p) not in elsewhere:
                    slot_of[id(p)].block = block
                    block.slots.append(slot_of[id(p)])
            found.append(block)
        return found

    def _make_reducer(self) -> GradientReducer | None:
        if not dist.is_initialized() or dist.get_world_size(self.process_group) == 1:
            return None
        wait_as_long_as_the_world(self.process_group, self.device)
        blocks = list(find_blocks(self.module, self.config.section.stream.blocks).values())
        in_pieces = self.updates_pieces and not self._by_layer
        shards = self._block_store.shards if self._block_store is not None and in_pieces else None
        return GradientReducer(
            buckets_of(self.module, blocks, self._slots, shards=shards),
            process_group=self.process_group,
            device=self.device,
            consumer=self,
            blocks_first=self._block_store is not None and self._block_store.is_sharded,
        )

    def _hook(self, slot: ParameterState) -> RemovableHandle:
        """On frozen parameters too, for when they are thawed; torch takes hooks only where gradients are required."""
        p, frozen = slot.parameter, not slot.parameter.requires_grad
        if p in _hooks:
            _hooks.pop(p).remove()
        p.requires_grad_(True)
        handle = p.register_post_accumulate_grad_hook(partial(_dispatch, weakref.ref(self), slot))
        p.requires_grad_(not frozen)
        _hooks[p] = handle
        return handle

    def _check_parameters(self) -> None:
        hooked = {id(slot.parameter) for slot in self._slots}
        for name, p in self.module.named_parameters():
            if p.requires_grad and id(p) not in hooked and p.numel():
                raise ValueError(
                    f"parameter {name} is not one that deepspeed.initialize saw, so its gradient would be lost: add, "
                    "resize or replace parameters before deepspeed.initialize, and load weights without assign=True"
                )

    def _warn(self) -> None:
        lrs = [float(group["lr"]) for group in self.param_groups]
        if dist.is_initialized() and dist.get_rank() != 0:
            return
        if self.settings.clip_grad_value is not None and max(lrs, default=0.0) >= _LARGE_LR_FOR_VALUE_CLIPPING:
            logger.warning(
                f"ds_zo: clipping by value turns the direction of large steps; at lr {max(lrs):g} (1e-3 or more) "
                f"prefer gradient_clipping ({self.config.params_at}.clip_grad_value)"
            )
        budget = self.config.section.stream.device_memory_gb
        if (
            self._block_store is not None
            and self.device.type == "cuda"
            and budget is not None
            and not segments_expand()
        ):
            logger.warning(
                f"ds_zo: of {budget:g} GB, PyTorch's allocator may hold several that no tensor fits in: start with "
                f"PYTORCH_CUDA_ALLOC_CONF={SETTING} in the environment (ds_zo.stream.device_memory_gb)"
            )
        if self.settings.adapter is None:
            return
        if any(slot.parameter.requires_grad and not slot.is_adapter for slot in self._slots):
            logger.warning(
                "ds_zo: PEFT's save_pretrained, and Trainer's saving by it, keep adapters alone: for the weights that "
                f"{self.name} trains beside them save a checkpoint and run ds-zo export"
            )
        else:
            logger.warning(
                "ds_zo: only adapters are trainable, because PEFT freezes the weights it wraps: to train those by "
                f"{self.name}, call requires_grad_(True) on them before deepspeed.initialize"
            )

    # forward and backward

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """In evaluation mode too a backward may follow: models are loaded in it, and need not be put in another."""
        with self._at_work():
            return self._forward(*args, **kwargs)

    def _at_work(self) -> AbstractContextManager[None]:
        return nullcontext() if self._state is None else self._state.unwatched()

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self.module(*args, **kwargs)
        self._in_bare = False
        if self._block_store is not None:
            refuse_router_logits(self.module, kwargs)
        if self.module.training:
            self._check_parameters()
            if self._reducer is not None:
                self._reducer.drop()  # what a bare backward that broke off has left
        with (
            run_backward_twice() if self._two_passes else nullcontext(),
            losses_in_chunks(self._models_with_causal_loss),
            self._caches.off() if self._block_store is not None or self._compiler is not None else nullcontext(),
            self._forward_sweep() if self.module.training else nullcontext(),
            self._block_store.watched() if self._block_store is not None and not self._checked else nullcontext(),
        ):
            output = self.module(*args, **kwargs)
        self._checked = True
        if self._foreign is not None:
            self._foreign.saw((args, kwargs), output)
        return output

    @contextmanager
    def _forward_sweep(self) -> Iterator[None]:
        """Its last blocks stay in their slots: the backward starts with them."""
        if self._block_store is None:
            yield
            return
        with ExitStack() as stack:
            for block in self._blocks:
                if getattr(block.unit.module, "gradient_checkpointing", False):
                    block.unit.module.gradient_checkpointing = False  # type: ignore[assignment]
                    stack.callback(setattr, block.unit.module, "gradient_checkpointing", True)
            stack.callback(self._block_store.runtime.finish)
            self._block_store.start_forward()
            yield

    def _start_sweep(self, phase: BackwardPhase) -> None:
        """Blocks in the reverse of the order they ran in, those of the second pass ahead while the first ends."""
        if self._block_store is None:
            return
        if phase is BackwardPhase.DISCARD:
            self._block_store.runtime.start((), then=())
            return
        calls = sorted((call for block in self._blocks for call in block.calls()), key=lambda call: -call.number)
        trained = [b.unit for b in self._blocks if any(self._trains(slot) for slot in b.slots)]
        measures = phase is BackwardPhase.MEASURE
        order = [call.block.unit for call in calls]
        self._block_store.start_backward(order, downloads=() if measures else trained, again=measures)

    def backward(self, loss: torch.Tensor, *, retain_graph: bool = False) -> None:
        """See [Note: two passes]."""
        with self._at_work():
            self._backward(loss, retain_graph=retain_graph)

    def _backward(self, loss: torch.Tensor, *, retain_graph: bool) -> None:
        self._read_skipped()
        self._refuse_accumulation()
        self._membership.follow(self.param_groups)
        self._skipped.begin(loss)
        self._retains = retain_graph
        scale = 1.0 if self._scaler is None else self._scaler.scale
        scaled = loss if self._scaler is None else loss.float() * scale
        norm: float | DeferredScalar | None = None
        finite = True
        if self._two_passes:
            assert self._foreign is not None
            with self._in_pass(BackwardPhase.MEASURE), self._foreign.kept(scaled):
                scaled.backward(retain_graph=True)
            norm = self._measured() / scale
            finite = math.isfinite(norm)
            self._coef = self._coefficient(norm, scale) if finite else None
        for layer in self._layers:
            layer.num_expected = sum(self._trains(slot) for slot in layer.slots)
        with self._in_pass(BackwardPhase.UPDATE if finite else BackwardPhase.DISCARD):
            scaled.backward(retain_graph=retain_graph)
            for layer in self._layers:
                self._update_layer(layer)  # those with parameters that this loss did not reach
        if self._by_layer and self._norms:
            norm = DeferredScalar(torch.stack(self._norms).norm() / scale)
            self._norms = []
        self._num_updates += finite
        self._settle(norm, applied=finite and self._skipped.end())
        self._has_updated |= finite

    def _read_skipped(self) -> None:
        """See [Note: skipped updates]."""
        self._end_bare()
        self._num_updates -= not self._skipped.read()
        if self._pending and isinstance(self._outcome.applied, DeferredScalar):
            self._outcome = replace(self._outcome, applied=bool(self._outcome.applied.get()))
            self._has_updated &= self._outcome.applied is True

    def _end_bare(self) -> None:
        """Counts the update of the last `loss.backward()`, which had no end of its own."""
        if self._bare:
            self._bare = self._in_bare = False
            self._num_updates += 1
            self._settle(None, applied=self._skipped.end())

    def _refuse_accumulation(self, *arrived: nn.Parameter) -> None:
        """By hand, as the JSON's is refused: the boundary moved, or several losses a step."""
        if self._has_updated and self.settings.accumulation == "refuse":
            for p in arrived:
                p.grad = None
            raise RuntimeError(
                "a step has one backward, because a gradient is gone once its update is made, got a second one before "
                "engine.step(): call that after each, add losses up, or set "
                f'{self.config.params_at}.accumulation to "sequential" for one small update a backward'
            )

    @contextmanager
    def _in_pass(self, phase: BackwardPhase) -> Iterator[None]:
        self._phase = phase
        self._pass += 1
        try:
            self._start_sweep(phase)
            if self._reducer is not None and phase is not BackwardPhase.DISCARD:
                measures = phase is BackwardPhase.MEASURE
                guard = self._skipped.loss_guard if measures or not self._two_passes else None
                self._reducer.begin(self._trains, measures=measures, loss_guard=guard)
            with run_backward_twice() if self._runs_compiled_twice() else nullcontext():
                yield
            self._end_sweep()
            if self._reducer is not None and phase is not BackwardPhase.DISCARD:
                self._reducer.finish()
        except BaseException:
            self._norms = []
            self._skipped.drop()
            for slot in self._slots:
                slot.parameter.grad = None
            if self._reducer is not None:
                self._reducer.drop()
            raise
        finally:
            self._phase = BackwardPhase.IDLE
            for slot in self._slots:
                slot.held = None
            for layer in self._layers:
                layer.waiting = []
            if self._block_store is not None:
                self._block_store.runtime.finish()

    def _runs_compiled_twice(self) -> bool:
        return self._two_passes and (self._compiler is not None or is_compiled(self.module))

    # Blocks that are computed again

    def begin_visit(self, call: BlockCall) -> bool:
        if self._phase is BackwardPhase.IDLE:
            raise RuntimeError(_BARE_STREAMED)
        call.last_pass = call.block.last_visit = self._pass
        call.spent = self._phase is not BackwardPhase.MEASURE and not self._retains
        if self._phase is BackwardPhase.DISCARD:
            return False
        if self._reducer is not None:  # the other ranks may be waiting for blocks that ran there and not here
            for bucket in self._reducer.open_blocks():
                assert bucket.block is not None
                if bucket.block is not call.block and not bucket.block.more_to_come(self._pass):
                    self._reducer.close(bucket)
            self._reducer.send()
        return True

    def end_visit(self, block: RecomputedBlock) -> bool:
        return not block.more_to_come(self._pass) and self._complete_block(block)

    def _complete_block(self, block: RecomputedBlock) -> bool:
        """Takes what is left of a block's gradients while its weights are here. True: weights were changed."""
        for slot in block.slots:
            if slot.held is not None:  # no gradient came for it in the last visit
                slot.parameter.grad, slot.held = slot.held, None
                self._take(slot)
        if self._reducer is not None:
            self._reducer.close_block(block)
        for layer in {id(slot.layer): slot.layer for slot in block.slots if slot.layer is not None}.values():
            self._update_layer(layer)
        return self._has_changed(block)

    def _has_changed(self, block: RecomputedBlock) -> bool:
        stored = {id(placed.parameter) for placed in block.unit.placed}
        return any(slot.last_update == self._pass and id(slot.parameter) in stored for slot in block.slots)

    def _end_sweep(self) -> None:
        """Blocks that also ran in another graph, which this backward did not reach, are still waiting for it."""
        for block in self._blocks:
            if any(slot.held is not None for slot in block.slots):
                assert self._block_store is not None
                with self._block_store.visit(block.unit) as visit:
                    visit.changed = self._complete_block(block)

    def _measured(self) -> float:
        """The one host read of a step."""
        if self._reducer is not None:
            return self._reducer.norm()
        norms, self._norms = self._norms, []
        return torch.stack([*norms, self._skipped.loss_guard]).norm().item()

    def _coefficient(self, norm: float, scale: float) -> torch.Tensor | None:
        limit = 0.0 if self._by_layer else self.config.gradient_clipping
        coef = (min(1.0, limit / (norm + _NORM_FLOOR)) if limit > 0 else 1.0) / scale
        return None if coef == 1.0 else torch.tensor(coef, dtype=torch.float32, device=self.device)

    def _trains(self, slot: ParameterState) -> bool:
        return slot.parameter.requires_grad and slot.parameter in self._membership

    def _arrived(self, slot: ParameterState) -> None:
        """One parameter's gradient is complete. When this returns it is gone, or its layer waits for others."""
        p, phase = slot.parameter, self._phase
        if p.grad is not None and p.grad.layout is not torch.strided:
            p.grad = p.grad.to_dense()  # of an embedding that was made with sparse=True
        if slot.block is not None and phase is not BackwardPhase.IDLE:
            self._check_visited(slot)
            if p.grad is not None and slot.held is not None:
                p.grad = slot.held + p.grad
            slot.held = None
            if slot.block.more_to_come(self._pass):
                slot.held, p.grad = p.grad, None
                return
        self._take(slot)

    def _take(self, slot: ParameterState) -> None:
        p, phase = slot.parameter, self._phase
        if phase is BackwardPhase.IDLE:
            self._check_bare(p)
        if slot.last_pass == self._pass:
            p.grad = None
            raise RuntimeError(
                f"the gradient of {slot.name} came in parts: reentrant checkpointing shares it between segments; pass "
                'gradient_checkpointing_kwargs={"use_reentrant": False} (or use_reentrant=False to checkpoint)'
            )
        slot.last_pass = self._pass
        grad = p.grad
        if grad is None or phase is BackwardPhase.DISCARD or p not in self._membership:
            p.grad = None
            return
        if self._reducer is None:
            self._consume(slot, grad)
            return
        if phase is BackwardPhase.IDLE and not self._reducer.active:
            self._reducer.begin(self._trains, measures=False, loss_guard=self._skipped.loss_guard)
            torch.autograd.Variable._execution_engine.queue_callback(self._reducer.finish)
        p.grad = None
        self._reducer.add(slot, grad)

    def _consume(self, slot: ParameterState, grad: torch.Tensor) -> None:
        """`grad` is the one that counts, and stands in the parameter."""
        if self._phase is BackwardPhase.MEASURE:
            self._norms.append(torch.linalg.vector_norm(grad, dtype=torch.float32))
        elif slot.layer is not None:
            slot.layer.waiting.append(slot)
            if len(slot.layer.waiting) == slot.layer.num_expected:
                self._update_layer(slot.layer)
            return
        else:
            self._update(slot, grad, self._coef)
        slot.parameter.grad = None

    def hold_weights(self, bucket: Bucket) -> AbstractContextManager[None] | None:
        block = bucket.block
        if block is None or self._block_store is None or self._block_store.is_visited(block.unit):
            return nullcontext()
        if self._phase is BackwardPhase.MEASURE and not self._block_store.is_sharded:
            return nullcontext()
        if bucket.in_pieces and block.last_visit == self._pass:
            return nullcontext()  # it needs no weights; the visit was to bring blocks in step with the other ranks
        return None if self._block_store.is_visiting else self._visit(block)

    @contextmanager
    def _visit(self, block: RecomputedBlock) -> Iterator[None]:
        """For gradients that came late, or from other ranks alone."""
        assert self._block_store is not None
        block.last_visit = self._pass
        with self._block_store.visit(block.unit) as visit:
            yield
            visit.changed = self._has_changed(block)

    def consume(self, gradients: Gradients, *, loss_guard: torch.Tensor) -> None:
        self._skipped.loss_guard = loss_guard
        for slot, grad in gradients:
            slot.parameter.grad = grad
            self._consume(slot, grad)
        for slot, _ in gradients:  # layers with parameters that no rank's loss reached
            if slot.layer is not None:
                self._update_layer(slot.layer)

    def consume_pieces(self, block: RecomputedBlock, pieces: Pieces, *, guards: Gradients) -> None:
        """See [Note: gradients in pieces]."""
        assert self._block_store is not None
        if not self._two_passes:
            for slot, guard in guards:
                self._skipped.add(slot, guard)
        guard_of = {} if self._two_passes else {id(slot): (guard,) for slot, guard in guards}
        with self._block_store.updating(block.unit) as shard:
            for slot, segment, grad in pieces:
                self._update_piece(slot, segment, shard, grad, guard_of.get(id(slot), ()))

    def _update_piece(
        self,
        slot: ParameterState,
        segment: ParameterShard,
        shard: torch.Tensor,
        grad: torch.Tensor,
        guards: Sequence[torch.Tensor],
    ) -> None:
        group = self._membership[slot.parameter]
        lr, dtype = float(group["lr"]), slot.parameter.dtype
        rounds = self._rounding == "stochastic" and dtype is not torch.float32
        sgd_update_(
            segment.view(shard, dtype),
            grad,
            lr=lr,
            decay=1.0 - lr * float(group.get("weight_decay", 0.0)),
            coef=self._coef,
            clip_value=self.settings.clip_grad_value,
            dither=Dither(step=self._num_updates, offset=slot.offset + segment.begin) if rounds else None,
            guards=guards,
        )

    def _check_visited(self, slot: ParameterState) -> None:
        assert slot.block is not None and self._block_store is not None
        if not self._block_store.is_visited(slot.block.unit):
            slot.parameter.grad = None
            raise used_outside(slot.name)

    def _check_bare(self, p: nn.Parameter) -> None:
        if self._block_store is not None:
            p.grad = None
            raise RuntimeError(_BARE_STREAMED)
        if self._two_passes or self._by_layer:
            p.grad = None
            raise RuntimeError(
                "loss.backward() cannot clip by norm nor scale the loss for fp16: call engine.backward(loss), or set "
                '"gradient_clipping" to 0 and use bf16'
            )
        if not self._in_bare:
            self._read_skipped()
            self._refuse_accumulation(p)
            self._skipped.begin(None)
            self._membership.follow(self.param_groups)
            self._pass += 1
            self._bare = self._in_bare = self._has_updated = True

    def _update_layer(self, layer: Layer) -> None:
        waiting, layer.waiting = layer.waiting, []
        grads = [(slot, grad) for slot in waiting if (grad := slot.parameter.grad) is not None]
        if not grads:
            return
        norms = torch.stack([torch.linalg.vector_norm(grad, dtype=torch.float32) for _, grad in grads])
        self._norms.append(norms.norm())
        norm = torch.where(norms < math.inf, norms, 0.0).norm()  # of the parameters that are updated
        scale = 1.0 if self._scaler is None else self._scaler.scale
        coef = (self.config.gradient_clipping / (norm / scale + _NORM_FLOOR)).clamp_(max=1.0) / scale
        for (slot, grad), own in zip(grads, norms, strict=True):
            self._update(slot, grad, coef, own)
            slot.parameter.grad = None

    # Updates

    def _update(
        self, slot: ParameterState, grad: torch.Tensor, coef: torch.Tensor | None, norm: torch.Tensor | None = None
    ) -> None:
        """`norm`: the gradient's, where it is known."""
        p = slot.parameter
        known = (self._skipped.loss_guard,) if norm is None else (self._skipped.loss_guard, norm)
        guards = () if self._two_passes else known
        slot.last_update = self._pass
        group = self._membership[p]
        lr, weight_decay = float(group["lr"]), float(group.get("weight_decay", 0.0))
        rounds = self._rounding if p.dtype is not torch.float32 else None
        dither = Dither(step=self._num_updates, offset=slot.offset) if rounds == "stochastic" else None
        if rounds == "kahan" and slot.residue is None:
            slot.residue = torch.zeros_like(p, memory_format=torch.contiguous_format)
        if slot.is_adapter:
            assert self.settings.adapter is not None
            lr = self.settings.adapter.lr * self._schedule_factor(group)
            slot.moments = slot.moments or AdamMoments.zeros(p)
            assert isinstance(slot.moments, AdamMoments)
            guard = adamw_update_(
                p,
                grad,
                slot.moments,
                lr=lr,
                decay=1.0 - lr * self.settings.adapter.weight_decay,
                betas=self.settings.adapter.betas,
                coef=coef,
                clip_value=self.settings.clip_grad_value,
                dither=dither,
                residue=slot.residue,
                guards=guards,
            )
        else:
            decay = 1.0 - lr * weight_decay
            guard = self._update_weight(slot, grad, lr=lr, decay=decay, coef=coef, dither=dither, guards=guards)
        if guard is not None:
            self._skipped.add(slot, guard)

    def _update_weight(
        self,
        slot: ParameterState,
        grad: torch.Tensor,
        *,
        lr: float,
        decay: float,
        coef: torch.Tensor | None,
        dither: Dither | None,
        guards: Sequence[torch.Tensor],
    ) -> torch.Tensor | None:
        """`guards` are the loss's and, where it is known, the gradient's. Returns the latter, if there are any."""
        if len(guards) == 1:
            guards = (*guards, gradient_guard(grad))
        sgd_update_(
            slot.parameter,
            grad,
            lr=lr,
            decay=decay,
            coef=coef,
            clip_value=self.settings.clip_grad_value,
            dither=dither,
            residue=slot.residue,
            guards=guards,
        )
        return guards[-1] if guards else None

    def _schedule_factor(self, group: Mapping[str, Any]) -> float:
        """How far a schedule has moved the rate of the group that an adapter stands in: its own follows."""
        index = next(i for i, other in enumerate(self.param_groups) if other is group)
        initial = self._initial_lrs[index] if index < len(self._initial_lrs) else float(group["lr"])
        return float(group["lr"]) / initial if initial else 1.0

    # step

    def _settle(self, norm: float | DeferredScalar | None, *, applied: bool | DeferredScalar) -> None:
        """What `step` will report; with sequential accumulation a step is skipped when all its micro-batches were."""
        overflow = self._scaler is not None and applied is False
        if self._scaler is not None:
            self._scaler.update(overflow=overflow)
            self._show_scale(overflow=overflow)
        made = True if self._pending and self._outcome.applied is True else applied
        self._outcome = StepOutcome(applied=made, grad_norm=norm, advance_schedule=made is not False or not overflow)
        self._pending = True

    def _show_scale(self, *, overflow: bool) -> None:
        """Where DeepSpeed's monitors and Accelerate look for them."""
        if self._scaler is not None:
            self.optimizer.cur_scale = self._scaler.scale  # type: ignore[attr-defined]
            self.optimizer.overflow = overflow  # type: ignore[attr-defined]

    def step(self) -> StepOutcome:
        self._end_bare()
        outcome = self._outcome if self._pending else StepOutcome(applied=True)
        self._pending = self._bare = self._in_bare = self._has_updated = False
        if self._block_store is not None:
            self._block_store.fill_device()
        return outcome

    def zero_grad(self) -> None:
        """There is no gradient to forget: `backward` has made the update. What follows adds nothing to it."""
        self._has_updated = False

    # Saving, loading, describing

    def state_dict(self) -> dict[str, Any]:
        self._read_skipped()
        return {
            "step": self._num_updates,
            "scaler": None if self._scaler is None else self._scaler.state_dict(),
            "moments": {s.name: s.moments.state_dict() for s in self._slots if s.moments is not None},
            "residues": {s.name: s.residue for s in self._slots if s.residue is not None},
        }

    def check_state(self, state: Mapping[str, Any]) -> None:
        for slot in self._slots:
            saved = state["moments"].get(slot.name)
            if saved is not None and ("mean" in saved) is not slot.is_adapter:
                was, now = (self.name, "an adapter") if slot.is_adapter else ("an adapter", self.name)
                raise CheckpointError(
                    f"{slot.name} was trained as {was} in the checkpoint and as {now} here: write adapter in "
                    f"{self.config.params_at} as it was, or pass load_optimizer_states=False"
                )
            residue = state.get("residues", {}).get(slot.name)
            if residue is not None and residue.shape != slot.parameter.shape:
                raise ValueError(f"what rounding dropped of {slot.name} has shape {tuple(residue.shape)}")
            if saved is not None:
                kind = AdamMoments if slot.is_adapter else FactoredMoments
                kind.from_state_dict(saved, device=torch.device("meta"))
        int(state["step"])
        if state["scaler"] is not None:
            [float(state["scaler"][name]) for name in ("scale", "num_clean", "overflows_left")]

    def load_state_dict(self, state: Mapping[str, Any], *, load_optimizer_states: bool = True) -> None:
        kept = state if load_optimizer_states else {"step": 0, "scaler": None, "moments": {}, "residues": {}}
        self._num_updates = int(kept["step"])
        self._skipped.forget()
        self._pending = self._bare = self._in_bare = self._has_updated = False
        if self._scaler is not None:
            self._scaler.restart()
            if kept["scaler"] is not None:
                self._scaler.load_state_dict(kept["scaler"])
            self._show_scale(overflow=False)
        for slot in self._slots:
            residue = kept.get("residues", {}).get(slot.name) if self._rounding == "kahan" else None
            slot.residue = None if residue is None else residue.to(self.device, slot.parameter.dtype, copy=True)
            saved = kept["moments"].get(slot.name)
            kind = AdamMoments if slot.is_adapter else FactoredMoments
            slot.moments = None if saved is None else kind.from_state_dict(saved, device=self.device)

    def rank_state(self) -> dict[str, Any]:
        """What the micro-batches of a window that is not over have come to."""
        self._read_skipped()
        outcome = self._outcome
        norm = outcome.grad_norm.get() if isinstance(outcome.grad_norm, DeferredScalar) else outcome.grad_norm
        window = {"applied": bool(outcome.applied), "grad_norm": norm, "advance_schedule": outcome.advance_schedule}
        return {"window": window if self._pending else None, "bare": self._bare}

    def check_rank_state(self, state: Mapping[str, Any]) -> None:
        if state.get("window") is not None:
            StepOutcome(**state["window"])

    def load_rank_state(self, state: Mapping[str, Any]) -> None:
        self._pending, self._bare = state.get("window") is not None, bool(state.get("bare", False))
        self._outcome = StepOutcome(**state["window"]) if self._pending else StepOutcome(applied=True)
        self._has_updated = self._bare or (self._pending and bool(self._outcome.applied))

    def describe(self) -> str:
        if self._by_layer:
            clipping = f"each layer's gradients clipped to norm {self.config.gradient_clipping:g}"
        elif self.config.gradient_clipping > 0:
            clipping = f"gradients clipped to norm {self.config.gradient_clipping:g} (0 would spare a pass)"
        elif self.settings.clip_grad_value is not None:
            clipping = f"gradients clipped to values within {self.settings.clip_grad_value:g}"
        else:
            clipping = "gradients not clipped"
        scaling = f", loss scale {self._scaler.scale:g}" if self._scaler is not None else ""
        num_adapters = sum(slot.is_adapter for slot in self._slots)
        adapters = f", {num_adapters} adapter tensors by AdamW" if num_adapters else ""
        passes = "two backward passes" if self._two_passes else "one backward pass"
        lines = [] if self._block_store is None else [self._block_store.describe()]
        ranks = [] if self._reducer is None else [self._reducer.describe()]
        return "\n".join([*lines, f"ds_zo: {passes} a step, {clipping}{scaling}{adapters}", *ranks])

    def stored(self) -> dict[str, torch.Tensor]:
        if self._block_store is None:
            return super().stored()
        self._block_store.wait()
        collected = {} if self._state is None else self._state.collected
        named = self.module.named_parameters(remove_duplicate=False)
        with told_to_nobody():
            weights = {name: collected.get(id(p), p.detach()) for name, p in named}
        buffers = {name: buffer.detach() for name, buffer in persistent_buffers(self.module)}
        return weights | (host_copy(buffers) if collected else buffers)

    @property
    def stored_is_held(self) -> bool:
        return self._state is not None and bool(self._state.collected)

    def write_stored(self, name: str, target: torch.Tensor, value: torch.Tensor) -> None:
        parameter = None if self._state is None else self._state.cut.get(name)
        if self._state is None or parameter is None:
            target.copy_(value)
        else:
            self._state.write(parameter, value)

    @contextmanager
    def readable_alone(self) -> Iterator[None]:
        if self._state is None or self._block_store is None or self._block_store.shards is None:
            yield
            return
        with self._state.collecting(keeps=dist.get_rank() == 0):
            yield

    def stored_changed(self) -> None:
        if self._block_store is not None:
            self._block_store.rewritten()

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()
        for block in self._blocks:
            block.close()
        if self._compiler is not None:
            self._compiler.close()
        if self._pretrained is not None:
            self._pretrained.close()
        if self._block_store is not None and self._state is not None:
            leave_whole = self._state.owns_module() and not sys.is_finalizing()
            self._state.close()
            self._block_store.close(leave_whole=leave_whole)


def _dispatch(backend: weakref.ref[LOMOBackend], slot: ParameterState, parameter: torch.Tensor) -> None:
    """A hook outlives an engine that was dropped without `destroy`; it then does nothing."""
    alive = backend()
    if alive is not None:
        alive._arrived(slot)
