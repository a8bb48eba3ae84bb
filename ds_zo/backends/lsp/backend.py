"""The LSP backend: Adam in a d x d subspace of each weight matrix.

The backward pass projects each matrix's gradient to d x d and drops the full gradient. The d x d sums are copied to the
CPU, where Adam turns them into directions D. The directions are copied back, and the weights move by -lr P D Q^T.

Where to find the parts:

- `matrices`: which parameters are projected ([Note: projected and whole parameters]).
- `host_group`: the transfer of a layer's sums to the host and of its directions back; `shared_groups`: the same on
  several ranks.
- `streamed`: blocks whose weights are on the host.
- `calibration`: when projectors are fitted.
- `state`: the contents of checkpoints.
"""

from __future__ import annotations

import math
import sys
import weakref
from collections.abc import Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.utils import logger
from torch import nn
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakTensorKeyDictionary

from ds_zo.backends.common.backend import Backend, StepOutcome
from ds_zo.backends.common.param_groups import ParamGroupIndex
from ds_zo.backends.common.startup import StartupSummary, nonzero
from ds_zo.backends.common.stray_weights import used_outside
from ds_zo.backends.common.weak_hooks import weakly
from ds_zo.backends.lsp.calibration import Calibration, adopt
from ds_zo.backends.lsp.deferred_blocks import DeferredBlocks
from ds_zo.backends.lsp.groups import LSPGroups
from ds_zo.backends.lsp.host_group import GroupPhase, HostGroup
from ds_zo.backends.lsp.matrices import (
    MatrixGroup,
    MatrixState,
    find_matrices,
    group_matrices,
    owners,
    split_streamed,
)
from ds_zo.backends.lsp.products import HeldGradients, Rate, compress_matrices
from ds_zo.backends.lsp.ranks import BackwardOrder, CollectiveThread
from ds_zo.backends.lsp.report import BackwardTimer, StepReport, describe_matrices, ranks_text, settings_text
from ds_zo.backends.lsp.scheduler import UpdateQueue
from ds_zo.backends.lsp.shared_groups import SharedDeviceGroup, SharedHostGroup
from ds_zo.backends.lsp.state import (
    LAYOUT,
    check_layout,
    check_matrix_states,
    gather_owned_states,
    load_matrix_states,
    matrix_states,
)
from ds_zo.backends.lsp.streamed import StreamedBlocks, without_caches
from ds_zo.backends.lsp.weights import UpdateOnAccessState
from ds_zo.backends.recompute.blocks import refuse_router_logits
from ds_zo.backends.recompute.compiled_blocks import BlockCompiler
from ds_zo.config import ConfigError, LSPParams, Resolved
from ds_zo.optim.subspace_adam import NORM_FLOOR
from ds_zo.streaming.blocks import find_blocks
from ds_zo.streaming.units import Unit

_STEPS_BETWEEN_PARAMETER_CHECKS = 20

_gradient_hooks: Any = WeakTensorKeyDictionary()
"""The gradient hook of each parameter. A second engine for the same module replaces the hooks of the first."""
_module_hooks: weakref.WeakKeyDictionary[nn.Module, list[RemovableHandle]] = weakref.WeakKeyDictionary()
"""The hook handles of the last engine of each module.

A handle refers to its hooks weakly. This dict keeps the handles reachable: of a dropped engine, the garbage collector
could clear that reference before the engine removes its hooks."""


