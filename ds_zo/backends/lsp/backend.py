"""The LSP backend: Adam in a d x d subspace of each weight matrix.

The backward pass projects each matrix's gradient to d x d and drops the full gradient. The d x d sums are copied to the
CPU, where Adam turns them into directions D. The directions are copied back, and the weights move by -lr P D Q^T.

Where to find the parts:

- `matrices`: which parameters are projected ([Note: projected and whole parameters]).
- `backward`: gradients are compressed, and updates of complete layers start.
- `host_group`: the transfer of a layer's sums to the host and of its directions back; `device_group`: Adam on the
  device; `shared_groups`: both on several ranks.
- `pending_updates`: when directions are applied to the weights.
- `streamed`: blocks whose weights are on the host.
- `calibration`: when projectors are fitted.
- `state`: the contents of checkpoints.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Mapping
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.hooks import RemovableHandle

from ds_zo.backends.common.backend import StepOutcome
from ds_zo.backends.common.caches import Caches
from ds_zo.backends.common.chunked_loss import CausalLosses
from ds_zo.backends.common.plain_copies import weakly
from ds_zo.backends.common.startup import StartupSummary, nonzero
from ds_zo.backends.lsp.backward import LSPBackwardPass
from ds_zo.backends.lsp.calibration import Calibration, adopt
from ds_zo.backends.lsp.groups import LSPGroups
from ds_zo.backends.lsp.host_group import GroupPhase
from ds_zo.backends.lsp.matrices import find_matrices, group_matrices, split_streamed
from ds_zo.backends.lsp.parameter_rates import ParameterRates
from ds_zo.backends.lsp.pending_updates import PendingUpdates
from ds_zo.backends.lsp.ranks import CollectiveThread
from ds_zo.backends.lsp.report import StepReport, ranks_text, settings_text
from ds_zo.backends.lsp.scheduler import UpdateQueue
from ds_zo.backends.lsp.shared_groups import SharedHostGroup
from ds_zo.backends.lsp.state import (
    LAYOUT,
    check_matrix_states,
    gather_owned_states,
    load_matrix_states,
    matrix_states,
    saved_matrices,
)
from ds_zo.backends.lsp.streamed import PendingUpdate
from ds_zo.backends.recompute.backend import RecomputedBackend
from ds_zo.backends.recompute.compiled_blocks import BlockCompiler
from ds_zo.config import ConfigError, LSPParams, Resolved
from ds_zo.logs import warn
from ds_zo.optim.loss_scale import LossScaler
from ds_zo.streaming.units import Unit

_module_hooks: weakref.WeakKeyDictionary[nn.Module, list[RemovableHandle]] = weakref.WeakKeyDictionary()
"""The hook handles of the last engine of each module.

