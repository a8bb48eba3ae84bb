"""The backward pass: takes gradients from autograd, compresses them, and starts the host updates of complete layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakTensorKeyDictionary

from ds_zo.backends.common.plain_copies import weakly
from ds_zo.backends.common.stray_weights import used_outside
from ds_zo.backends.lsp.calibration import Calibration
from ds_zo.backends.lsp.groups import LSPGroups
from ds_zo.backends.lsp.host_group import GroupPhase, HostGroup
from ds_zo.backends.lsp.matrices import MatrixGroup, MatrixState
from ds_zo.backends.lsp.parameter_rates import ParameterRates
from ds_zo.backends.lsp.products import HeldGradients, compress_matrices
from ds_zo.backends.lsp.ranks import BackwardOrder, CollectiveThread
from ds_zo.backends.lsp.report import BackwardTimer
from ds_zo.backends.recompute.model_blocks import ModelBlocks, OneBackward
from ds_zo.streaming.units import Unit

_gradient_hooks: Any = WeakTensorKeyDictionary()
"""The gradient hook of each parameter. A second engine for the same module replaces the hooks of the first."""


class LSPBackwardPass:
    """Runs `engine.backward`, and holds the gradient hooks of all trained parameters."""

    def __init__(
        self,
        groups: LSPGroups,
        layers: Sequence[MatrixGroup],
        *,
        trained: ParameterRates,
        calibration: Calibration,
        blocks: ModelBlocks,
        unit_of: Mapping[int, Unit],
        ranks: CollectiveThread | None,
        starts_early: bool,
        scales_loss: bool,
    ) -> None:
        """`unit_of`: the block of each streamed parameter, by the parameter's id. `starts_early`: host updates start
        inside the last backward pass of a step; otherwise all start in `step`. `scales_loss`: losses are multiplied by
        a loss scale before `run`."""
        self.starts_early, self._scales_loss = starts_early, scales_loss
        self.held_gradients = HeldGradients()
        self._groups, self._trained, self._calibration = groups, trained, calibration
        self._unit_of, self._ranks = unit_of, ranks
        self._recomputed = OneBackward(blocks, on_block_end=weakly(self._end_block_backward))
        blocks.wrap(self._recomputed)
        self._timer = BackwardTimer(groups.transfers.streams)
        self._is_running = self._is_last = False
        """Whether `engine.backward` of this engine is running, and whether a step follows it. Both are False in a
        direct `loss.backward()` and in the backward pass of another engine's loss."""
        self._num_missing: dict[int, int] = {}
        """By the id of a host group: number of gradients that the present backward pass has still to make."""
        self._group_of = {id(matrix): group for group in groups.on_host for matrix in group.matrices}
        self._updated_at_begin: set[int] = set()
        """Ids of the groups whose pending update was applied at the start of the present backward pass. Their weights
        must not have been used by the forward pass."""
        self._order: BackwardOrder | None = None
        if ranks is not None:
            matrices = [[m for m in layer.matrices if m.parameter.ndim >= 2] for layer in layers]
            self._order = BackwardOrder([found for found in matrices if found], weakly(self._finish_layer))
        self._calibrates_on_averages = False
        """In this backward pass, ranks average full gradients layer by layer, to fit or test projectors on the
        average."""
        self.handles = [self._hook(matrix) for matrix in groups.matrices]

    def _hook(self, matrix: MatrixState) -> RemovableHandle:
        p = matrix.parameter
        if p in _gradient_hooks:
            _gradient_hooks.pop(p).remove()
        _gradient_hooks[p] = p.register_post_accumulate_grad_hook(weakly(self._on_gradient, matrix))
        handle: RemovableHandle = _gradient_hooks[p]
        return handle

    def run(
        self, loss: torch.Tensor, *, step: int, is_last: bool, retain_graph: bool, updated_groups: list[HostGroup]
    ) -> None:
        """Runs a backward pass. `is_last`: `engine.step` follows. `updated_groups`: those whose pending update was
        applied after the forward pass."""
        on_host, trains = self._groups.on_host, self._trained.trains
        started = next((group.name for group in on_host if group.phase is GroupPhase.UPDATING), None)
        if started is not None:
            raise _after_start(started)
        matrices = [matrix for matrix in self._groups.matrices if trains(matrix)]
        self._trained.begin_backward(matrices)
        self._calibration.begin_backward(step, matrices)
        self._num_missing = {id(group): sum(map(trains, group.matrices)) for group in on_host}
        self._groups.queue.order.last_first = False
        if self._order is not None:
            self._order.begin(trains)
            self._calibrates_on_averages = any(map(self._calibration.wants_gradient, matrices))
        self._timer.begin()
        self._updated_at_begin = {id(group) for group in updated_groups}
        try:
            self._is_running, self._is_last = True, is_last
            with self._recomputed.run(retain_graph=retain_graph):
                loss.backward(retain_graph=retain_graph)
            self.held_gradients.compress()
            if self._order is not None:
                self._order.finish()
        except RuntimeError as error:
            if updated_groups and "modified by an inplace operation" in str(error):
                names = ", ".join(group.name for group in updated_groups)
                raise _used_before_update(f"one of {names}") from error
            raise
        finally:
            self._is_running = self._is_last = self._calibrates_on_averages = False
            self._updated_at_begin = set()
            self.held_gradients.clear()
        self._timer.end()

    def _on_gradient(self, matrix: MatrixState, hooked: torch.Tensor) -> None:
        """Takes the accumulated gradient of one parameter: the parameter's post-accumulate hook."""
        p = matrix.parameter
        if not self._trained.is_grouped(matrix):
            matrix.clear()
        grad = p.grad
        if grad is None:
            return
        group = self._group_of.get(id(matrix))
        self._check_gradient(matrix, group)
        if group is not None:
            group.apply_pending_update()
        if grad.is_sparse or not grad.is_contiguous():  # Adam and collectives need one order of elements
            grad = p.grad = grad.to_dense().contiguous()
        if matrix.subspace is None:
            matrix.has_total = True
            if matrix.held_gradient is not None:
                p.grad, matrix.held_gradient = matrix.held_gradient.add_(grad), None
            matrix.leave_gradient()
        elif not self._calibrates_on_averages or self._order is None or self._order.has_passed(matrix):
            self._compress_or_hold(matrix, grad)
        if self._order is not None:
            if p.ndim >= 2 and self._is_running:
                self._order.mark_arrived(matrix)
        elif group is not None and id(group) in self._num_missing:
            self._num_missing[id(group)] -= 1
            if self._num_missing[id(group)] <= 0 and group.unit is None:
                self.held_gradients.compress()
                if self._is_last and self.starts_early and self._num_missing[id(group)] == 0:
                    self._start_early(group)

    def _check_gradient(self, matrix: MatrixState, group: HostGroup | None) -> None:
        """Raises, and drops the gradient, if it came at a time when its weight must not be used."""
        error: Exception | None = None
        if self._scales_loss and not self._is_running:
            error = RuntimeError(
                f"fp16 needs the loss scale of engine.backward(loss), got a gradient of {matrix.name} from another "
                "backward pass: call engine.backward(loss) instead of loss.backward(), or use bf16"
            )
        elif matrix.is_streamed and not self._unit_of[id(matrix.parameter)].in_use:
            error = used_outside(matrix.name)
        elif id(group) in self._updated_at_begin:
            error = _used_before_update(matrix.name)
        elif group is not None and group.phase is GroupPhase.UPDATING:
            error = _after_start(matrix.name)
        if error is not None:
            matrix.parameter.grad = None
            raise error

    @torch.no_grad()
    def _end_block_backward(self, unit: Unit, more_to_come: bool) -> None:
        """Takes all gradients of a streamed block out of its parameters, whose device memory is about to be reused.

        `more_to_come`: the block runs again in this backward pass."""
        self.held_gradients.compress()
        for group in (group for group in self._groups.on_host if group.unit is unit):
            if self._is_last and self.starts_early and not more_to_come and group.can_start([]):
                self._start_early(group)
            for matrix in group.matrices:
                if matrix.parameter.grad is not None:
                    matrix.held_gradient, matrix.parameter.grad = matrix.parameter.grad, None

    def _compress_or_hold(self, matrix: MatrixState, grad: torch.Tensor) -> None:
        """Queues a projected matrix's gradient for compression, or compresses it now and calibrates with it."""
        if not self._calibration.wants_gradient(matrix):
            self.held_gradients.add(matrix)
            return
        if self._ranks is not None and not self._is_running:
            matrix.parameter.grad = None
            raise RuntimeError(
                "on several ranks, engine.backward(loss) must make the gradients that projectors are fitted to, got "
                f"one of {matrix.name} from another backward pass: call engine.backward(loss) instead of "
                "loss.backward(), or freeze this model (requires_grad_(False)) while another engine's loss passes "
                "through it"
            )
        compress_matrices([matrix])
        self._calibration.fit_or_test(matrix, _wider_than_fp16(grad))

    def _start_early(self, group: HostGroup) -> None:
        """Starts a group's host update inside the backward pass."""
        on_host = self._groups.on_host
        self._groups.queue.order.last_first = on_host.index(group) <= self._timer.transition(on_host)
        group.start([self._trained.takes_part(matrix) for matrix in group.matrices])

    # Several ranks: [Note: one order of collectives]

    @torch.no_grad()
    def _finish_layer(self, matrices: list[MatrixState]) -> None:
        """Acts on the matrices of a layer when this rank has all gradients of them that it will get."""
        self.held_gradients.compress()
        if self._calibrates_on_averages:
            self._calibrate_on_averages([m for m in matrices if m.subspace is not None and self._trained.trains(m)])
        group = self._group_of.get(id(matrices[0]))
        if group is not None and self._num_missing[id(group)] and self._is_last and self.starts_early:
            self._start_early(group)

    def _calibrate_on_averages(self, matrices: list[MatrixState]) -> None:
        """Fits or tests projectors with the average over ranks. All ranks call this with the same matrices."""
        assert self._ranks is not None
        if not matrices:
            return
        has_gradient = torch.tensor(
            [float(m.parameter.grad is not None) for m in matrices], device=self._groups.transfers.streams.device
        )
        for matrix, share in zip(matrices, self._ranks.average(has_gradient).tolist(), strict=True):
            grad = matrix.parameter.grad
            mean = None
            if self._calibration.wants_gradient(matrix) and share > 0:
                mine = matrix.new_gradient() if grad is None else grad
                mean = self._ranks.average(_wider_than_fp16(mine))
            if grad is not None:
                compress_matrices([matrix])
            if mean is not None:
                self._calibration.fit_or_test(matrix, mean)


def _wider_than_fp16(grad: torch.Tensor) -> torch.Tensor:
    """Fits multiply a gradient, which carries the loss scale, before they divide it by its norm."""
    return grad.float() if grad.dtype is torch.float16 else grad


def _after_start(name: str) -> RuntimeError:
    """The error for a gradient that comes after its layer's update has started."""
    return RuntimeError(
        "under the layer-wise schedule a step takes one engine.backward(), in which Adam starts layer by layer, got "
        f"another gradient of {name}: add up the losses of a step and call engine.backward() once; if the first "
        "backward failed, call engine.zero_grad() first; for reentrant checkpointing of a shared weight set "
        'use_reentrant=False; or set "schedule": "sync" (optimizer.params.schedule)'
    )


def _used_before_update(names: str) -> ValueError:
    """The error for a weight whose forward use came before its pending update was applied."""
    return ValueError(
        f"a block's weights take the last step's update when the block is called, got a gradient of {names}, used "
        "before that: call the block, not the modules in it, and take the loss of a forward made after the last step; "
        'or set "schedule": "sync" (optimizer.params.schedule)'
    )
