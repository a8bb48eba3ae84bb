"""Backward passes: each gradient is taken from its parameter when it is complete, and measured or used for an update.

[Note: one update per backward] A parameter's hook runs after all uses of the parameter have added to its gradient.
Reentrant checkpointing runs a separate backward for each segment. A weight that is used in several segments, or also
outside of them, would be updated several times. Later segments would then be recomputed with the new weights. This is
refused. `use_reentrant=False` gives exact results.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from enum import Enum
from typing import Any

import torch
from torch.utils._pytree import tree_flatten
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakTensorKeyDictionary

from ds_zo.backends.common.stray_weights import used_outside
from ds_zo.backends.lomo.buckets import Bucket, GradientConsumer, Gradients, Shards
from ds_zo.backends.lomo.parameters import Layer, ParameterState, link_blocks
from ds_zo.backends.lomo.reducer import Reducer
from ds_zo.backends.lomo.updates import Updater
from ds_zo.backends.lomo.window import AccumulationWindow, WindowState
from ds_zo.backends.recompute.blocks import BlockCall, RecomputedBlock
from ds_zo.backends.recompute.model_blocks import ModelBlocks

_NORM_FLOOR = 1e-6
"""Added to a norm before the clipping threshold is divided by it."""
_hooks: Any = WeakTensorKeyDictionary()
"""The handle of the hook on each parameter. A second engine of the same module replaces the hooks of the first."""
_DIRECT_STREAMED = "loss.backward() cannot schedule the uploads of streamed blocks: call engine.backward(loss)"


class BackwardPhase(Enum):
    IDLE = "no engine.backward is running: a gradient comes from a loss.backward() that the user calls directly"
    MEASURE = "the norms of gradients are computed, gradients are dropped, the graph is retained"
    UPDATE = "gradients are consumed by updates"
    DISCARD = "gradients are dropped, and the pass only frees the graph"


class BackwardPasses:
    """Runs backward passes over a graph, and consumes their gradients."""

    def __init__(
        self,
        states: Sequence[ParameterState],
        *,
        updater: Updater,
        window: AccumulationWindow,
        two_passes: bool,
        layer_clipping: float | None,
        blocks: ModelBlocks,
        make_reducer: Callable[[GradientConsumer], Reducer],
    ) -> None:
        """`two_passes`: see [Note: two passes]. `layer_clipping`: the largest norm of a layer's gradients. None: they
        are not clipped by layer."""
        self._states = states
        self._updater = updater
        self._window = window
        self._two_passes = two_passes
        self._layer_clipping = layer_clipping
        self._blocks = blocks
        self._layers = list({id(s.layer): s.layer for s in states if s.layer is not None}.values())
        self._layer_norms: list[torch.Tensor] = []
        """Norms of the layers updated in this pass."""
        self._phase = BackwardPhase.IDLE
        self._pass_number = 0
        """Number of backward passes begun so far, measuring passes included."""
        self._frees_graph = True
        """The graph is freed by the running pass."""
        self._checked_tasks: set[int] = set()
        """Autograd's numbers of the running backward, if its graph is checked (`check_graph`)."""
        self.coef: torch.Tensor | None = None
        """Scalar on the device by which gradients are multiplied to clip and unscale them. None: one."""
        self.scale = 1.0
        """The loss scale of the running pass."""
        blocks.wrap(self)
        link_blocks(states, blocks.wrapped)
        self.reducer = make_reducer(self)
        self._handles = [self._hook(state) for state in states]

    def _hook(self, state: ParameterState) -> RemovableHandle:
        """Registers the gradient hook. Frozen parameters get one too, because a user may unfreeze them later. torch
        accepts the hook only while `requires_grad` is True."""
        p, was_trainable, passes = state.parameter, state.parameter.requires_grad, weakref.ref(self)

        def on_gradient(_: torch.Tensor) -> None:
            if (alive := passes()) is not None:  # the hook outlives an engine that was dropped without `destroy`
                alive.on_gradient(state)

        if p in _hooks:
            _hooks.pop(p).remove()
        p.requires_grad_(True)
        handle: RemovableHandle = p.register_post_accumulate_grad_hook(on_gradient)
        p.requires_grad_(was_trainable)
        _hooks[p] = handle
        return handle

    def close(self) -> None:
        """Removes the hooks."""
        for handle in self._handles:
            handle.remove()

    # A pass

    @contextmanager
    def run(self, phase: BackwardPhase, *, frees_graph: bool) -> Iterator[None]:
        """Context of one backward pass over the graph. An error inside drops all gradients of the pass."""
        self._phase = phase
        self._pass_number += 1
        self._frees_graph = frees_graph
        measures, is_wanted = phase is BackwardPhase.MEASURE, phase is not BackwardPhase.DISCARD
        for layer in self._layers:
            layer.num_expected = sum(map(self._updater.trains, layer.states))
        try:
            if is_wanted:
                trained = [b.unit for b in self._blocks.wrapped if any(map(self._updater.trains, b.parameter_states))]
                self._blocks.start_backward(downloads=() if measures else trained, repeats=measures)
                guard = self._window.skipped.loss_guard if measures or not self._two_passes else None
                self.reducer.begin(self._updater.trains, measures=measures, loss_guard=guard)
            else:
                self._blocks.start_empty()
            yield
            for layer in self._layers:
                self._update_layer(layer)  # a layer that still waits has parameters that this loss does not reach
            self._complete_held_blocks()
            if is_wanted:
                self.reducer.finish()
        except BaseException:
            self._layer_norms = []
            self._window.skipped.drop()
            for state in self._states:
                state.parameter.grad = None
            self.reducer.drop()
            raise
        finally:
            self._phase = BackwardPhase.IDLE
            for state in self._states:
                state.partial_grad = None
            for layer in self._layers:
                layer.waiting = []
            self._blocks.finish_pass()

    def set_factor(self, norm: float, *, limit: float) -> None:
        """Sets `coef` so that gradients are divided by the loss scale and clipped. `norm`: of all gradients. `limit`:
        the largest norm, or zero."""
        coef = (min(1.0, limit / (norm + _NORM_FLOOR)) if limit > 0 else 1.0) / self.scale
        device = self._window.skipped.loss_guard.device
        self.coef = None if coef == 1.0 else torch.tensor(coef, dtype=torch.float32, device=device)

    def pop_layer_norm(self) -> torch.Tensor | None:
        """Norm of all gradients of the last pass, on the device, if they were clipped by layer."""
        norms, self._layer_norms = self._layer_norms, []
        return torch.stack(norms).norm() / self.scale if norms else None

    # Gradients of this rank

    def watch_graph(self, inputs: Any, output: Any, *, num_tries: int) -> None:
        """Checks the graph of a forward's output at the start of every backward (`check_graph`). An input that is
        returned belongs to the user's graph, which several forwards may share."""
        passes, given = weakref.ref(self), {id(value) for value in tree_flatten(inputs)[0]}

        def check(_: torch.Tensor) -> None:
            if (alive := passes()) is not None:
                alive.check_graph(num_tries)

        for found in tree_flatten(output)[0]:
            if isinstance(found, torch.Tensor) and found.grad_fn is not None and id(found) not in given:
                found.register_hook(check)

    def check_graph(self, num_tries: int) -> None:
        """Raises if weights have changed since a forward. Its backward would recompute blocks with the new weights, or
        torch would raise. `num_tries`: of the window, at the forward."""
        task = torch._C._current_graph_task_id()
        if self._phase is BackwardPhase.IDLE:
            if task in self._checked_tasks:
                return
            self._window.read_skipped()
        if self._window.last_change > num_tries:
            raise RuntimeError(
                "a loss must come from a forward after the last update, because each backward updates the weights, got "
                "a backward of an earlier forward: run each forward after the previous backward, or add the losses up "
                "and call backward once"
            )
        self._checked_tasks = {task}

    def on_gradient(self, state: ParameterState) -> None:
        """The hook of one parameter: its gradient is complete. The gradient is consumed and freed, or it is held until
        the rest of its block or its layer is complete."""
        grad, state.parameter.grad = state.parameter.grad, None
        if grad is not None and grad.layout is not torch.strided:
            grad = grad.to_dense()  # the gradient of an embedding with sparse=True
        if state.block is not None and self._phase is not BackwardPhase.IDLE:
            if not state.block.unit.in_use:
                raise used_outside(state.name)
            if grad is not None and state.partial_grad is not None:
                grad = state.partial_grad + grad
            state.partial_grad = None
            if state.block.has_pending_calls(self._pass_number):
                state.partial_grad = grad
                return
        self._accept(state, grad)

    def _accept(self, state: ParameterState, grad: torch.Tensor | None) -> None:
        """Passes a complete gradient to the reducer. Raises at a second gradient of the same pass
        ([Note: one update per backward])."""
        if self._phase is BackwardPhase.IDLE:
            self._begin_direct_backward()
        if state.last_pass == self._pass_number:
            raise RuntimeError(
                f"the gradient of {state.name} came in parts, because reentrant checkpointing uses the parameter in "
                'several segments: pass gradient_checkpointing_kwargs={"use_reentrant": False} (or '
                "use_reentrant=False to checkpoint)"
            )
        state.last_pass = self._pass_number
        if grad is None or self._phase is BackwardPhase.DISCARD or id(state.parameter) not in self._updater.rates:
            return
        if self._phase is BackwardPhase.IDLE and not self.reducer.active:
            self.reducer.begin(self._updater.trains, measures=False, loss_guard=self._window.skipped.loss_guard)
            torch.autograd.Variable._execution_engine.queue_callback(self.reducer.finish)
        self.reducer.add(state, grad)

    def _begin_direct_backward(self) -> None:
        """Called for each gradient of a `loss.backward()` that a user calls directly. The first one begins a pass.
        Raises where LOMO needs `engine.backward`."""
        if self._blocks.is_streamed:
            raise RuntimeError(_DIRECT_STREAMED)
        if self._two_passes or self._layer_clipping is not None:
            raise RuntimeError(
                "loss.backward() can neither clip by norm nor scale the loss for fp16: call engine.backward(loss), or "
                'set "gradient_clipping" to 0 and use bf16'
            )
        if self._window.state is not WindowState.UPDATED_BARE:
            self._window.begin_bare()
            self._updater.follow_groups()
            self._pass_number += 1
            self._checked_tasks.add(torch._C._current_graph_task_id())

    # Recomputed blocks: the methods of `recompute.blocks.BlockConsumer`

    def begin_block_backward(self, call: BlockCall) -> bool:
        """False in a pass that only frees the graph."""
        if self._phase is BackwardPhase.IDLE:
            raise RuntimeError(_DIRECT_STREAMED)
        call.last_pass = call.block.last_pass = self._pass_number
        call.graph_freed = self._frees_graph
        if self._phase is BackwardPhase.DISCARD:
            return False
        # Other ranks may wait for buckets of blocks that did not run on this rank.
        self.reducer.close_blocks(lambda b: b is not call.block and not b.has_pending_calls(self._pass_number))
        self.reducer.send()
        return True

    def end_block_backward(self, block: RecomputedBlock) -> bool:
        return not block.has_pending_calls(self._pass_number) and self._complete_block(block)

    def _complete_block(self, block: RecomputedBlock) -> bool:
        """Consumes the held gradients of a block while its weights are on the device. Returns whether this pass has
        changed its weights."""
        for state in block.parameter_states:
            if state.partial_grad is not None:  # the block's last call added nothing to this gradient
                grad, state.partial_grad = state.partial_grad, None
                self._accept(state, grad)
        self.reducer.close_blocks(lambda other: other is block)
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
        for block in self._blocks.wrapped:
            if any(state.partial_grad is not None for state in block.parameter_states):
                with block.use() as use:
                    if self._complete_block(block):
                        use.commit()

    # Averaged gradients: the methods of `buckets.GradientConsumer`

    def consume(self, state: ParameterState, grad: torch.Tensor) -> None:
        """Updates by a gradient, or holds it until the gradients of its layer are complete."""
        if state.layer is None:
            self._update(state, grad, self.coef)
            return
        state.layer.waiting.append((state, grad))
        if len(state.layer.waiting) == state.layer.num_expected:
            self._update_layer(state.layer)

    def consume_bucket(self, gradients: Gradients, *, loss_guard: torch.Tensor) -> None:
        """Updates by a bucket of averaged gradients."""
        self._window.skipped.loss_guard = loss_guard
        for state, grad in gradients:
            self.consume(state, grad)
        for state, _ in gradients:  # a layer that still waits has parameters that no rank's loss reaches
            if state.layer is not None:
                self._update_layer(state.layer)

    def consume_shards(self, block: RecomputedBlock, shards: Shards, *, guards: Gradients) -> None:
        """Updates this rank's shards of a block's weights. See [Note: gradients in shards]."""
        guard_of: dict[int, tuple[torch.Tensor]] = {}
        if not self._two_passes:
            for state, guard in guards:
                self._window.skipped.add(state, guard)
                guard_of[id(state)] = (guard,)
        with block.updating_shard() as shard:
            for state, segment, grad in shards:
                self._updater.update_shard(
                    state, segment, shard, grad, coef=self.coef, guards=guard_of.get(id(state), ())
                )

    def materialised_weights(self, bucket: Bucket) -> AbstractContextManager[None] | None:
        """See `buckets.GradientConsumer`."""
        block = bucket.block
        if block is None or block.unit.in_use:
            return nullcontext()
        if self._phase is BackwardPhase.MEASURE and not self._blocks.is_sharded:
            return nullcontext()
        if bucket.in_shards and block.last_pass == self._pass_number:
            return nullcontext()  # shards need no weights, and this rank has taken part in the gather of the block
        return None if any(unit.in_use for unit in self._blocks.units) else self._used(block)

    @contextmanager
    def _used(self, block: RecomputedBlock) -> Iterator[None]:
        """Context in which a block's weights are on the device outside of its own backward: its gradients came after
        that backward, or from other ranks only."""
        block.last_pass = self._pass_number
        with block.use() as use:
            yield
            if self._has_changed(block):
                use.commit()

    # Updates

    def _update(
        self, state: ParameterState, grad: torch.Tensor, coef: torch.Tensor | None, *norm: torch.Tensor
    ) -> None:
        """Updates a parameter by its whole gradient. `norm`: the gradient's norm, where it is known."""
        state.last_update = self._pass_number
        guards = () if self._two_passes else (self._window.skipped.loss_guard, *norm)
        self._updater.update(state, grad, coef=coef, guards=guards)

    def _update_layer(self, layer: Layer) -> None:
        """Clips the waiting gradients of a layer by their common norm, updates by them and frees them."""
        grads, layer.waiting = layer.waiting, []
        if not grads:
            return
        assert self._layer_clipping is not None
        norms = torch.stack([torch.linalg.vector_norm(grad, dtype=torch.float32) for _, grad in grads])
        self._layer_norms.append(norms.norm())
        norm = torch.where(norms < math.inf, norms, 0.0).norm()  # without the parameters whose updates are skipped
        coef = (self._layer_clipping / (norm / self.scale + _NORM_FLOOR)).clamp_(max=1.0) / self.scale
        for (state, grad), own in zip(grads, norms, strict=True):
            self._update(state, grad, coef, own)