A handle refers to its hooks weakly. This dict keeps the handles reachable: of a dropped engine, the garbage collector
could clear that reference before the engine removes its hooks."""


class LSPBackend(RecomputedBackend):
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
        self.settings = settings = config.optimizer
        world_size = dist.get_world_size(process_group) if dist.is_initialized() else 1
        self._num_steps = 0
        self._states_of_other_ranks: dict[str, dict[str, Any]] = {}
        """States that other ranks own, by parameter name, gathered by the last `rank_state`. Empty after a step."""
        self._scaler = LossScaler(config.loss_scale) if torch.float16 in (config.dtype, config.autocast) else None
        if self._scaler is None:
            _check_dtypes(module)
        else:
            self._scaler.publish(optimizer, overflow=False)
        self._warn_of_ignored_settings()
        self._compiler = BlockCompiler() if config.section.compile_blocks else None
        self._caches = Caches(module)
        self._causal_losses = CausalLosses(module, blocks=config.section.stream.blocks)
        self._pending_update = PendingUpdate(weakly(self._apply_pending_to_unit))
        self.make_blocks(preparation=self._pending_update, compiler=self._compiler)
        streams = self.blocks.streams
        self.ranks = CollectiveThread(process_group, streams=streams) if world_size > 1 else None
        self._calibration = Calibration(settings, ranks=self.ranks)
        self._matrices = find_matrices(module, settings, device=device)
        if settings.projector != "none" and not self.num_projected:
            largest = max((m.parameter.numel() for m in self._matrices if m.parameter.ndim == 2), default=0)
            warn(
                f"LSP projects no matrix of this model, so it is Adam: a matrix needs more than subspace_dim ** 2 = "
                f"{settings.subspace_dim**2:,} elements, and the largest has {largest:,}; lower subspace_dim "
                f"({config.params_at}.subspace_dim)"
            )
        layers = group_matrices(module, self._matrices, config.section.stream.blocks)
        unit_of = {id(placed.parameter): unit for unit in self.blocks.units for placed in unit.placed}
        if self.blocks.is_streamed:
            layers = split_streamed(layers, unit_of)
        self.groups = LSPGroups(layers, settings, config=config, ranks=self.ranks, streams=streams, unit_of=unit_of)
        is_layerwise = settings.schedule == "layerwise"
        self._pending = PendingUpdates(module, self.groups, layers, blocks=self.blocks, watches=is_layerwise)
        self._trained = ParameterRates(module, self._matrices, stochastic=config.section.rounding == "stochastic")
        self._passes = LSPBackwardPass(
            self.groups,
            layers,
            trained=self._trained,
            calibration=self._calibration,
            blocks=self.blocks,
            unit_of=unit_of,
            ranks=self.ranks,
            starts_early=is_layerwise and not self.groups.clips_globally and self._scaler is None,
            scales_loss=self._scaler is not None,
        )
        self._pending.handles += self._passes.handles
        _module_hooks[module] = self._pending.handles
        self.access_weights(settle=weakly(self._pending.apply_all), has_pending=weakly(self._pending.exist))
        self._finalizer = weakref.finalize(self, _end_threads, self.ranks, self.groups.queue)
        self._is_closed = False
        self._trained.follow(self.param_groups)

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

    def _apply_pending_to_unit(self, unit: Unit) -> bool:
        return self._pending.apply_to_unit(unit)

    def _warn_of_ignored_settings(self) -> None:
        """Warns of `betas` and `eps` in an optimizer object's param groups: only learning rate and weight decay are
        read from there."""
        for key in ("betas", "eps"):
            own = getattr(self.settings, key)
            found = [group[key] for group in self.param_groups if key in group]
            ignored = {str(tuple(value) if isinstance(value, list) else value) for value in found} - {str(own)}
            if ignored:
                shown = ", ".join(sorted(ignored))
                warn(
                    f"LSP's Adam uses {key} {own} and ignores the optimizer's {shown}: set "
                    f"{self.config.params_at}.{key}"
                )

    def apply_pending_updates(self) -> None:
        """Brings every weight to the last step. The layer-wise schedule defers updates until the next use of a
        weight."""
        self._pending.apply_all()

    # Forward and backward

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the module. A backward may also follow in evaluation mode: transformers loads models in it."""
        with self.plain_parameters():
            if not torch.is_grad_enabled():
                return self.module(*args, **kwargs)
            trains = self.module.training
            if trains:
                self._trained.known.check()
            makes_no_caches = trains or self.blocks.is_streamed or self._compiler is not None
            with (
                self._causal_losses.in_chunks(kwargs),
                self._caches.off() if makes_no_caches else nullcontext(),
                self.blocks.forward(downloads=self._pending.units()),
                self._pending.watched(),
            ):
                return self.module(*args, **kwargs)

    def backward(self, loss: torch.Tensor, *, retain_graph: bool = False) -> None:
        with self.plain_parameters():
            pending = [g for g in self.groups.on_host if g.phase is GroupPhase.UPDATE_PENDING and g.unit is None]
            self.apply_pending_updates()  # of the layers that the forward pass did not use
            self._check_left_gradients()
            self._trained.follow(self.param_groups)
            self._passes.run(
                loss if self._scaler is None else loss.float() * self._scaler.scale,
                step=self._num_steps,
                is_last=self.is_last_micro_batch,
                retain_graph=retain_graph,
                updated_groups=pending,
            )

    # Step

    def step(self) -> StepOutcome:
        with self.plain_parameters():
            return self._step()

    def _step(self) -> StepOutcome:
        self.apply_pending_updates()  # a backward pass outside engine.backward does not apply them
        self._check_left_gradients()
        self._trained.follow(self.param_groups)
        self._passes.held_gradients.compress()
        self._states_of_other_ranks = {}
        loss_scale = None if self._scaler is None else self._scaler.scale
        started = self.groups.start_updates(self._trained.takes_part, loss_scale=loss_scale)
        self._trained.end_step()
        if self._scaler is not None:
            self._scaler.update(overflow=started.is_skipped)
            self._scaler.publish(self.optimizer, overflow=started.is_skipped)
        if started.is_skipped:
            self.zero_grad()
            norm = None if started.norm is None else float(started.norm)
            return StepOutcome(applied=False, grad_norm=norm, advance_schedule=False)
        report = StepReport()
        rates = partial(self._trained.rates, step=self._num_steps)
        report.on_device = self.groups.device_adam.step(rates, factor=started.factor)
        for group in self.groups.on_host:
            if group.phase is GroupPhase.UPDATING:
                assert group.job is not None
                report.add_job(group.job)
                group.commit(self._trained.rates(group.matrices, self._num_steps))
        self._pending.after_step()
        self._num_steps += 1
        if self.settings.schedule == "sync":
            self.apply_pending_updates()
        self._adopt_candidates()
        self.groups.prefetch()
        self._calibration.report()
        self.blocks.fill_device()
        return report.outcome(started.norm)

    def _adopt_candidates(self) -> None:
        """Replaces projectors by the candidates that this step's gradients have tested."""
        if not any(matrix.candidate is not None and matrix.candidate.gain is not None for matrix in self._matrices):
            return
        self.apply_pending_updates()  # pending directions belong to the present projectors
        for matrix, moments in self.groups.matrices_and_moments():
            if matrix.candidate is not None and matrix.candidate.gain is not None:
                adopt(matrix, moments)
        self._passes.held_gradients.launch_cache.clear()

    def zero_grad(self) -> None:
        self.groups.undo_updates()
        self._passes.held_gradients.clear()
        for matrix in self._matrices:
            matrix.clear()
        self.module.zero_grad(set_to_none=True)

    def _check_left_gradients(self) -> None:
        """Finds whole gradients that a script has dropped by `p.grad = None`. If it has dropped all of them, the
        projected sums, which it cannot reach, are cleared too. Raises if the script has changed some."""
        summing = [group.matrices for group in self.groups.on_host if group.phase is GroupPhase.SUMMING]
        summing += [group.matrices for group in self.groups.on_device]
        whole = [matrix for matrices in summing for matrix in matrices if matrix.has_total and matrix.total is None]
        if (changed := next((matrix for matrix in whole if matrix.has_changed_gradient), None)) is not None:
            raise ValueError(
                "LSP takes most gradients inside the backward pass, so a script's change of p.grad would reach some "
                f"parameters only, got a changed gradient of {changed.name}: set gradient_clipping in the JSON, scale "
                "the loss, or drop all gradients by engine.zero_grad()"
            )
        dropped = [matrix for matrix in whole if matrix.whole_gradient is None]
        if dropped and len(dropped) == len(whole):
            self.zero_grad()
        for matrix in dropped:
            matrix.clear()

    # Saving, loading, describing

    @property
    def num_projected(self) -> int:
        """Number of matrices whose gradients are projected."""
        return sum(matrix.subspace is not None for matrix in self._matrices)

    @property
    def biases(self) -> dict[str, float]:
        """By matrix: the relative bias of its projectors on the gradient that they were last tested with."""
        return dict(self._calibration.biases)

    @property
    def fit_s(self) -> float:
        """Seconds spent on fitting projectors since the engine was made."""
        return self._calibration.fit_s

    def state_dict(self) -> dict[str, Any]:
        """The state of a checkpoint. From ZeRO stage 1 on, only ranks that write may call this, after `rank_state`."""
        self.apply_pending_updates()
        self.groups.undo_updates()
        matrices = matrix_states(self.groups.matrices_and_moments(), gathered=self._states_of_other_ranks)
        calibration = self._calibration.state_dict()
        scaler = None if self._scaler is None else self._scaler.state_dict()
        own = {"step": self._num_steps, "calibration": calibration, "scaler": scaler}
        return {**own, "layout": LAYOUT, "matrices": matrices}

    def check_state(self, state: Mapping[str, Any]) -> None:
        check_matrix_states(self.groups.matrices_and_moments(), saved_matrices(state))
        int(state["step"]), int(state["calibration"]["checked_step"])
        if state.get("scaler") is not None:
            [float(state["scaler"][name]) for name in ("scale", "num_clean", "overflows_left")]

    def load_state_dict(self, state: Mapping[str, Any], *, load_optimizer_states: bool = True) -> None:
        self.apply_pending_updates()
        self.zero_grad()
        saved = saved_matrices(state) if load_optimizer_states else {}
        self._num_steps = int(state["step"]) if load_optimizer_states else 0
        self._calibration.load_state_dict(state["calibration"] if load_optimizer_states else None)
        if self._scaler is not None:
            self._scaler.restart()
            if load_optimizer_states and state.get("scaler") is not None:
                self._scaler.load_state_dict(state["scaler"])
            self._scaler.publish(self.optimizer, overflow=False)
        load_matrix_states(self.groups.matrices_and_moments(), saved, settings=self.settings, device=self.device)

    def rank_state(self) -> dict[str, Any]:
        self.groups.undo_updates()
        self._check_left_gradients()
        self._passes.held_gradients.compress()
        if self.ranks is not None:
            self.apply_pending_updates()
            owned = [group for group in self.groups.on_host if isinstance(group, SharedHostGroup)]
            self._states_of_other_ranks = gather_owned_states(
                owned, self.ranks, keeps=self.is_writer, has_several_writers=self.has_several_writers
            )
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
        return self.groups.footprint()

    def describe(self) -> str:
        footprint = ", ".join(f"{key} {value:,}" for key, value in self.footprint().items())
        return "\n".join([*self.blocks.describe(), f"ds_zo: {self._settings_text()}; besides weights {footprint}"])

    def startup_summary(self) -> StartupSummary:
        base = self.blocks.startup_summary()
        footprint, ranks = self.footprint(), self.ranks
        return replace(
            base,
            settings=self._settings_text(),
            device_bytes={**base.device_bytes, "projectors and states": footprint["device_bytes"]},
            host_bytes={**base.host_bytes, **nonzero({"states": footprint["host_bytes"]})},
            pinned_bytes=base.pinned_bytes + self.groups.store.pinned_nbytes,
            ranks=None if ranks is None else ranks_text(self._matrices, ranks.size, owned=self.groups.has_owners),
        )

    def _settings_text(self) -> str:
        return settings_text(self._matrices, self.settings, on_host=bool(self.groups.on_host))

    def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        # When the garbage collector frees the engine, it runs `_finalizer` and clears weak references before this call.
        # The Adam thread has finished its jobs then, but other ranks cannot be reached. At interpreter shutdown no one
        # uses the module, and PyTorch aborts if a finalizer creates tensors.
        applies_pending = (self.ranks is None or self._finalizer.alive) and not sys.is_finalizing()
        self._pending_update.apply = self._apply_pending_to_unit
        applies_pending &= self.weights_by_name.owns_module()
        with ExitStack() as stack:  # runs all callbacks, the last first, also if a failed job raises below
            stack.callback(self.groups.close)
            stack.callback(self.weights_by_name.close)
            stack.callback(self.blocks.close)
            for handle in self._pending.handles:
                stack.callback(handle.remove)
            stack.callback(self._finalizer)
            if applies_pending:
                self.apply_pending_updates()


def _check_dtypes(module: nn.Module) -> None:
    """Refuses float16 weights without loss scaling: without a dtype in the JSON, a model keeps its checkpoint's."""
    for name, p in module.named_parameters():
        if p.requires_grad and p.is_floating_point() and p.dtype not in (torch.float32, torch.bfloat16):
            raise ConfigError(
                f"LSP trains float16 weights with the loss scaling of the section fp16 only, got parameter {name} in "
                f'{p.dtype} and a JSON that names no dtype: add "fp16": {{"enabled": true}} or "bf16": '
                '{"enabled": true}, or call model.float()',
                at="fp16.enabled",
            )


def _end_threads(ranks: CollectiveThread | None, queue: UpdateQueue) -> None:
    """Ends the collective thread before the Adam thread, because a collective call may wait for an Adam job."""
    if ranks is not None:
        ranks.close()
    queue.close()
