"""LSP: Adam in a subspace. Each matrix's gradient is projected to d x d as soon as it is there and dropped; the d x d
sum travels to the CPU, Adam's direction comes back, and the weights move by P D Q^T.

What trains how: [Note: what trains how] in `lsp_matrices`. A layer's trip to the CPU: `lsp_jobs`; among several ranks:
`lsp_shared`. Blocks that are not on the device: `lsp_streamed`. When projectors are fitted: `lsp_calibration`. What
checkpoints hold: `lsp_state`.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from deepspeed.utils import logger
from torch import nn
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakTensorKeyDictionary

from ds_zo.backends.common.backend import Backend, StepOutcome
from ds_zo.backends.common.param_groups import ParamGroupIndex
from ds_zo.backends.common.stray_weights import used_outside
from ds_zo.backends.common.weak_hooks import weakly
from ds_zo.backends.lsp.calibration import Calibration, adopt
from ds_zo.backends.lsp.groups import LSPGroups
from ds_zo.backends.lsp.host_group import GroupPhase, HostGroup
from ds_zo.backends.lsp.lagging_blocks import LaggingBlocks
from ds_zo.backends.lsp.matrices import (
    Group,
    MatrixState,
    apart_from_visitors,
    find_slots,
    group_slots,
    owners,
)
from ds_zo.backends.lsp.products import HeldGradients, Rate, compress_slots
from ds_zo.backends.lsp.ranks import BackwardOrder, CollectiveThread
from ds_zo.backends.lsp.report import BackwardClock, StepReport, describe_ranks, describe_slots
from ds_zo.backends.lsp.scheduler import UpdateQueue
from ds_zo.backends.lsp.shared_groups import SharedDeviceGroup, SharedHostGroup
from ds_zo.backends.lsp.state import (
    LAYOUT,
    check_layout,
    check_slot_states,
    gather_owned,
    load_slot_states,
    slot_states,
)
from ds_zo.backends.lsp.streamed import StreamedBlocks, without_caches
from ds_zo.backends.lsp.weights import SettledState
from ds_zo.backends.recompute.blocks import refuse_router_logits
from ds_zo.backends.recompute.compiled_blocks import BlockCompiler
from ds_zo.config import ConfigError, LSPParams, Resolved
from ds_zo.optim.subspace_adam import NORM_FLOOR
from ds_zo.streaming.blocks import find_blocks
from ds_zo.streaming.units import Unit

_STEPS_BETWEEN_WALKS = 20

_hooks: Any = WeakTensorKeyDictionary()
"""The handle on each parameter: a second engine for the same module takes the place of the first."""
_reachable: weakref.WeakKeyDictionary[nn.Module, list[RemovableHandle]] = weakref.WeakKeyDictionary()
"""The handles of a module's last engine. Of one that only a dropped engine has, the collector clears the reference to
the hooks before the engine could remove its own."""


class LSPBackend(Backend):
    name: ClassVar[str] = "lsp"

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
        """Trips begin inside the backward pass."""
        self._num_steps = 0
        self._gathered: dict[str, dict[str, Any]] = {}
        """Other ranks' states, as they were when a checkpoint was last asked for."""
        self._in_backward = self._in_last_backward = False
        """Of this engine's: a gradient may come of a bare `loss.backward()`, or of another engine's loss."""
        self._membership = ParamGroupIndex()
        self._calibration = Calibration(self.settings, ranks=self.ranks)
        self._held = HeldGradients()
        self._clock = BackwardClock(device)
        self._compiler = BlockCompiler() if config.section.compile_blocks else None
        _check_dtypes(module)
        self._tell_ignored()
        self._streamed = self._stream() if self.places_parameters(config) else None
        if self._compiler is not None and self._streamed is None:
            self._compiler.install(find_blocks(module, config.section.stream.blocks).values())
        self._slots = find_slots(module, self.settings, device=device)
        self._known = {id(slot.parameter) for slot in self._slots}
        self._frozen = [(name, p) for name, p in module.named_parameters() if id(p) not in self._known]
        groups = group_slots(module, self._slots, config.section.stream.blocks)
        if self._streamed is not None:
            groups = apart_from_visitors(groups, self._streamed.unit_of)
        self._groups = LSPGroups(
            groups,
            self.settings,
            config=config,
            ranks=self.ranks,
            device=device,
            max_norm=0.0 if self._clips_globally else config.gradient_clipping,
            unit_of={} if self._streamed is None else self._streamed.unit_of,
        )
        self._host_groups, self._device_groups = self._groups.on_host, self._groups.on_device
        self._queue = self._groups.queue
        self._turns: BackwardOrder | None = None
        if self.ranks is not None:
            matrices = [[slot for slot in group.slots if slot.parameter.ndim >= 2] for group in groups]
            self._turn_groups = [found for found in matrices if found]
            self._turns = BackwardOrder(self._turn_groups, weakly(self._take_turn))
        self._looks_together = False
        """Several ranks look at the gradients of this backward pass together, a layer at a time."""
        self._group_of_unit = {id(group.unit): group for group in self._host_groups if group.unit is not None}
        self._host_group_of = {id(slot): group for group in self._host_groups for slot in group.slots}
        self._late: set[int] = set()
        """Groups that were brought up to date only when the present backward began, by id."""
        self._lags = LaggingBlocks(
            [group for group in self._host_groups if group.is_block and group.unit is None],
            watches=self.settings.schedule == "layerwise",
            on_stray=weakly(self._hook_inside),
        )
        self._checked = False
        """A forward was watched for weights of streamed blocks that are used where they are not brought up."""
        self._handles = [self._hook(slot) for slot in self._slots] + self._hook_modules(groups)
        _reachable[module] = self._handles
        self._weights: SettledState | None = None
        if self._streamed is None:
            self._weights = SettledState(
                module, weakly(self.settle), lags=weakly(self._has_lagging_weights), device=device
            )
        self._finalizer = weakref.finalize(self, _end_threads, self.ranks, self._queue)
        self._is_closed = False
        self._membership.follow(self.param_groups)

    @classmethod
    def places_parameters(cls, config: Resolved) -> bool:
        several = dist.is_initialized() and dist.get_world_size() > 1
        if config.stream and several:
            raise ConfigError(
                "LSP streams weights on one rank, got offload_param.device "
                f'"cpu" on {dist.get_world_size()}: remove offload_param, or train on one rank',
                at="zero_optimization.offload_param.device",
            )
        if config.stream and not config.offload_optimizer:
            raise ConfigError(
                'LSP with weights on the host has its Adam there too, got offload_param.device "cpu" without '
                'offload_optimizer: add "offload_optimizer": {"device": "cpu"}, or remove offload_param',
                at="zero_optimization.offload_optimizer.device",
            )
        if torch.float16 in (config.dtype, config.autocast):
            raise ConfigError(
                "LSP does not scale losses, which fp16 needs, got fp16: use bf16, whose range needs no scaling",
                at="fp16.enabled" if config.dtype is torch.float16 else "torch_autocast.dtype",
            )
        return config.stream

    # Parameters

    def _stream(self) -> StreamedBlocks:
        return StreamedBlocks(
            self.module,
            self.config,
            param_groups=self.param_groups,
            device=self.device,
            settle=weakly(self._settle_unit),
            settle_all=weakly(self.settle),
            ended=weakly(self._end_visit),
            compiler=self._compiler,
        )

    def _hook(self, slot: MatrixState) -> RemovableHandle:
        p = slot.parameter
        if p in _hooks:
            _hooks.pop(p).remove()
        handle = p.register_post_accumulate_grad_hook(weakly(self._arrived, slot))
        _hooks[p] = handle
        return handle

    def _hook_modules(self, groups: list[Group]) -> list[RemovableHandle]:
        """Weights that lag are brought up to date before anybody uses or copies them. The root does so for all but
        blocks that are seen to be called whole: elsewhere a weight may be used without its module being called."""
        by_name = {group.name: (i, group) for i, group in enumerate(self._host_groups)}
        handles: list[RemovableHandle] = []
        for group in groups:
            if group.name in by_name and by_name[group.name][1].unit is None:
                index, _ = by_name[group.name]
                for owner in group.modules:
                    handles.append(owner.register_forward_pre_hook(weakly(self._enter, index)))
        if self._host_groups:
            handles.append(self.module.register_forward_pre_hook(weakly(self._settle_for, None)))
        lagging = {id(slot.parameter) for group in self._host_groups for slot in group.slots}
        for m in self.module.modules():  # a submodule's state is read without the whole model's
            if any(id(p) in lagging for p in m._parameters.values()):
                handles.append(m.register_state_dict_pre_hook(weakly(self._settle_all)))
                handles.append(m.register_load_state_dict_pre_hook(weakly(self._settle_all)))
        return handles

    def _hook_inside(self, group: HostGroup) -> None:
        """A part of the model may be run by itself, and the block in it is not called."""
        index = self._host_groups.index(group)
        for owner in {owner for slot in group.slots for owner in owners(self.module, slot.parameter)}:
            self._handles.append(owner.register_forward_pre_hook(weakly(self._enter, index)))

    def _tell_ignored(self) -> None:
        """Of an optimizer object's groups, rates and decays are read at every step, and nothing else."""
        for key in ("betas", "eps"):
            own = getattr(self.settings, key)
            found = [group[key] for group in self.param_groups if key in group]
            others = {str(tuple(value) if isinstance(value, list) else value) for value in found} - {str(own)}
            if others:
                shown = ", ".join(sorted(others))
                logger.warning(
                    f"ds_zo: LSP's Adam takes {key} {own}, not the optimizer's {shown}: write {key} to "
                    f"{self.config.params_at}.{key}"
                )

    def _trains(self, slot: MatrixState) -> bool:
        return slot.parameter.requires_grad and slot.parameter in self._membership

    def _check_parameters(self) -> None:
        """Frozen ones at every forward pass, all others now and then: to walk a model takes a millisecond."""
        others = self._frozen
        if self._num_steps % _STEPS_BETWEEN_WALKS == 0:
            others = [(name, p) for name, p in self.module.named_parameters() if id(p) not in self._known]
        for name, p in others:
            if p.requires_grad and p.numel() and p.is_floating_point():
                raise ValueError(
                    f"parameter {name} was not trainable when deepspeed.initialize saw the model, so LSP has no "
                    "subspace for it: call requires_grad_(True), add or replace parameters before deepspeed.initialize"
                )

    # Weights that lag

    def settle(self) -> None:
        """Brings every weight to the last step, where the layer-wise schedule let it lag until its next use."""
        for index, group in enumerate(self._host_groups):
            if group.moment is GroupPhase.DUE:
                self._settle_for(index)

    def _has_lagging_weights(self) -> bool:
        return any(group.moment is GroupPhase.DUE for group in self._host_groups)

    def _at_work(self) -> AbstractContextManager[None]:
        state = self._weights if self._streamed is None else self._streamed.state
        assert state is not None
        return state.unwatched()

    def _enter(self, index: int, *hooked: Any) -> None:
        self._lags.entered.add(id(self._host_groups[index]))
        self._settle_for(index)

    def _settle_all(self, *hooked: Any) -> None:
        self.settle()

    @torch.inference_mode(False)
    def _settle_for(self, index: int | None, *hooked: Any) -> None:
        """Before group `index` is used; None: before a forward pass of the whole module. What training goes on with
        must not be made in an evaluation's inference mode."""
        if index is not None:
            group = self._host_groups[index]
            if group.moment is GroupPhase.DUE and group.unit is not None and self._streamed is not None:
                self._streamed.bring_up_to_date(group.unit)
            elif group.moment is GroupPhase.DUE:
                group.settle()
                self._groups.prefetch()
            return
        for group in self._host_groups:
            if group.unit is None and not self._lags.waits_for_module(group):
                group.settle()
        self._groups.prefetch()

    def _settle_unit(self, unit: Unit) -> bool:
        """A visit has brought it to the device. True: its weights have changed."""
        group = self._group_of_unit.get(id(unit))
        if group is None or group.moment is not GroupPhase.DUE:
            return False
        group.settle()
        self._groups.prefetch()
        return True

    # forward and backward

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """In evaluation mode too a backward may follow: models are loaded in it, and need not be put in another."""
        with self._at_work():
            return self._forward(*args, **kwargs)

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self.module(*args, **kwargs)
        if self._streamed is not None:
            refuse_router_logits(self.module, kwargs)
        if self.module.training:
            self._check_parameters()
            if self._streamed is not None:
                due = [g.unit for g in self._host_groups if g.unit is not None and g.moment is GroupPhase.DUE]
                with self._streamed.forward_pass(due):
                    return self._run(*args, **kwargs)
        if self._streamed is None and self._compiler is None:
            return self._run(*args, **kwargs)
        with without_caches(self.module):
            return self._run(*args, **kwargs)

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        streamed = None if self._streamed is None or self._checked else self._streamed.block_store
        with (
            nullcontext() if streamed is None else streamed.strays_refused(),
            self._lags.watched(self.module),
        ):
            output = self.module(*args, **kwargs)
        self._checked = True
        return output

    def backward(self, loss: torch.Tensor, *, retain_graph: bool = False) -> None:
        with self._at_work():
            self._backward(loss, retain_graph=retain_graph)

    def _backward(self, loss: torch.Tensor, *, retain_graph: bool) -> None:
        self._late = {id(group) for group in self._host_groups if group.moment is GroupPhase.DUE and group.unit is None}
        self.settle()  # layers that this forward pass did not use
        self._heed_zero_grad()
        self._membership.follow(self.param_groups)
        self._calibration.begin_backward(self._num_steps, [slot for slot in self._slots if self._trains(slot)])
        for group in self._host_groups:
            group.num_expected = sum(self._trains(slot) for slot in group.slots)
            group.num_arrived = 0
        self._in_last_backward = self.is_last_micro_batch
        self._queue.last_first = False
        if self._turns is not None:
            self._begin_turns(self._turns)
        self._clock.begin()
        streamed = self._streamed
        try:
            self._in_backward = True
            with nullcontext() if streamed is None else streamed.backward_pass(retain_graph=retain_graph):
                loss.backward(retain_graph=retain_graph)
            self._held.compress()
            if self._turns is not None:
                self._turns.finish()
        except RuntimeError as error:
            if self._late and "modified by an inplace operation" in str(error):
                names = [group.name for group in self._host_groups if id(group) in self._late]
                raise _used_late(f"one of {', '.join(names)}") from error
            raise
        finally:
            self._in_backward = self._in_last_backward = self._looks_together = False
            self._late = set()
            self._held.forget()
        self._clock.end()

    def _arrived(self, slot: MatrixState, hooked: torch.Tensor) -> None:
        """One parameter's gradient is complete."""
        p, grad = slot.parameter, slot.parameter.grad
        if grad is None or p not in self._membership:
            p.grad = None
            return
        if slot.comes_and_goes:
            self._check_visited(slot)
        group = self._host_group_of.get(id(slot))
        if self._late and id(group) in self._late:
            p.grad = None
            raise _used_late(slot.name)
        if group is not None and group.moment is not GroupPhase.SUMMING:
            self._came_again(group, slot)
            grad = p.grad
            assert grad is not None
        if grad.is_sparse:
            grad = p.grad = grad.to_dense()
        if slot.subspace is None:
            slot.has_total = True
            if slot.kept is not None:
                p.grad, slot.kept = slot.kept.add_(grad), None
        elif not self._looks_together or self._turns is None or self._turns.is_over(slot):
            self._take_in(slot, grad)
        if self._turns is not None:
            if p.ndim >= 2 and self._in_backward:
                self._turns.arrived(slot)
        elif group is not None:
            group.num_arrived += 1
            if group.num_arrived >= group.num_expected and group.unit is None:
                self._held.compress()
                if self._in_last_backward and self._starts_early and group.num_arrived == group.num_expected:
                    self._start_early(group)

    def _check_visited(self, slot: MatrixState) -> None:
        assert self._streamed is not None
        if not self._streamed.block_store.is_materialised(self._streamed.unit_of[id(slot.parameter)]):
            slot.parameter.grad = None
            raise used_outside(slot.name)

    @torch.no_grad()
    def _end_visit(self, unit: Unit, more_to_come: bool) -> None:
        """Nothing of a block's gradients may stay in its parameters, which are about to leave."""
        self._held.compress()
        group = self._group_of_unit.get(id(unit))
        if group is None:
            return
        starts = self._in_last_backward and self._starts_early and not more_to_come
        if starts and group.moment is GroupPhase.SUMMING and any(slot.has_total for slot in group.slots):
            self._start_early(group)
        for slot in group.slots:
            if slot.parameter.grad is not None:
                slot.kept, slot.parameter.grad = slot.parameter.grad, None

    def _take_in(self, slot: MatrixState, grad: torch.Tensor) -> None:
        if not self._calibration.wants(slot):
            self._held.add(slot)
            return
        if self.ranks is not None and not self._in_backward:
            slot.parameter.grad = None
            raise RuntimeError(
                f"several ranks fit the projectors of {slot.name} in one order, which engine.backward(loss) keeps, got "
                "its first gradient from another backward pass: call engine.backward(loss) instead of loss.backward(), "
                "or freeze this model (requires_grad_(False)) while another engine's loss passes through it"
            )
        compress_slots([slot])
        self._calibration.look(slot, grad)

    def _came_again(self, group: HostGroup, slot: MatrixState) -> None:
        """See [Note: taken back]."""
        if group.moment is GroupPhase.DUE:
            group.settle()
            return
        if self.ranks is not None:
            raise RuntimeError(
                f"a gradient of {slot.name} came after its layer's had gone to the other ranks, as reentrant "
                'checkpointing of a shared weight makes them: use "schedule": "sync" (optimizer.params.schedule), or '
                "use_reentrant=False"
            )
        p = slot.parameter
        arrived, p.grad = p.grad, None
        assert arrived is not None
        group.take_back()
        restored: torch.Tensor | None = p.grad
        p.grad = arrived if restored is None else restored.add_(arrived)
        self._start_late(slot.name)

    def _start_late(self, name: str) -> None:
        if self._starts_early:
            self._starts_early = False
            logger.warning(
                f"ds_zo: gradients of {name} came after its layer's work had begun (several backward passes a step, or "
                "reentrant checkpointing of a shared weight): from now on work begins in step()"
            )

    def _start_early(self, group: HostGroup) -> None:
        self._queue.last_first = self._host_groups.index(group) <= self._clock.transition(self._host_groups)
        self._start(group)

    def _start(self, group: HostGroup, *, goes_on: bool = True) -> None:
        if isinstance(group, SharedHostGroup):
            group.start(trained=[self._trains(slot) for slot in group.slots], goes_on=goes_on)
        else:
            group.start()

    # Several ranks: [Note: one order]

    def _begin_turns(self, turns: BackwardOrder) -> None:
        if any(group.moment is GroupPhase.UPDATING for group in self._host_groups):
            self._groups.take_back()  # on all ranks, whatever their batches use
            self._start_late(self._host_groups[-1].name)
        turns.begin(self._trains)
        self._looks_together = any(self._calibration.wants(slot) for slot in self._slots if self._trains(slot))

    @torch.no_grad()
    def _take_turn(self, index: int) -> None:
        """All gradients that this rank will have of a layer are here."""
        slots = self._turn_groups[index]
        self._held.compress()
        if self._looks_together:
            self._look_together([slot for slot in slots if slot.subspace is not None and self._trains(slot)])
        group = self._host_group_of.get(id(slots[0]))
        if group is not None and group.num_expected and self._in_last_backward and self._starts_early:
            self._start_early(group)

    def _look_together(self, slots: list[MatrixState]) -> None:
        assert self.ranks is not None
        if not slots:
            return
        has = torch.tensor([float(slot.parameter.grad is not None) for slot in slots], device=self.device)
        for slot, share in zip(slots, self.ranks.average(has).tolist(), strict=True):
            grad = slot.parameter.grad
            wants = self._calibration.wants(slot) and share > 0
            mean = None
            if wants:
                mean = self.ranks.average(torch.zeros_like(slot.parameter) if grad is None else grad)
            if grad is not None:
                compress_slots([slot])
            if mean is not None:
                self._calibration.look(slot, mean)

    # step

    def step(self) -> StepOutcome:
        with self._at_work():
            return self._step()

    def _step(self) -> StepOutcome:
        self.settle()  # for a backward pass that was not this engine's; what that left is compressed below
        self._heed_zero_grad()
        self._membership.follow(self.param_groups)
        self._held.compress()
        self._gathered = {}
        global_norm = self._begin_shared_step() if self.ranks is not None else self._begin_step()
        report = StepReport()
        for device_group in self._device_groups:
            report.add_device(device_group.step(self._rates(device_group.slots)))
        for group in self._host_groups:
            if group.moment is GroupPhase.UPDATING:
                assert group.job is not None
                report.add_job(group.job)
                group.commit(self._rates(group.slots))
        self._lags.step_made()
        self._num_steps += 1
        if self.settings.schedule == "sync":
            self.settle()
        if any(slot.candidate is not None and slot.candidate.gain is not None for slot in self._slots):
            self._adopt()
        self._groups.prefetch()
        self._calibration.report()
        if self._streamed is not None:
            self._streamed.block_store.fill_device()
        return report.outcome(global_norm)

    def _rates(self, slots: list[MatrixState]) -> list[Rate | None]:
        """None: it is in no group."""
        found: dict[int, Rate] = {}
        groups = [self._membership.get(slot.parameter) for slot in slots]
        for group in groups:
            if group is not None and id(group) not in found:
                lr, weight_decay = float(group["lr"]), float(group.get("weight_decay", 0.0))
                found[id(group)] = Rate(lr, weight_decay, self._num_steps, self._stochastic)
        return [None if group is None else found[id(group)] for group in groups]

    def _begin_step(self) -> torch.Tensor | None:
        """Starts what the backward pass did not; the norm, where it is clipped globally."""
        norm = None
        if self._clips_globally:
            norm = self._clip_globally({id(slot): slot.gradient for slot in self._slots if slot.has_total})
        for group in self._host_groups:  # in the order of the next forward pass
            if group.moment is GroupPhase.SUMMING and any(slot.has_total for slot in group.slots):
                group.start()
        return norm

    def _begin_shared_step(self) -> torch.Tensor | None:
        """The same for several ranks, all of which start the same groups."""
        for device_group in self._device_groups:
            assert isinstance(device_group, SharedDeviceGroup)
            device_group.start(trained=[self._trains(slot) for slot in device_group.slots])
        late = []
        for group in self._host_groups:
            assert isinstance(group, SharedHostGroup)
            if group.moment is GroupPhase.SUMMING and any(self._trains(slot) for slot in group.slots):
                self._start(group, goes_on=not self._clips_globally)
                late.append(group)
        grads: dict[int, torch.Tensor] = {}
        for device_group in self._device_groups:
            assert isinstance(device_group, SharedDeviceGroup)
            device_group.finish()
            grads |= {id(slot): slot.gradient for slot in device_group.slots if slot.has_total}
        if not self._clips_globally:
            return None
        for group in late:
            grads |= group.averages()
        norm = self._clip_globally(grads)
        for group in late:
            group.update()
        return norm

    @torch.no_grad()
    def _clip_globally(self, found: dict[int, torch.Tensor]) -> torch.Tensor | None:
        """Gradients by slot. A norm each, in the model's order: so any number of ranks adds up the same numbers. One
        that is not finite poisons all of them, which skips the step."""
        grads = [found[id(slot)] for slot in self._slots if id(slot) in found]
        if not grads:
            return None
        norm = torch.stack(torch._foreach_norm(grads, dtype=torch.float32)).norm()
        coef = (self.config.gradient_clipping / (norm + NORM_FLOOR)).clamp_(max=1.0)
        torch._foreach_mul_(grads, torch.where(norm.isfinite(), coef, torch.nan))
        return norm

    def _adopt(self) -> None:
        self.settle()  # with the projectors that its directions belong to
        for slot, moments, carries in self._groups.kept():
            if slot.candidate is not None and slot.candidate.gain is not None:
                adopt(slot, moments, list(carries.values()))
        self._held.prepared.clear()

    def zero_grad(self) -> None:
        self._groups.take_back()
        self._held.forget()
        for slot in self._slots:
            slot.forget()
        self.module.zero_grad(set_to_none=True)

    def _heed_zero_grad(self) -> None:
        """`zero_grad` of the optimizer or of the module drops whole gradients, but does not reach sums: they go too."""
        waiting = (slot for group in self._device_groups for slot in group.slots if slot.has_total)
        if any(slot.total is None and slot.whole_gradient is None for slot in waiting):
            self.zero_grad()

    # Saving, loading, describing

    @property
    def biases(self) -> dict[str, float]:
        """What the projectors of each matrix lost of the gradient that they were last tested or fitted on."""
        return dict(self._calibration.biases)

    @property
    def fit_s(self) -> float:
        """Spent on fitting projectors, in all."""
        return self._calibration.fit_s

    def state_dict(self) -> dict[str, Any]:
        """Where ranks keep states for one another, on the first of them and after `rank_state`."""
        self.settle()
        self._groups.take_back()
        slots = slot_states(self._groups.kept(), gathered=self._gathered)
        calibration = self._calibration.state_dict()
        return {"step": self._num_steps, "calibration": calibration, "layout": LAYOUT, "slots": slots}

    def check_state(self, state: Mapping[str, Any]) -> None:
        check_layout(state.get("layout", 1))
        check_slot_states(self._groups.kept(), state["slots"])
        int(state["step"]), int(state["calibration"]["checked_step"])

    def load_state_dict(self, state: Mapping[str, Any], *, load_optimizer_states: bool = True) -> None:
        self.settle()
        self.zero_grad()
        kept = state["slots"] if load_optimizer_states else {}
        self._num_steps = int(state["step"]) if load_optimizer_states else 0
        self._calibration.load_state_dict(state["calibration"] if load_optimizer_states else None)
        load_slot_states(self._groups.kept(), kept, settings=self.settings, device=self.device)

    def stored(self) -> dict[str, torch.Tensor]:
        self.settle()
        return super().stored() if self._streamed is None else self._streamed.stored()

    def stored_changed(self) -> None:
        if self._streamed is not None:
            self._streamed.block_store.rewritten()

    def rank_state(self) -> dict[str, Any]:
        self._groups.take_back()
        self._held.compress()
        if self.ranks is not None:
            self.settle()
            owned = [group for group in self._host_groups if isinstance(group, SharedHostGroup)]
            self._gathered = gather_owned(owned, self.ranks)
        return {"totals": {slot.name: slot.gradient.cpu().clone() for slot in self._slots if slot.has_total}}

    def check_rank_state(self, state: Mapping[str, Any]) -> None:
        for slot in self._slots:
            total = state["totals"].get(slot.name)
            if total is not None and slot.total is not None and total.shape != slot.total.shape:
                raise ValueError(f"the sum of {slot.name} has shape {tuple(total.shape)}")

    def load_rank_state(self, state: Mapping[str, Any]) -> None:
        for slot in self._slots:
            slot.forget()
            if (total := state["totals"].get(slot.name)) is not None:
                slot.has_total = True
                if slot.total is not None:
                    slot.total.copy_(total)
                else:
                    slot.put_back(total.clone(), device=self.device)

    def footprint(self) -> dict[str, int]:
        return self._groups.footprint(self._slots)

    def describe(self) -> str:
        lines = [] if self._streamed is None else [self._streamed.block_store.describe()]
        lines += describe_slots(self._slots, self.settings, on_host=bool(self._host_groups), **self.footprint())
        if self.ranks is not None:
            owned = bool(self._host_groups) and self.config.zero_stage > 0
            lines.append(describe_ranks(self._slots, num_ranks=self.ranks.size, owned=owned))
        return "\n".join(lines)

    def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        # The collector ends threads, and clears what refers to us weakly, before it comes to the engine that calls
        # this. The thread has done its jobs then; other ranks are no longer to be reached. At the interpreter's end
        # nobody has the module, and PyTorch aborts on tensors made in a finalizer.
        settles = (self.ranks is None or self._finalizer.alive) and not sys.is_finalizing()
        if self._streamed is not None:
            self._streamed.settle_by(self._settle_unit)
            settles &= self._streamed.state.owns_module()
        with ExitStack() as stack:  # the last first, and all of them: `settle` raises what a job has failed with
            stack.callback(self._groups.close)
            for part in (self._weights, self._streamed, self._compiler):
                if part is not None:
                    stack.callback(part.close)
            for handle in self._handles:
                stack.callback(handle.remove)
            stack.callback(self._finalizer)
            if settles:
                self.settle()


def _check_dtypes(module: nn.Module) -> None:
    """A model comes in its checkpoint's dtype where the JSON names none."""
    for name, p in module.named_parameters():
        if p.requires_grad and p.is_floating_point() and p.dtype not in (torch.float32, torch.bfloat16):
            raise ConfigError(
                f"LSP trains float32 and bfloat16 (it does not scale losses, which fp16 needs), got parameter {name} "
                f'in {p.dtype} and a JSON that names no dtype: add "bf16": {{"enabled": true}}, or call model.float()',
                at="bf16.enabled",
            )


def _used_late(names: str) -> ValueError:
    """Earlier forwards called the block, so its update waited for the next call."""
    return ValueError(
        f"weights take the last step's update when their block is called, got a gradient of {names}, used before that: "
        "call the block, not the modules in it, and take the loss of a forward made after the last step; or set "
        '"schedule": "sync" (optimizer.params.schedule)'
    )


def _end_threads(ranks: CollectiveThread | None, queue: UpdateQueue) -> None:
    """In this order: what is on its way to other ranks may wait for Adam."""
    if ranks is not None:
        ranks.close()
    queue.close()