class LSPBackend(Backend):
    """Trains a module with LSP. One instance serves one DeepSpeed engine."""

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
        assert isinstance(config.optimizer, LSPParams)
        self.settings = config.optimizer
        self._stochastic = config.section.rounding == "stochastic"
        world_size = dist.get_world_size(process_group) if dist.is_initialized() else 1
        self.ranks = CollectiveThread(process_group, device=device) if world_size > 1 else None
        self._clips_globally = config.gradient_clipping > 0 and self.settings.clip_scope == "global"
        self._starts_early = self.settings.schedule == "layerwise" and not self._clips_globally
        """Host updates start inside the backward pass; otherwise all of them start in `step`."""
        self._num_steps = 0
        self._states_of_other_ranks: dict[str, dict[str, Any]] = {}
        """States that other ranks own, by parameter name, gathered by the last `rank_state`. Empty after a step."""
        self._in_backward = self._in_last_backward = False
        """Whether `engine.backward` of this engine is running, and whether a step follows it. Both are False in a
        direct `loss.backward()` and in the backward pass of another engine's loss."""
        self._param_group_index = ParamGroupIndex()
        self._calibration = Calibration(self.settings, ranks=self.ranks)
        self._held_gradients = HeldGradients()
        self._backward_timer = BackwardTimer(device)
        self._compiler = BlockCompiler() if config.section.compile_blocks else None
        _check_dtypes(module)
        self._warn_of_ignored_settings()
        self._streamed = self._make_streamed_blocks() if self.places_parameters(config) else None
        if self._compiler is not None and self._streamed is None:
            self._compiler.install(find_blocks(module, config.section.stream.blocks).values())
        self._matrices = find_matrices(module, self.settings, device=device)
        self._matrix_ids = {id(matrix.parameter) for matrix in self._matrices}
        self._frozen = [(name, p) for name, p in module.named_parameters() if id(p) not in self._matrix_ids]
        groups = group_matrices(module, self._matrices, config.section.stream.blocks)
        if self._streamed is not None:
            groups = split_streamed(groups, self._streamed.unit_of)
        self._groups = LSPGroups(
            groups,
            self.settings,
            config=config,
            ranks=self.ranks,
            device=device,
            max_norm=0.0 if self._clips_globally else self._largest_norm(),
            unit_of={} if self._streamed is None else self._streamed.unit_of,
        )
        self._host_groups, self._device_groups = self._groups.on_host, self._groups.on_device
        self._queue = self._groups.queue
        self._backward_order: BackwardOrder | None = None
        if self.ranks is not None:
            layers = [[matrix for matrix in group.matrices if matrix.parameter.ndim >= 2] for group in groups]
            self._ordered_layers = [layer for layer in layers if layer]
            self._backward_order = BackwardOrder(self._ordered_layers, weakly(self._finish_layer))
        self._calibrates_on_averages = False
        """In this backward pass, ranks average full gradients layer by layer, to fit or test projectors on the
        average."""
        self._group_of_unit = {id(group.unit): group for group in self._host_groups if group.unit is not None}
        self._host_group_of = {id(matrix): group for group in self._host_groups for matrix in group.matrices}
        self._updated_at_backward: set[int] = set()
        """Ids of the groups whose pending update was applied at the start of the present backward pass. Their weights
        must not have been used by the forward pass."""
        self._deferred_blocks = DeferredBlocks(
            [group for group in self._host_groups if group.is_block and group.unit is None],
            watches=self.settings.schedule == "layerwise",
            on_stray=weakly(self._hook_submodules),
        )
        self._checked_stray_weights = False
        """A forward pass has been checked for weights of streamed blocks that are used outside their block's
        forward."""
        self._handles = [self._hook_gradient(matrix) for matrix in self._matrices] + self._hook_modules(groups)
        _module_hooks[module] = self._handles
        self._weights: UpdateOnAccessState | None = None
        if self._streamed is None:
            self._weights = UpdateOnAccessState(
                module, weakly(self.apply_pending_updates), has_pending=weakly(self._has_pending_updates), device=device
            )
        self._finalizer = weakref.finalize(self, _end_threads, self.ranks, self._queue)
        self._is_closed = False
        self._param_group_index.follow(self.param_groups)

    @classmethod
    def places_parameters(cls, config: Resolved) -> bool:
        several = dist.is_initialized() and dist.get_world_size() > 1
        if config.stream and several:
            raise ConfigError(
                "LSP can stream weights on one rank only, got offload_param.device "
                f'"cpu" on {dist.get_world_size()} ranks: remove offload_param, or train on one rank',
                at="zero_optimization.offload_param.device",
            )
        return config.stream

    # Hooks and checks of parameters

    def _make_streamed_blocks(self) -> StreamedBlocks:
        return StreamedBlocks(
            self.module,
            self.config,
            param_groups=self.param_groups,
            device=self.device,
            apply_pending_update=weakly(self._apply_pending_to_unit),
            apply_pending_updates=weakly(self.apply_pending_updates),
            end_block_backward=weakly(self._end_block_backward),
            compiler=self._compiler,
        )

    def _hook_gradient(self, matrix: MatrixState) -> RemovableHandle:
        p = matrix.parameter
        if p in _gradient_hooks:
            _gradient_hooks.pop(p).remove()
        handle = p.register_post_accumulate_grad_hook(weakly(self._on_gradient, matrix))
        _gradient_hooks[p] = handle
        return handle

    def _hook_modules(self, groups: list[MatrixGroup]) -> list[RemovableHandle]:
        """Registers the hooks that apply a pending update before its weights are used or copied.

        A block that is known to be called as a whole applies its update in its own forward. The root module's forward
        applies all other updates, because these weights may be used without a call of the module that holds them."""
        by_name = {group.name: (i, group) for i, group in enumerate(self._host_groups)}
        handles: list[RemovableHandle] = []
        for group in groups:
            if group.name in by_name and by_name[group.name][1].unit is None:
                index, _ = by_name[group.name]
                for owner in group.modules:
                    handles.append(owner.register_forward_pre_hook(weakly(self._before_module_call, index)))
        if self._host_groups:
            handles.append(self.module.register_forward_pre_hook(weakly(self._apply_pending_for, None)))
        deferred = {id(matrix.parameter) for group in self._host_groups for matrix in group.matrices}
        for m in self.module.modules():  # `state_dict()` of a submodule does not call the hooks of its parents
            if any(id(p) in deferred for p in m._parameters.values()):
                handles.append(m.register_state_dict_pre_hook(weakly(self._before_state_dict)))
                handles.append(m.register_load_state_dict_pre_hook(weakly(self._before_state_dict)))
        return handles

    def _hook_submodules(self, group: HostGroup) -> None:
        """Applies the group's pending update before the forward of any module that holds one of its weights.

        A user may run a part of the model by itself, without a call of the block or of the root module."""
        index = self._host_groups.index(group)
        for owner in {owner for matrix in group.matrices for owner in owners(self.module, matrix.parameter)}:
            self._handles.append(owner.register_forward_pre_hook(weakly(self._before_module_call, index)))

    def _warn_of_ignored_settings(self) -> None:
        """Warns of `betas` and `eps` in an optimizer object's param groups: only learning rate and weight decay are
        read from there."""
        for key in ("betas", "eps"):
            own = getattr(self.settings, key)
            found = [group[key] for group in self.param_groups if key in group]
            ignored = {str(tuple(value) if isinstance(value, list) else value) for value in found} - {str(own)}
            if ignored:
                shown = ", ".join(sorted(ignored))
                logger.warning(
                    f"ds_zo: LSP's Adam uses {key} {own} and ignores the optimizer's {shown}: set "
                    f"{self.config.params_at}.{key}"
                )

    def _trains(self, matrix: MatrixState) -> bool:
        """Whether the parameter requires a gradient and is in a param group."""
        return matrix.parameter.requires_grad and matrix.parameter in self._param_group_index

    def _check_parameters(self) -> None:
        """Refuses parameters that became trainable after the engine was made.

        Parameters that were frozen then are checked at every forward. New parameters are looked for once in
        _STEPS_BETWEEN_PARAMETER_CHECKS steps, because walking over a model takes a millisecond."""
        untrained = self._frozen
        if self._num_steps % _STEPS_BETWEEN_PARAMETER_CHECKS == 0:
            untrained = [(name, p) for name, p in self.module.named_parameters() if id(p) not in self._matrix_ids]
        for name, p in untrained:
            if p.requires_grad and p.numel() and p.is_floating_point():
                raise ValueError(
                    f"LSP trains the parameters that are trainable in deepspeed.initialize, got {name}, which became "
                    "trainable later: call requires_grad_(True), add or replace parameters before deepspeed.initialize"
                )

    # Pending updates

    def apply_pending_updates(self) -> None:
        """Brings every weight to the last step. The layer-wise schedule defers updates until the next use of a
        weight."""
        for index, group in enumerate(self._host_groups):
            if group.phase is GroupPhase.UPDATE_PENDING:
                self._apply_pending_for(index)

    def _has_pending_updates(self) -> bool:
        return any(group.phase is GroupPhase.UPDATE_PENDING for group in self._host_groups)

    def _unwatched_weights(self) -> AbstractContextManager[None]:
        """Returns a context in which this backend's own accesses to weights do not apply pending updates."""
        state = self._weights if self._streamed is None else self._streamed.state
        assert state is not None
        return state.unwatched()

    def _before_module_call(self, index: int, *hooked: Any) -> None:
        self._deferred_blocks.called.add(id(self._host_groups[index]))
        self._apply_pending_for(index)

    def _before_state_dict(self, *hooked: Any) -> None:
        self.apply_pending_updates()

    @torch.inference_mode(False)
    def _apply_pending_for(self, index: int | None, *hooked: Any) -> None:
        """Applies the pending update of group `index`, or, for None, those that a forward of the whole module needs.

        Inference mode is switched off: training goes on with tensors that an evaluation's forward creates here."""
        if index is not None:
            group = self._host_groups[index]
            if group.phase is GroupPhase.UPDATE_PENDING and group.unit is not None and self._streamed is not None:
                self._streamed.bring_up_to_date(group.unit)
            elif group.phase is GroupPhase.UPDATE_PENDING:
                group.apply_pending_update()
                self._groups.prefetch()
            return
        for group in self._host_groups:
            if group.unit is None and not self._deferred_blocks.is_deferred(group):
                group.apply_pending_update()
        self._groups.prefetch()

    def _apply_pending_to_unit(self, unit: Unit) -> bool:
        """Applies the pending update of a block whose weights are on the device. True: its weights have changed."""
        group = self._group_of_unit.get(id(unit))
        if group is None or group.phase is not GroupPhase.UPDATE_PENDING:
            return False
        group.apply_pending_update()
        self._groups.prefetch()
        return True

    # Forward and backward

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the module. A backward may also follow in evaluation mode: transformers loads models in it."""
        with self._unwatched_weights():
            return self._forward(*args, **kwargs)

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self.module(*args, **kwargs)
        if self._streamed is not None:
            refuse_router_logits(self.module, kwargs)
        if self.module.training:
            self._check_parameters()
            if self._streamed is not None:
                pending_units = [
                    g.unit for g in self._host_groups if g.unit is not None and g.phase is GroupPhase.UPDATE_PENDING
                ]
                with self._streamed.forward_pass(pending_units):
                    return self._run(*args, **kwargs)
        if not self.module.training and self._streamed is None and self._compiler is None:
            return self._run(*args, **kwargs)
        with without_caches(self.module):
            return self._run(*args, **kwargs)

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        streamed = None if self._streamed is None or self._checked_stray_weights else self._streamed.block_store
        with (
            nullcontext() if streamed is None else streamed.strays_refused(),
            self._deferred_blocks.watched(self.module),
        ):
            output = self.module(*args, **kwargs)
        self._checked_stray_weights = True
        return output

    def backward(self, loss: torch.Tensor, *, retain_graph: bool = False) -> None:
        with self._unwatched_weights():
            self._backward(loss, retain_graph=retain_graph)

    def _backward(self, loss: torch.Tensor, *, retain_graph: bool) -> None:
        self._updated_at_backward = {
            id(group) for group in self._host_groups if group.phase is GroupPhase.UPDATE_PENDING and group.unit is None
        }
        self.apply_pending_updates()  # of the layers that the forward pass did not use
        self._clear_sums_after_zero_grad()
        started = next((group.name for group in self._host_groups if group.phase is GroupPhase.UPDATING), None)
        if started is not None:
            raise _after_start(started)
        self._param_group_index.follow(self.param_groups)
        self._calibration.begin_backward(self._num_steps, [matrix for matrix in self._matrices if self._trains(matrix)])
        for group in self._host_groups:
            group.num_expected = sum(self._trains(matrix) for matrix in group.matrices)
            group.num_arrived = 0
        self._in_last_backward = self.is_last_micro_batch
        self._queue.last_first = False
        if self._backward_order is not None:
            self._backward_order.begin(self._trains)
            self._calibrates_on_averages = any(
                self._calibration.wants_gradient(matrix) for matrix in self._matrices if self._trains(matrix)
            )
        self._backward_timer.begin()
        streamed = self._streamed
        try:
            self._in_backward = True
            with nullcontext() if streamed is None else streamed.backward_pass(retain_graph=retain_graph):
                loss.backward(retain_graph=retain_graph)
            self._held_gradients.compress()
            if self._backward_order is not None:
                self._backward_order.finish()
        except RuntimeError as error:
            if self._updated_at_backward and "modified by an inplace operation" in str(error):
                names = [group.name for group in self._host_groups if id(group) in self._updated_at_backward]
                raise _used_before_update(f"one of {', '.join(names)}") from error
            raise
        finally:
            self._in_backward = self._in_last_backward = self._calibrates_on_averages = False
            self._updated_at_backward = set()
            self._held_gradients.clear()
        self._backward_timer.end()

    def _on_gradient(self, matrix: MatrixState, hooked: torch.Tensor) -> None:
        """Takes the accumulated gradient of one parameter: the parameter's post-accumulate hook."""
        p, grad = matrix.parameter, matrix.parameter.grad
        if grad is None or p not in self._param_group_index:
            p.grad = None
            return
        if matrix.is_streamed:
            self._check_on_device(matrix)
        group = self._host_group_of.get(id(matrix))
        if self._updated_at_backward and id(group) in self._updated_at_backward:
            p.grad = None
            raise _used_before_update(matrix.name)
        if group is not None and group.phase is GroupPhase.UPDATING:
            p.grad = None
            raise _after_start(matrix.name)
        if group is not None:
            group.apply_pending_update()
        if grad.is_sparse:
            grad = p.grad = grad.to_dense()
        if matrix.subspace is None:
            matrix.has_total = True
            if matrix.held_gradient is not None:
                p.grad, matrix.held_gradient = matrix.held_gradient.add_(grad), None
        elif (
            not self._calibrates_on_averages or self._backward_order is None or self._backward_order.has_passed(matrix)
        ):
            self._compress_or_hold(matrix, grad)
        if self._backward_order is not None:
            if p.ndim >= 2 and self._in_backward:
                self._backward_order.mark_arrived(matrix)
        elif group is not None:
            group.num_arrived += 1
            if group.num_arrived >= group.num_expected and group.unit is None:
                self._held_gradients.compress()
                if self._in_last_backward and self._starts_early and group.num_arrived == group.num_expected:
                    self._start_early(group)

    def _check_on_device(self, matrix: MatrixState) -> None:
        assert self._streamed is not None
        if not self._streamed.block_store.is_materialised(self._streamed.unit_of[id(matrix.parameter)]):
            matrix.parameter.grad = None
            raise used_outside(matrix.name)

    @torch.no_grad()
    def _end_block_backward(self, unit: Unit, more_to_come: bool) -> None:
        """Takes all gradients of a streamed block out of its parameters, whose device memory is about to be reused.

        `more_to_come`: the block runs again in this backward pass."""
        self._held_gradients.compress()
        group = self._group_of_unit.get(id(unit))
        if group is None:
            return
        starts = self._in_last_backward and self._starts_early and not more_to_come
        if starts and group.phase is GroupPhase.SUMMING and any(matrix.has_total for matrix in group.matrices):
            self._start_early(group)
        for matrix in group.matrices:
            if matrix.parameter.grad is not None:
                matrix.held_gradient, matrix.parameter.grad = matrix.parameter.grad, None

    def _compress_or_hold(self, matrix: MatrixState, grad: torch.Tensor) -> None:
        """Queues a projected matrix's gradient for compression, or compresses it now and calibrates with it."""
        if not self._calibration.wants_gradient(matrix):
            self._held_gradients.add(matrix)
            return
        if self.ranks is not None and not self._in_backward:
            matrix.parameter.grad = None
            raise RuntimeError(
                "on several ranks, engine.backward(loss) must make the gradients that projectors are fitted to, got "
                f"one of {matrix.name} from another backward pass: call engine.backward(loss) instead of "
                "loss.backward(), or freeze this model (requires_grad_(False)) while another engine's loss passes "
                "through it"
            )
        compress_matrices([matrix])
        self._calibration.fit_or_test(matrix, grad)

    def _start_early(self, group: HostGroup) -> None:
        """Starts a group's host update inside the backward pass."""
        self._queue.last_first = self._host_groups.index(group) <= self._backward_timer.transition(self._host_groups)
        self._start(group)

    def _start(self, group: HostGroup, *, downloads: bool = True) -> None:
        if isinstance(group, SharedHostGroup):
            group.start(trained=[self._trains(matrix) for matrix in group.matrices], downloads=downloads)
        else:
            group.start()

    # Several ranks: [Note: one order of collectives]

    @torch.no_grad()
    def _finish_layer(self, index: int) -> None:
        """Acts on a layer, by its index in `_ordered_layers`, when this rank has all gradients of it that it will
        get."""
        matrices = self._ordered_layers[index]
        self._held_gradients.compress()
        if self._calibrates_on_averages:
            self._calibrate_on_averages(
                [matrix for matrix in matrices if matrix.subspace is not None and self._trains(matrix)]
            )
        group = self._host_group_of.get(id(matrices[0]))
        if group is not None and group.num_expected and self._in_last_backward and self._starts_early:
            self._start_early(group)

    def _calibrate_on_averages(self, matrices: list[MatrixState]) -> None:
        """Fits or tests projectors with the average over ranks. All ranks call this with the same matrices."""
        assert self.ranks is not None
        if not matrices:
            return
        has_gradient = torch.tensor(
            [float(matrix.parameter.grad is not None) for matrix in matrices], device=self.device
        )
        for matrix, share in zip(matrices, self.ranks.average(has_gradient).tolist(), strict=True):
            grad = matrix.parameter.grad
            wants_gradient = self._calibration.wants_gradient(matrix) and share > 0
            mean = None
            if wants_gradient:
                mean = self.ranks.average(torch.zeros_like(matrix.parameter) if grad is None else grad)
            if grad is not None:
                compress_matrices([matrix])
            if mean is not None:
                self._calibration.fit_or_test(matrix, mean)

    # Step

    def step(self) -> StepOutcome:
        with self._unwatched_weights():
            return self._step()

    def _step(self) -> StepOutcome:
        self.apply_pending_updates()  # a backward pass outside engine.backward does not apply them
        self._clear_sums_after_zero_grad()
        self._param_group_index.follow(self.param_groups)
        self._held_gradients.compress()
        self._states_of_other_ranks = {}
        global_norm = self._start_shared_updates() if self.ranks is not None else self._start_updates()
        report = StepReport()
        for device_group in self._device_groups:
            report.add_device(device_group.step(self._rates(device_group.matrices)))
        for group in self._host_groups:
            if group.phase is GroupPhase.UPDATING:
                assert group.job is not None
                report.add_job(group.job)
                group.commit(self._rates(group.matrices))
        self._deferred_blocks.after_step()
        self._num_steps += 1
        if self.settings.schedule == "sync":
            self.apply_pending_updates()
        if any(matrix.candidate is not None and matrix.candidate.gain is not None for matrix in self._matrices):
            self._adopt_candidates()
        self._groups.prefetch()
        self._calibration.report()
        if self._streamed is not None:
            self._streamed.block_store.fill_device()
        return report.outcome(global_norm)

    def _rates(self, matrices: list[MatrixState]) -> list[Rate | None]:
        """Learning rate and weight decay of each matrix in this step; None for a parameter in no param group."""
        found: dict[int, Rate] = {}
        groups = [self._param_group_index.get(matrix.parameter) for matrix in matrices]
        for group in groups:
            if group is not None and id(group) not in found:
                lr, weight_decay = float(group["lr"]), float(group.get("weight_decay", 0.0))
                found[id(group)] = Rate(lr, weight_decay, self._num_steps, self._stochastic)
        return [None if group is None else found[id(group)] for group in groups]

    def _start_updates(self) -> torch.Tensor | None:
        """Starts the updates that the backward pass has not started. Returns the global norm; None where clipping is
        not global."""
        norm = None
        if self._clips_globally:
            norm = self._clip_globally({id(matrix): matrix.gradient for matrix in self._matrices if matrix.has_total})
        for group in self._host_groups:  # in the order of the next forward pass
            if group.phase is GroupPhase.SUMMING and any(matrix.has_total for matrix in group.matrices):
                group.start()
        return norm

    def _start_shared_updates(self) -> torch.Tensor | None:
        """Does on several ranks what `_start_updates` does on one. All ranks start the same groups."""
        for device_group in self._device_groups:
            assert isinstance(device_group, SharedDeviceGroup)
            device_group.start(trained=[self._trains(matrix) for matrix in device_group.matrices])
        started = []
        for group in self._host_groups:
            assert isinstance(group, SharedHostGroup)
            if group.phase is GroupPhase.SUMMING and any(self._trains(matrix) for matrix in group.matrices):
                self._start(group, downloads=not self._clips_globally)
                started.append(group)
        grads: dict[int, torch.Tensor] = {}
        for device_group in self._device_groups:
            assert isinstance(device_group, SharedDeviceGroup)
            device_group.finish()
            grads |= {id(matrix): matrix.gradient for matrix in device_group.matrices if matrix.has_total}
        if not self._clips_globally:
            return None
        for group in started:
            grads |= group.averages()
        norm = self._clip_globally(grads)
        for group in started:
            group.start_download()
        return norm

    def _largest_norm(self) -> float:
        """The norm that one parameter's gradient is clipped to. The norm of all is then at most `gradient_clipping`.

        Clipping each to `gradient_clipping` itself would hardly ever clip. Steps with large gradients would then fill
        Adam's second moments, which AdamW prevents by clipping the norm of all."""
        return self.config.gradient_clipping / math.sqrt(max(len(self._matrices), 1))

    @torch.no_grad()
    def _clip_globally(self, found: dict[int, torch.Tensor]) -> torch.Tensor | None:
        """Clips gradients, given by the id of their MatrixState, to one global norm, and returns that norm.

        One norm is taken of each gradient, in the model's order, so that any number of ranks adds up the same numbers.
        A norm that is not finite makes all gradients NaN, which skips the step. None: there is no gradient."""
        grads = [found[id(matrix)] for matrix in self._matrices if id(matrix) in found]
        if not grads:
            return None
        norm = torch.stack(torch._foreach_norm(grads, dtype=torch.float32)).norm()
        coef = (self.config.gradient_clipping / (norm + NORM_FLOOR)).clamp_(max=1.0)
        torch._foreach_mul_(grads, torch.where(norm.isfinite(), coef, torch.nan))
        return norm

    def _adopt_candidates(self) -> None:
        self.apply_pending_updates()  # pending directions belong to the present projectors
        for matrix, moments in self._groups.matrices_and_moments():
            if matrix.candidate is not None and matrix.candidate.gain is not None:
                adopt(matrix, moments)
        self._held_gradients.launch_cache.clear()

    def zero_grad(self) -> None:
        self._groups.undo_updates()
        self._held_gradients.clear()
        for matrix in self._matrices:
            matrix.clear()
        self.module.zero_grad(set_to_none=True)

    def _clear_sums_after_zero_grad(self) -> None:
        """Clears the projected sums if the optimizer or the module has dropped the whole gradients by `zero_grad`,
        which does not reach the sums."""
        waiting = (matrix for group in self._device_groups for matrix in group.matrices if matrix.has_total)
        if any(matrix.total is None and matrix.whole_gradient is None for matrix in waiting):
            self.zero_grad()

    # Saving, loading, describing

    @property
    def biases(self) -> dict[str, float]:
        """By matrix: the relative bias of its projectors on the gradient that they were last tested with."""
        return dict(self._calibration.biases)

    @property
    def fit_s(self) -> float:
        """Seconds spent on fitting projectors since the engine was made."""
        return self._calibration.fit_s

    def state_dict(self) -> dict[str, Any]:
        """The state of a checkpoint. From ZeRO stage 1 on, only the first rank may call this, after `rank_state`."""
        self.apply_pending_updates()
        self._groups.undo_updates()
        matrices = matrix_states(self._groups.matrices_and_moments(), gathered=self._states_of_other_ranks)
        calibration = self._calibration.state_dict()
        return {"step": self._num_steps, "calibration": calibration, "layout": LAYOUT, "slots": matrices}

    def check_state(self, state: Mapping[str, Any]) -> None:
        check_layout(state.get("layout", 1))
        check_matrix_states(self._groups.matrices_and_moments(), state["slots"])
        int(state["step"]), int(state["calibration"]["checked_step"])

    def load_state_dict(self, state: Mapping[str, Any], *, load_optimizer_states: bool = True) -> None:
        self.apply_pending_updates()
        self.zero_grad()
        saved = state["slots"] if load_optimizer_states else {}
        self._num_steps = int(state["step"]) if load_optimizer_states else 0
        self._calibration.load_state_dict(state["calibration"] if load_optimizer_states else None)
        load_matrix_states(self._groups.matrices_and_moments(), saved, settings=self.settings, device=self.device)

    def stored(self) -> dict[str, torch.Tensor]:
        self.apply_pending_updates()
        return super().stored() if self._streamed is None else self._streamed.stored()

    def stored_changed(self) -> None:
        if self._streamed is not None:
            self._streamed.block_store.rewritten()

    def rank_state(self) -> dict[str, Any]:
        self._groups.undo_updates()
        self._held_gradients.compress()
        if self.ranks is not None:
            self.apply_pending_updates()
            owned = [group for group in self._host_groups if isinstance(group, SharedHostGroup)]
            self._states_of_other_ranks = gather_owned_states(owned, self.ranks)
        return {"totals": {matrix.name: matrix.gradient.cpu().clone() for matrix in self._matrices if matrix.has_total}}

    def check_rank_state(self, state: Mapping[str, Any]) -> None:
        for matrix in self._matrices:
            total = state["totals"].get(matrix.name)
            if total is not None and matrix.total is not None and total.shape != matrix.total.shape:
                raise ValueError(f"the sum of {matrix.name} has shape {tuple(total.shape)}")

    def load_rank_state(self, state: Mapping[str, Any]) -> None:
        for matrix in self._matrices:
            matrix.clear()
            if (total := state["totals"].get(matrix.name)) is not None:
                matrix.has_total = True
                if matrix.total is not None:
                    matrix.total.copy_(total)
                else:
                    matrix.restore_gradient(total.clone(), device=self.device)

    def footprint(self) -> dict[str, int]:
        return self._groups.footprint(self._matrices)

    def describe(self) -> str:
        lines = [] if self._streamed is None else [self._streamed.block_store.describe()]
        lines += describe_matrices(self._matrices, self.settings, on_host=bool(self._host_groups), **self.footprint())
        if self.ranks is not None:
            lines.append(f"ds_zo: {ranks_text(self._matrices, self.ranks.size, owned=self._owns_states())}")
        return "\n".join(lines)

    def startup_summary(self) -> StartupSummary:
        base = super().startup_summary() if self._streamed is None else self._streamed.block_store.startup_summary()
        footprint = self.footprint()
        on_host = nonzero([("states", footprint["host_bytes"])])
        ranks = None if self.ranks is None else ranks_text(self._matrices, self.ranks.size, owned=self._owns_states())
        return replace(
            base,
            settings=settings_text(self._matrices, self.settings, on_host=bool(self._host_groups)),
            device_bytes={**base.device_bytes, "projectors and states": footprint["device_bytes"]},
            host_bytes={**base.host_bytes, **on_host},
            pinned_bytes=base.pinned_bytes + self._groups.store.pinned_nbytes,
            ranks=ranks,
        )

    def _owns_states(self) -> bool:
        """Whether each layer's states are on one rank only."""
        return bool(self._host_groups) and self.config.zero_stage > 0

    def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        # When the garbage collector frees the engine, it runs `_finalizer` and clears weak references before this call.
        # The Adam thread has finished its jobs then, but other ranks cannot be reached. At interpreter shutdown no one
        # uses the module, and PyTorch aborts if a finalizer creates tensors.
        applies_pending = (self.ranks is None or self._finalizer.alive) and not sys.is_finalizing()
        if self._streamed is not None:
            self._streamed.set_update_callback(self._apply_pending_to_unit)
            applies_pending &= self._streamed.state.owns_module()
        with ExitStack() as stack:  # runs all callbacks, the last first, also if a failed job raises below
            stack.callback(self._groups.close)
            for part in (self._weights, self._streamed, self._compiler):
                if part is not None:
                    stack.callback(part.close)
            for handle in self._handles:
                stack.callback(handle.remove)
            stack.callback(self._finalizer)
            if applies_pending:
                self.apply_pending_updates()


def _check_dtypes(module: nn.Module) -> None:
    """Refuses float16 weights: without a dtype in the JSON, a model keeps its checkpoint's dtype."""
    for name, p in module.named_parameters():
        if p.requires_grad and p.is_floating_point() and p.dtype not in (torch.float32, torch.bfloat16):
            raise ConfigError(
                f"LSP trains float32 and bfloat16 weights (fp16 needs loss scaling, which LSP lacks), got parameter "
                f'{name} in {p.dtype} and a JSON that names no dtype: add "bf16": {{"enabled": true}}, or call '
                "model.float()",
                at="bf16.enabled",
            )


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


def _end_threads(ranks: CollectiveThread | None, queue: UpdateQueue) -> None:
    """Ends the collective thread before the Adam thread, because a collective call may wait for an Adam job."""
    if ranks is not None:
        ranks.close()
    queue.close()
