"""LOMO: full-parameter training that never holds the gradients of the whole model.

A hook on each parameter updates the parameter inside the backward pass and frees its gradient. One gradient is alive at
a time. `LOMOBackend.step` only reports the outcome.

[Note: two passes] The global gradient norm is known only after the last gradient, when all gradients have been freed.
Clipping by that norm, and fp16's check for overflow, need it before the first update. In these cases the same graph is
run backward twice. The first pass sums up the norm and drops the gradients. The second pass updates with the resulting
factor. If the norm is not finite, the second pass updates nothing and only frees the graph: the next forward would not
fit into memory beside it. There is one forward, and weights do not change between the passes. Both kinds of activation
checkpointing recompute the same values in both passes, dropout masks included. With a single pass, updates are skipped
per parameter ([Note: skipped updates]).

[Note: one update per backward] A parameter's hook runs after all uses of the parameter have added to its gradient.
Reentrant checkpointing runs a separate backward for each segment. A weight that is used in several segments, or also
outside of them, would be updated several times. Later segments would then be recomputed with the new weights. This is
refused. `use_reentrant=False` gives exact results.

With `ds_zo.compile_blocks` autograd delivers all gradients of a block together, so the gradients of one block are alive
at a time (`compiled_blocks`).

With `offload_param` blocks are streamed, and each is recomputed in a backward of its own ([Note: recomputed blocks],
[Note: gradients in parts]). Passes, updates and rounding bits are the same as without streaming.

On several ranks a layer's gradients are averaged before its update ([Note: one order of buckets]). At stage 3 without
`offload_param`, blocks are gathered from the devices of all ranks instead of the host ([Note: device shards]).
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
from ds_zo.backends.common.startup import StartupSummary
from ds_zo.backends.common.stray_weights import used_outside
from ds_zo.backends.lomo.adapters import adapter_parameters, record_initial_lr
from ds_zo.backends.lomo.buckets import Bucket, Gradients, Pieces, buckets_of
from ds_zo.backends.lomo.foreign_leaves import ForeignLeaves
from ds_zo.backends.lomo.gradients import BackwardPhase, Layer, ParameterState
from ds_zo.backends.lomo.reducer import GradientReducer, LocalReducer, Reducer
from ds_zo.backends.lomo.skipped_updates import SkippedUpdates
from ds_zo.backends.lomo.window import AccumulationWindow, WindowState
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
from ds_zo.streaming.intercepted import without_interception
from ds_zo.streaming.node import use_world_timeout

_NORM_FLOOR = 1e-6
"""Added to a norm before the clipping threshold is divided by it."""
_TRAINABLE_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_LARGE_LR_FOR_VALUE_CLIPPING = 1e-3
_DIRECT_STREAMED = "loss.backward() cannot schedule the uploads of streamed blocks: call engine.backward(loss)"

_hooks: Any = WeakTensorKeyDictionary()
"""The handle of the hook on each parameter. A second engine of the same module replaces the hooks of the first."""


class LOMOBackend(Backend):
    """Updates each parameter by SGD as soon as its gradient is complete. See this module's docstring."""

    accumulates: ClassVar[bool] = False
    updates_pieces: ClassVar[bool] = True
    """The update rule is elementwise, so that a rank can update its piece of a parameter without the rest."""
    has_moments: ClassVar[bool] = False
    """Whether the first update of every parameter makes moments."""
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
        self._clips_by_layer = clips and self.settings.norm_scope == "group"
        self._two_passes = half or (clips and not self._clips_by_layer)
        """See [Note: two passes]."""
        self._rounding = config.section.rounding
        self._phase = BackwardPhase.IDLE
        self._pass_number = 0
        """Number of backward passes begun so far, measuring passes included."""
        self._coef: torch.Tensor | None = None
        """Scalar on the device by which gradients are multiplied to clip and unscale them. None: one."""
        self._norms: list[torch.Tensor] = []
        """Norms of the layers updated in this pass, if gradients are clipped by layer."""
        self._skipped = SkippedUpdates(device)
        self._window = AccumulationWindow(
            self._skipped, accumulation=self.settings.accumulation, params_at=config.params_at
        )
        self._group_index = ParamGroupIndex()
        self._initial_lrs = [float(group.get("initial_lr", group["lr"])) for group in self.param_groups]
        self._retains_graph = False
        """The running `backward` was called with `retain_graph`."""
        self._has_checked_strays = False
        """One forward was checked for weights of streamed blocks that are used outside of their block."""
        self._block_store = None
        if self.places_parameters(config):
            self._block_store = RecomputedBlockStore(
                module, config, param_groups=self.param_groups, device=device, process_group=process_group
            )
        self._models_with_causal_loss = models_with_causal_loss(module)
        self._caches = Caches(module)
        self._compiler = BlockCompiler(backward_twice=self._two_passes) if config.section.compile_blocks else None
        if self._compiler is not None and self._block_store is None:
            self._compiler.install(find_blocks(module, config.section.stream.blocks).values())
        self._parameter_states = self._make_parameter_states()
        self._foreign_leaves = ForeignLeaves(module.parameters()) if self._two_passes else None
        self._blocks = self._wrap_blocks()
        self._layers = list({id(s.layer): s.layer for s in self._parameter_states if s.layer is not None}.values())
        self._reducer = self._make_reducer()
        self._handles = [self._hook(state) for state in self._parameter_states]
        self._group_index.follow(self.param_groups)
        self._publish_scale(overflow=False)
        self._module_state: RecomputedModuleState | None = None
        self._pretrained: PretrainedSaving | None = None
        if self._block_store is not None:
            self._module_state = RecomputedModuleState(self._block_store, module)
            self._pretrained = PretrainedSaving(module, self._module_state.read)
        self._warn()

    @classmethod
    def places_parameters(cls, config: Resolved) -> bool:
        several = dist.is_initialized() and dist.get_world_size() > 1
        return config.stream or (config.shards_device and several)

    @classmethod
    def prepare_optimizer(cls, optimizer: torch.optim.Optimizer, config: Resolved) -> None:
        if isinstance(config.optimizer, LOMOParams) and config.optimizer.adapter is not None:
            record_initial_lr(optimizer)

    # Parameters

    def _make_parameter_states(self) -> list[ParameterState]:
        """One state per floating-point parameter, frozen ones included, in the order of `named_parameters`."""
        adapters = adapter_parameters(self.module) if self.settings.adapter is not None else frozenset()
        if self.settings.adapter is not None and not adapters:
            raise ConfigError(
                "adapter trains the adapter parameters of a PEFT model, and this model has none: wrap it with "
                "peft.get_peft_model before deepspeed.initialize, or leave adapter out",
                at=f"{self.config.params_at}.adapter",
            )
        layer_of: dict[int, Layer] = {}
        if self._clips_by_layer:
            blocks = list(find_blocks(self.module, self.config.section.stream.blocks).values())
            for block, shared in zip(blocks, shared_parameters(self.module, blocks), strict=True):
                layer = Layer()
                elsewhere = {id(getattr(owner, name)) for owner, name in shared}
                layer_of |= {id(p): layer for p in block.parameters() if id(p) not in elsewhere}
        states: list[ParameterState] = []
        offset = 0
        for name, p in self.module.named_parameters():
            if p.requires_grad and p.is_floating_point() and p.dtype not in _TRAINABLE_DTYPES:
                raise ConfigError(
                    f"trained parameters are of dtype float32, bfloat16 or float16, got {name} of {p.dtype}: convert "
                    "the model before deepspeed.initialize, or freeze the parameter",
                    at=self.config.params_at,
                )
            if p.is_floating_point() and p.numel():
                own_layer = layer_of.get(id(p), Layer()) if self._clips_by_layer else None
                states.append(ParameterState(name, p, offset, id(p) in adapters, own_layer))
                if own_layer is not None:
                    own_layer.states.append(states[-1])
            offset += -(-p.numel() // OFFSET_ALIGNMENT) * OFFSET_ALIGNMENT
        return states

    def _wrap_blocks(self) -> list[RecomputedBlock]:
        """Replaces the forward of each streamed block. Empty where blocks are not streamed."""
        if self._block_store is None:
            return []
        refuse_router_logits(self.module)
        state_of = {id(state.parameter): state for state in self._parameter_states}
        units = self._block_store.placement.blocks
        refuse_shared_modules(units)
        found = []
        for unit, shared in zip(units, shared_parameters(self.module, [u.module for u in units]), strict=True):
            block = RecomputedBlock(unit, self._block_store, consumer=self, shared=shared, compiler=self._compiler)
            elsewhere = {id(getattr(owner, name)) for owner, name in shared}
            for p in unit.module.parameters():
                if id(p) in state_of and id(p) not in elsewhere:
                    state_of[id(p)].block = block
                    block.parameter_states.append(state_of[id(p)])
            found.append(block)
        return found

    def _make_reducer(self) -> Reducer:
        if not dist.is_initialized() or dist.get_world_size(self.process_group) == 1:
            return LocalReducer(self)
        use_world_timeout(self.process_group, self.device)
        blocks = list(find_blocks(self.module, self.config.section.stream.blocks).values())
        in_pieces = self.updates_pieces and not self._clips_by_layer
        shards = self._block_store.shards if self._block_store is not None and in_pieces else None
        return GradientReducer(
            buckets_of(self.module, blocks, self._parameter_states, shards=shards),
            process_group=self.process_group,
            device=self.device,
            consumer=self,
            blocks_first=self._block_store is not None and self._block_store.is_sharded,
        )

    def _hook(self, state: ParameterState) -> RemovableHandle:
        """Registers the gradient hook. Frozen parameters get one too, because a user may unfreeze them later. torch
        accepts the hook only while `requires_grad` is True."""
        p, frozen = state.parameter, not state.parameter.requires_grad
        if p in _hooks:
            _hooks.pop(p).remove()
        p.requires_grad_(True)
        handle = p.register_post_accumulate_grad_hook(partial(_dispatch, weakref.ref(self), state))
        p.requires_grad_(not frozen)
        _hooks[p] = handle
        return handle

    def _check_parameters(self) -> None:
        hooked = {id(state.parameter) for state in self._parameter_states}
        for name, p in self.module.named_parameters():
            if p.requires_grad and id(p) not in hooked and p.numel():
                raise ValueError(
                    f"parameter {name} was added or replaced after deepspeed.initialize, so its gradient would be "
                    "lost: add, resize or replace parameters before deepspeed.initialize, and load weights without "
                    "assign=True"
                )

    def _warn(self) -> None:
        lrs = [float(group["lr"]) for group in self.param_groups]
        if dist.is_initialized() and dist.get_rank() != 0:
            return
        if self.settings.clip_grad_value is not None and max(lrs, default=0.0) >= _LARGE_LR_FOR_VALUE_CLIPPING:
            logger.warning(
                f"ds_zo: clipping by value changes the direction of large steps; at lr {max(lrs):g} (1e-3 or more) "
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
                f"ds_zo: PyTorch's allocator may lose several of {budget:g} GB to fragmentation: start with "
                f"PYTORCH_CUDA_ALLOC_CONF={SETTING} in the environment (ds_zo.stream.device_memory_gb)"
            )
        if self.settings.adapter is None:
            return
        if any(state.parameter.requires_grad and not state.is_adapter for state in self._parameter_states):
            logger.warning(
                "ds_zo: PEFT's save_pretrained, which Trainer calls, saves adapters only: to save the other weights "
                f"that {self.config.backend} trains, save a checkpoint and run ds-zo export"
            )
        else:
            logger.warning(
                "ds_zo: only adapters are trainable, because PEFT freezes the weights that it wraps: to train these "
                f"weights by {self.config.backend}, call requires_grad_(True) on them before deepspeed.initialize"
            )

    # Forward and backward

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the module. A backward may follow also in evaluation mode: `from_pretrained` returns models in that
        mode, and a user may train them in it."""
        with self._plain_parameters():
            return self._forward(*args, **kwargs)

    def _plain_parameters(self) -> AbstractContextManager[None]:
        """Context in which parameters do not report reads ([Note: direct access to parameters])."""
        return nullcontext() if self._module_state is None else self._module_state.unwatched()

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self.module(*args, **kwargs)
        self._window.end_bare()
        if self._block_store is not None:
            refuse_router_logits(self.module, kwargs)
        if self.module.training:
            self._check_parameters()
            self._reducer.drop()  # buckets of a direct `loss.backward()` that raised
        makes_no_caches = self.module.training or self._block_store is not None or self._compiler is not None
        with (
            run_backward_twice() if self._two_passes else nullcontext(),
            losses_in_chunks(self._models_with_causal_loss),
            self._caches.off() if makes_no_caches else nullcontext(),
            self._streamed_forward() if self.module.training else nullcontext(),
            self._block_store.strays_refused()
            if self._block_store is not None and not self._has_checked_strays
            else nullcontext(),
        ):
            output = self.module(*args, **kwargs)
        self._has_checked_strays = True
        if self._foreign_leaves is not None:
            self._foreign_leaves.record_forward((args, kwargs), output)
        return output

    @contextmanager
    def _streamed_forward(self) -> Iterator[None]:
        """Context of a training forward of streamed blocks. The last blocks stay in their device slots, because the
        backward starts with them."""
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

    def _start_streamed_backward(self, phase: BackwardPhase) -> None:
        """Schedules the uploads of a backward pass: blocks in the reverse of the order in which they ran. Uploads for
        the second pass begin while the first pass ends."""
        if self._block_store is None:
            return
        if phase is BackwardPhase.DISCARD:
            self._block_store.runtime.start((), then=())
            return
        calls = sorted((call for block in self._blocks for call in block.calls()), key=lambda call: -call.number)
        trained = [b.unit for b in self._blocks if any(self._trains(state) for state in b.parameter_states)]
        measures = phase is BackwardPhase.MEASURE
        order = [call.block.unit for call in calls]
        self._block_store.start_backward(order, downloads=() if measures else trained, repeats=measures)

    def backward(self, loss: torch.Tensor, *, retain_graph: bool = False) -> None:
        """Runs the graph backward, once or twice, and updates the weights. See [Note: two passes]."""
        with self._plain_parameters():
            self._backward(loss, retain_graph=retain_graph)

    def _backward(self, loss: torch.Tensor, *, retain_graph: bool) -> None:
        self._window.begin(loss)
        self._group_index.follow(self.param_groups)
        self._retains_graph = retain_graph
        scale = 1.0 if self._scaler is None else self._scaler.scale
        scaled = loss if self._scaler is None else loss.float() * scale
        norm: float | DeferredScalar | None = None
        finite = True
        if self._two_passes:
            assert self._foreign_leaves is not None
            with self._backward_pass(BackwardPhase.MEASURE), self._foreign_leaves.gradients_restored(scaled):
                scaled.backward(retain_graph=True)
            norm = self._reducer.norm() / scale
            finite = math.isfinite(norm)
            self._coef = self._coefficient(norm, scale) if finite else None
        for layer in self._layers:
            layer.num_expected = sum(self._trains(state) for state in layer.states)
        with self._backward_pass(BackwardPhase.UPDATE if finite else BackwardPhase.DISCARD):
            scaled.backward(retain_graph=retain_graph)
            for layer in self._layers:
                self._update_layer(layer)  # a layer that still waits has parameters that this loss does not reach
        if self._clips_by_layer and self._norms:
            norm = DeferredScalar(torch.stack(self._norms).norm() / scale)
            self._norms = []
        overflow = self._scaler is not None and not finite
        if self._scaler is not None:
            self._scaler.update(overflow=overflow)
            self._publish_scale(overflow=overflow)
        self._window.end(norm, finite=finite, overflow=overflow)

    @contextmanager
    def _backward_pass(self, phase: BackwardPhase) -> Iterator[None]:
        """Context of one backward pass over the graph. An error inside drops all gradients of the pass."""
        self._phase = phase
        self._pass_number += 1
        try:
            self._start_streamed_backward(phase)
            if phase is not BackwardPhase.DISCARD:
                measures = phase is BackwardPhase.MEASURE
                guard = self._skipped.loss_guard if measures or not self._two_passes else None
                self._reducer.begin(self._trains, measures=measures, loss_guard=guard)
            with run_backward_twice() if self._runs_compiled_twice() else nullcontext():
                yield
            self._complete_held_blocks()
            if phase is not BackwardPhase.DISCARD:
                self._reducer.finish()
        except BaseException:
            self._norms = []
            self._skipped.drop()
            for state in self._parameter_states:
                state.parameter.grad = None
            self._reducer.drop()
            raise
        finally:
            self._phase = BackwardPhase.IDLE
            for state in self._parameter_states:
                state.partial_grad = None
            for layer in self._layers:
                layer.waiting = []
            if self._block_store is not None:
                self._block_store.runtime.finish()

    def _runs_compiled_twice(self) -> bool:
        return self._two_passes and (self._compiler is not None or is_compiled(self.module))

    # Recomputed blocks: the methods of `recompute.blocks.BlockConsumer`

    def begin_block_backward(self, call: BlockCall) -> bool:
        """False in a pass that only frees the graph."""
        if self._phase is BackwardPhase.IDLE:
            raise RuntimeError(_DIRECT_STREAMED)
        call.last_pass = call.block.last_pass = self._pass_number
        call.graph_freed = self._phase is not BackwardPhase.MEASURE and not self._retains_graph
        if self._phase is BackwardPhase.DISCARD:
            return False
        # Other ranks may wait for buckets of blocks that did not run on this rank.
        self._reducer.close_blocks(lambda b: b is not call.block and not b.has_pending_calls(self._pass_number))
        self._reducer.send()
        return True

    def end_block_backward(self, block: RecomputedBlock) -> bool:
        return not block.has_pending_calls(self._pass_number) and self._complete_block(block)

    def _complete_block(self, block: RecomputedBlock) -> bool:
        """Consumes the held gradients of a block while its weights are on the device. Returns whether this pass has
        changed its weights."""
        for state in block.parameter_states:
            if state.partial_grad is not None:  # the block's last call added nothing to this gradient
                grad, state.partial_grad = state.partial_grad, None
                self._accept_gradient(state, grad)
        self._reducer.close_blocks(lambda other: other is block)
        for layer in {id(s.layer): s.layer for s in block.parameter_states if s.layer is not None}.values():
            self._update_layer(layer)
        return self._has_changed(block)

    def _has_changed(self, block: RecomputedBlock) -> bool:
        """Whether this pass has updated a weight that is stored with the block."""
        stored = {id(placed.parameter) for placed in block.unit.placed}
        return any(
            state.last_update == self._pass_number and id(state.parameter) in stored for state in block.parameter_states
        )

    def _complete_held_blocks(self) -> None:
        """Consumes gradients that blocks still hold at the end of a pass. Such a block also ran in a graph that this
        backward did not reach, and waited for a gradient from there."""
        for block in self._blocks:
            if any(state.partial_grad is not None for state in block.parameter_states):
                assert self._block_store is not None
                with self._block_store.materialise(block.unit) as materialised:
                    materialised.changed = self._complete_block(block)

    def _coefficient(self, norm: float, scale: float) -> torch.Tensor | None:
        """Factor that clips gradients to the configured norm and divides by the loss scale. None: one."""
        limit = 0.0 if self._clips_by_layer else self.config.gradient_clipping
        coef = (min(1.0, limit / (norm + _NORM_FLOOR)) if limit > 0 else 1.0) / scale
        return None if coef == 1.0 else torch.tensor(coef, dtype=torch.float32, device=self.device)

    def _trains(self, state: ParameterState) -> bool:
        return state.parameter.requires_grad and state.parameter in self._group_index

    def _on_gradient(self, state: ParameterState) -> None:
        """The hook of one parameter: its gradient is complete. The gradient is consumed and freed, or it is held until
        the rest of its block or its layer is complete."""
        grad, state.parameter.grad = state.parameter.grad, None
        if grad is not None and grad.layout is not torch.strided:
            grad = grad.to_dense()  # the gradient of an embedding with sparse=True
        if state.block is not None and self._phase is not BackwardPhase.IDLE:
            self._check_materialised(state)
            if grad is not None and state.partial_grad is not None:
                grad = state.partial_grad + grad
            state.partial_grad = None
            if state.block.has_pending_calls(self._pass_number):
                state.partial_grad = grad
                return
        self._accept_gradient(state, grad)

    def _accept_gradient(self, state: ParameterState, grad: torch.Tensor | None) -> None:
        """Passes a complete gradient to the reducer. Raises at a second gradient of the same pass
        ([Note: one update per backward])."""
        phase = self._phase
        if phase is BackwardPhase.IDLE:
            self._begin_direct_backward()
        if state.last_pass == self._pass_number:
            raise RuntimeError(
                f"the gradient of {state.name} came in parts, because reentrant checkpointing uses the parameter in "
                'several segments: pass gradient_checkpointing_kwargs={"use_reentrant": False} (or '
                "use_reentrant=False to checkpoint)"
            )
        state.last_pass = self._pass_number
        if grad is None or phase is BackwardPhase.DISCARD or state.parameter not in self._group_index:
            return
        if phase is BackwardPhase.IDLE and not self._reducer.active:
            self._reducer.begin(self._trains, measures=False, loss_guard=self._skipped.loss_guard)
            torch.autograd.Variable._execution_engine.queue_callback(self._reducer.finish)
        self._reducer.add(state, grad)

    # Averaged gradients: the methods of `buckets.GradientConsumer`

    def consume(self, state: ParameterState, grad: torch.Tensor) -> None:
        """Updates by a gradient, or holds it until the gradients of its layer are complete."""
        if state.layer is None:
            self._update(state, grad, self._coef)
            return
        state.layer.waiting.append((state, grad))
        if len(state.layer.waiting) == state.layer.num_expected:
            self._update_layer(state.layer)

    def materialised_weights(self, bucket: Bucket) -> AbstractContextManager[None] | None:
        """See `buckets.GradientConsumer`."""
        block = bucket.block
        if block is None or self._block_store is None or self._block_store.is_materialised(block.unit):
            return nullcontext()
        if self._phase is BackwardPhase.MEASURE and not self._block_store.is_sharded:
            return nullcontext()
        if bucket.in_pieces and block.last_pass == self._pass_number:
            return nullcontext()  # pieces need no weights, and this rank has taken part in the gather of the block
        return None if self._block_store.has_materialised else self._materialised(block)

    @contextmanager
    def _materialised(self, block: RecomputedBlock) -> Iterator[None]:
        """Context in which a block's weights are on the device outside of its own backward: its gradients came after
        that backward, or from other ranks only."""
        assert self._block_store is not None
        block.last_pass = self._pass_number
        with self._block_store.materialise(block.unit) as materialised:
            yield
            materialised.changed = self._has_changed(block)

    def consume_bucket(self, gradients: Gradients, *, loss_guard: torch.Tensor) -> None:
        """Updates by a bucket of averaged gradients."""
        self._skipped.loss_guard = loss_guard
        for state, grad in gradients:
            self.consume(state, grad)
        for state, _ in gradients:  # a layer that still waits has parameters that no rank's loss reaches
            if state.layer is not None:
                self._update_layer(state.layer)

    def consume_pieces(self, block: RecomputedBlock, pieces: Pieces, *, guards: Gradients) -> None:
        """Updates this rank's pieces of a block's weights. See [Note: gradients in pieces]."""
        assert self._block_store is not None
        if not self._two_passes:
            for state, guard in guards:
                self._skipped.add(state, guard)
        guard_of = {} if self._two_passes else {id(state): (guard,) for state, guard in guards}
        with self._block_store.updating_piece(block.unit) as shard:
            for state, segment, grad in pieces:
                self._update_piece(state, segment, shard, grad, guard_of.get(id(state), ()))

    def _update_piece(
        self,
        state: ParameterState,
        segment: ParameterShard,
        shard: torch.Tensor,
        grad: torch.Tensor,
        guards: Sequence[torch.Tensor],
    ) -> None:
        group = self._group_index[state.parameter]
        lr, dtype = float(group["lr"]), state.parameter.dtype
        rounds = self._rounding == "stochastic" and dtype is not torch.float32
        sgd_update_(
            segment.view(shard, dtype),
            grad,
            lr=lr,
            decay=1.0 - lr * float(group.get("weight_decay", 0.0)),
            coef=self._coef,
            clip_value=self.settings.clip_grad_value,
            dither=Dither(step=self._window.num_updates, offset=state.offset + segment.begin) if rounds else None,
            guards=guards,
        )

    def _check_materialised(self, state: ParameterState) -> None:
        """Raises where a block's parameter got a gradient outside of the block's backward."""
        assert state.block is not None and self._block_store is not None
        if not self._block_store.is_materialised(state.block.unit):
            raise used_outside(state.name)

    def _begin_direct_backward(self) -> None:
        """Called for each gradient of a `loss.backward()` that a user calls directly. The first one begins a pass.
        Raises where LOMO needs `engine.backward`."""
        if self._block_store is not None:
            raise RuntimeError(_DIRECT_STREAMED)
        if self._two_passes or self._clips_by_layer:
            raise RuntimeError(
                "loss.backward() can neither clip by norm nor scale the loss for fp16: call engine.backward(loss), or "
                'set "gradient_clipping" to 0 and use bf16'
            )
        if self._window.state is not WindowState.UPDATED_BARE:
            self._window.begin_bare()
            self._group_index.follow(self.param_groups)
            self._pass_number += 1

    def _update_layer(self, layer: Layer) -> None:
        """Clips the waiting gradients of a layer by their common norm, updates by them and frees them."""
        grads, layer.waiting = layer.waiting, []
        if not grads:
            return
        norms = torch.stack([torch.linalg.vector_norm(grad, dtype=torch.float32) for _, grad in grads])
        self._norms.append(norms.norm())
        norm = torch.where(norms < math.inf, norms, 0.0).norm()  # without the parameters whose updates are skipped
        scale = 1.0 if self._scaler is None else self._scaler.scale
        coef = (self.config.gradient_clipping / (norm / scale + _NORM_FLOOR)).clamp_(max=1.0) / scale
        for (state, grad), own in zip(grads, norms, strict=True):
            self._update(state, grad, coef, own)

    # Updates

    def _update(
        self, state: ParameterState, grad: torch.Tensor, coef: torch.Tensor | None, norm: torch.Tensor | None = None
    ) -> None:
        """Updates a parameter by its whole gradient. `coef`: see `_coef`. `norm`: the gradient's norm, or None where it
        is not known."""
        p = state.parameter
        known = (self._skipped.loss_guard,) if norm is None else (self._skipped.loss_guard, norm)
        guards = () if self._two_passes else known
        state.last_update = self._pass_number
        group = self._group_index[p]
        lr, weight_decay = float(group["lr"]), float(group.get("weight_decay", 0.0))
        rounds = self._rounding if p.dtype is not torch.float32 else None
        dither = Dither(step=self._window.num_updates, offset=state.offset) if rounds == "stochastic" else None
        if rounds == "kahan" and state.residue is None:
            state.residue = torch.zeros_like(p, memory_format=torch.contiguous_format)
        if state.is_adapter:
            assert self.settings.adapter is not None
            lr = self.settings.adapter.lr * self._schedule_factor(group)
            state.moments = state.moments or AdamMoments.zeros(p)
            assert isinstance(state.moments, AdamMoments)
            guard = adamw_update_(
                p,
                grad,
                state.moments,
                lr=lr,
                decay=1.0 - lr * self.settings.adapter.weight_decay,
                betas=self.settings.adapter.betas,
                coef=coef,
                clip_value=self.settings.clip_grad_value,
                dither=dither,
                residue=state.residue,
                guards=guards,
            )
        else:
            decay = 1.0 - lr * weight_decay
            guard = self._update_weight(state, grad, lr=lr, decay=decay, coef=coef, dither=dither, guards=guards)
        if guard is not None:
            self._skipped.add(state, guard)

    def _update_weight(
        self,
        state: ParameterState,
        grad: torch.Tensor,
        *,
        lr: float,
        decay: float,
        coef: torch.Tensor | None,
        dither: Dither | None,
        guards: Sequence[torch.Tensor],
    ) -> torch.Tensor | None:
        """Updates a parameter that is not an adapter. `guards`: none, the loss's, or the loss's and the gradient's.
        Returns the gradient's guard, or None if `guards` is empty."""
        if len(guards) == 1:
            guards = (*guards, gradient_guard(grad))
        sgd_update_(
            state.parameter,
            grad,
            lr=lr,
            decay=decay,
            coef=coef,
            clip_value=self.settings.clip_grad_value,
            dither=dither,
            residue=state.residue,
            guards=guards,
        )
        return guards[-1] if guards else None

    def _schedule_factor(self, group: Mapping[str, Any]) -> float:
        """Current learning rate of the group divided by its initial one. The learning rate of the group's adapters is
        multiplied by it, so that adapters follow the same schedule."""
        index = next(i for i, other in enumerate(self.param_groups) if other is group)
        initial = self._initial_lrs[index] if index < len(self._initial_lrs) else float(group["lr"])
        return float(group["lr"]) / initial if initial else 1.0

    # Step

    def _publish_scale(self, *, overflow: bool) -> None:
        """Sets the attributes of the optimizer from which DeepSpeed's monitors and Accelerate read the loss scale."""
        if self._scaler is not None:
            self.optimizer.cur_scale = self._scaler.scale  # type: ignore[attr-defined]
            self.optimizer.overflow = overflow  # type: ignore[attr-defined]

    def step(self) -> StepOutcome:
        outcome = self._window.step()
        if self._block_store is not None:
            self._block_store.fill_device()
        return outcome

    def zero_grad(self) -> None:
        """Permits another backward before the next step. There is no gradient to drop, because `backward` has made its
        update."""
        self._window.permit_backward()

    # Saving, loading, describing

    def state_dict(self) -> dict[str, Any]:
        self._window.read_skipped()
        return {
            "step": self._window.num_updates,
            "scaler": None if self._scaler is None else self._scaler.state_dict(),
            "moments": {s.name: s.moments.state_dict() for s in self._parameter_states if s.moments is not None},
            "residues": {s.name: s.residue for s in self._parameter_states if s.residue is not None},
        }

    def check_state(self, state: Mapping[str, Any]) -> None:
        for parameter_state in self._parameter_states:
            saved = state["moments"].get(parameter_state.name)
            if saved is not None and ("mean" in saved) is not parameter_state.is_adapter:
                was, now = (
                    (self.config.backend, "an adapter")
                    if parameter_state.is_adapter
                    else ("an adapter", self.config.backend)
                )
                raise CheckpointError(
                    f"{parameter_state.name} was trained as {was} in the checkpoint and is trained as {now} here: "
                    f"write the checkpoint's adapter in {self.config.params_at}, or pass load_optimizer_states=False"
                )
            residue = state.get("residues", {}).get(parameter_state.name)
            if residue is not None and residue.shape != parameter_state.parameter.shape:
                raise ValueError(
                    f"the rounding residue of {parameter_state.name} has the shape of the parameter, "
                    f"{tuple(parameter_state.parameter.shape)}, got {tuple(residue.shape)}"
                )
            if saved is not None:
                kind = AdamMoments if parameter_state.is_adapter else FactoredMoments
                kind.from_state_dict(saved, device=torch.device("meta"))
        int(state["step"])
        if state["scaler"] is not None:
            [float(state["scaler"][name]) for name in ("scale", "num_clean", "overflows_left")]

    def load_state_dict(self, state: Mapping[str, Any], *, load_optimizer_states: bool = True) -> None:
        kept = state if load_optimizer_states else {"step": 0, "scaler": None, "moments": {}, "residues": {}}
        self._window.restart(int(kept["step"]))
        if self._scaler is not None:
            self._scaler.restart()
            if kept["scaler"] is not None:
                self._scaler.load_state_dict(kept["scaler"])
            self._publish_scale(overflow=False)
        for parameter_state in self._parameter_states:
            residue = kept.get("residues", {}).get(parameter_state.name) if self._rounding == "kahan" else None
            parameter_state.residue = (
                None if residue is None else residue.to(self.device, parameter_state.parameter.dtype, copy=True)
            )
            saved = kept["moments"].get(parameter_state.name)
            kind = AdamMoments if parameter_state.is_adapter else FactoredMoments
            parameter_state.moments = None if saved is None else kind.from_state_dict(saved, device=self.device)

    def rank_state(self) -> dict[str, Any]:
        """The outcome so far of an unfinished accumulation window."""
        return {"window": self._window.state_dict()}

    def check_rank_state(self, state: Mapping[str, Any]) -> None:
        if state.get("window") is not None:
            StepOutcome(**state["window"])

    def load_rank_state(self, state: Mapping[str, Any]) -> None:
        self._window.load_state_dict(state.get("window"))

    def _describe_passes(self) -> str:
        """Passes per step, clipping, loss scale and adapters."""
        if self._clips_by_layer:
            clipping = f"each layer's gradients clipped to norm {self.config.gradient_clipping:g}"
        elif self.config.gradient_clipping > 0:
            clipping = f"gradients clipped to norm {self.config.gradient_clipping:g} (0 saves a pass)"
        elif self.settings.clip_grad_value is not None:
            clipping = f"gradients clipped to values within {self.settings.clip_grad_value:g}"
        else:
            clipping = "gradients not clipped"
        scaling = f", loss scale {self._scaler.scale:g}" if self._scaler is not None else ""
        num_adapters = sum(state.is_adapter for state in self._parameter_states)
        adapters = f", {num_adapters} adapter tensors by AdamW" if num_adapters else ""
        passes = "two backward passes" if self._two_passes else "one backward pass"
        return f"{passes} per step, {clipping}{scaling}{adapters}"

    def describe(self) -> str:
        lines = [] if self._block_store is None else [self._block_store.describe()]
        return "\n".join([*lines, f"ds_zo: {self._describe_passes()}", *self._reducer.describe()])

    def startup_summary(self) -> StartupSummary:
        base = super().startup_summary() if self._block_store is None else self._block_store.startup_summary()
        added = ["activations", "gradients"]
        if self.has_moments or any(state.is_adapter for state in self._parameter_states):
            added.append("moments")
        if self.config.section.rounding == "kahan":
            added.append("rounding residues")
        return replace(
            base,
            settings=self._describe_passes(),
            added_by_steps=f"{', '.join(added[:-1])} and {added[-1]}",
            ranks=self._reducer.startup_text(),
        )

    def stored(self) -> dict[str, torch.Tensor]:
        if self._block_store is None:
            return super().stored()
        self._block_store.wait()
        collected = {} if self._module_state is None else self._module_state.collected
        named = self.module.named_parameters(remove_duplicate=False)
        with without_interception():
            weights = {name: collected.get(id(p), p.detach()) for name, p in named}
        buffers = {name: buffer.detach() for name, buffer in persistent_buffers(self.module)}
        return weights | (host_copy(buffers) if collected else buffers)

    @property
    def stored_are_copies(self) -> bool:
        return self._module_state is not None and bool(self._module_state.collected)

    def write_stored(self, name: str, target: torch.Tensor, value: torch.Tensor) -> None:
        parameter = None if self._module_state is None else self._module_state.sharded.get(name)
        if self._module_state is None or parameter is None:
            target.copy_(value)
        else:
            self._module_state.write(parameter, value)

    @contextmanager
    def readable_on_rank_0(self) -> Iterator[None]:
        if self._module_state is None or self._block_store is None or self._block_store.shards is None:
            yield
            return
        with self._module_state.collecting(keeps=dist.get_rank() == 0):
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
        if self._block_store is not None and self._module_state is not None:
            keep_weights = self._module_state.owns_module() and not sys.is_finalizing()
            self._module_state.close()
            self._block_store.close(keep_weights=keep_weights)


def _dispatch(backend: weakref.ref[LOMOBackend], state: ParameterState, parameter: torch.Tensor) -> None:
    """The hook on a parameter. It outlives an engine that was dropped without `destroy`, and then does nothing."""
    alive = backend()
    if alive is not None:
        alive._on_gradient(state)
