"""LSP: Adam in a subspace. Each matrix's gradient is projected to d x d as soon as it is there and dropped; the d x d
sum travels to the CPU, Adam's direction comes back, and the weights move by P D Q^T.

What trains how: [Note: what trains how] in `lsp_matrices`. A layer's trip to the CPU: `lsp_jobs`. When projectors are
fitted: `lsp_calibration`.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from functools import partial
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from deepspeed.utils import logger
from torch import nn
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakTensorKeyDictionary

from ds_zo.checkpoint.errors import CheckpointError
from ds_zo.config import ConfigError, LSPParams, Resolved
from ds_zo.engines.base import Backend, StepOutcome
from ds_zo.engines.lsp_calibration import Calibration, adopt
from ds_zo.engines.lsp_jobs import DeviceGroup, HostGroup, Links, Moment, Rate, Scratch
from ds_zo.engines.lsp_matrices import Group, Slot, Subspace, find_slots, first_projectors, group_slots
from ds_zo.engines.lsp_payload import Carry
from ds_zo.engines.lsp_queue import UpdateQueue
from ds_zo.engines.lsp_report import BackwardClock, StepReport
from ds_zo.optim.subspace_adam import NORM_FLOOR, Moments
from ds_zo.projectors import compress
from ds_zo.streaming.host_store import HostStore

_CORES_LEFT_TO_PYTHON = 2

_hooks: Any = WeakTensorKeyDictionary()
"""The handle on each parameter: a second engine for the same module takes the place of the first."""


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
        self._world_size = dist.get_world_size(process_group) if dist.is_initialized() else 1
        self._clips_globally = config.gradient_clipping > 0 and self.settings.clip_scope == "global"
        self._starts_early = (
            self.settings.schedule == "layerwise" and self._world_size == 1 and not self._clips_globally
        )
        """Trips begin inside the backward pass. Not with several ranks: they would have to agree on an order, and a
        layer that one of them does not use would keep the others waiting."""
        self._num_steps = 0
        self._in_last_backward = False
        self._group_of: dict[int, dict[str, Any]] = {}
        self._group_sizes: list[int] = []
        self._calibration = Calibration(self.settings, process_group=process_group, world_size=self._world_size)
        self._clock = BackwardClock(device)
        self._slots = find_slots(module, self.settings, device=device)
        groups = group_slots(module, self._slots, config.section.stream.blocks)
        self._store = HostStore(device, pin=True)
        self._links: Links | None = None
        self._queue = UpdateQueue(num_threads=_num_threads(device))
        self._place(groups)
        self._host_group_of = {id(slot): group for group in self._host_groups for slot in group.slots}
        self._handles = [self._hook(slot) for slot in self._slots] + self._hook_modules(groups)
        self._finalizer = weakref.finalize(self, self._queue.close)
        self._find_groups()

    @classmethod
    def places_parameters(cls, config: Resolved) -> bool:
        if config.stream:
            raise ConfigError(
                'LSP keeps the weights on the device, got offload_param.device "cpu": remove offload_param, or name '
                "ZO, which streams",
                at="zero_optimization.offload_param.device",
            )
        if torch.float16 in (config.dtype, config.autocast):
            raise ConfigError(
                "LSP does not scale losses, which fp16 needs, got fp16: use bf16, whose range needs no scaling",
                at="fp16.enabled" if config.dtype is torch.float16 else "torch_autocast.dtype",
            )
        return False

    # Parameters

    def _place(self, groups: list[Group]) -> None:
        """See [Note: what trains how]."""
        max_norm = 0.0 if self._clips_globally else self.config.gradient_clipping
        self._host_groups: list[HostGroup] = []
        self._device_groups: list[DeviceGroup] = []
        scratch = Scratch()
        vectors: list[Slot] = []
        for group in groups:
            matrices = group.slots
            if self.config.offload_optimizer:
                vectors += [slot for slot in group.slots if slot.parameter.ndim < 2]
                matrices = [slot for slot in group.slots if slot.parameter.ndim >= 2]
            if not matrices:
                continue
            group = Group(group.name, group.is_block, matrices, group.modules)
            if self.config.offload_optimizer:
                self._host_groups.append(
                    HostGroup(
                        group,
                        self.settings,
                        device=self.device,
                        store=self._store,
                        queue=self._queue,
                        scratch=scratch,
                        max_norm=max_norm,
                    )
                )
            else:
                self._device_groups.append(DeviceGroup(matrices, self.settings, device=self.device, max_norm=max_norm))
        if vectors:
            self._device_groups.append(DeviceGroup(vectors, self.settings, device=self.device, max_norm=max_norm))
        if self.device.type == "cuda" and self._host_groups:
            self._links = Links(self.device, landing_bytes=max(group.h_up.numel() for group in self._host_groups))
            for host_group in self._host_groups:
                host_group.links = self._links

    def _hook(self, slot: Slot) -> RemovableHandle:
        p = slot.parameter
        if p in _hooks:
            _hooks.pop(p).remove()
        handle = p.register_post_accumulate_grad_hook(partial(_dispatch, weakref.ref(self), slot))
        _hooks[p] = handle
        return handle

    def _hook_modules(self, groups: list[Group]) -> list[RemovableHandle]:
        """Weights that lag are brought up to date before anybody uses or copies them. The root does so for all that is
        outside of blocks, because a weight there may be used without its module being called."""
        by_name = {group.name: (i, group) for i, group in enumerate(self._host_groups)}
        handles: list[RemovableHandle] = []
        for group in groups:
            if group.name in by_name:
                index, _ = by_name[group.name]
                for owner in group.modules:
                    handles.append(owner.register_forward_pre_hook(partial(_settle_hook, weakref.ref(self), index)))
        if self._host_groups:
            handles.append(self.module.register_forward_pre_hook(partial(_settle_hook, weakref.ref(self), None)))
            handles.append(self.module.register_state_dict_pre_hook(partial(_settle_all_hook, weakref.ref(self))))
            handles.append(self.module.register_load_state_dict_pre_hook(partial(_settle_all_hook, weakref.ref(self))))
        return handles

    def _find_groups(self) -> None:
        sizes = [len(group["params"]) for group in self.param_groups]
        if sizes != self._group_sizes:
            self._group_sizes = sizes
            self._group_of = {id(p): group for group in self.param_groups for p in group["params"]}

    def _trains(self, slot: Slot) -> bool:
        return slot.parameter.requires_grad and id(slot.parameter) in self._group_of

    def _check_parameters(self) -> None:
        known = {id(slot.parameter) for slot in self._slots}
        for name, p in self.module.named_parameters():
            if p.requires_grad and id(p) not in known and p.numel() and p.is_floating_point():
                raise ValueError(
                    f"parameter {name} was not trainable when deepspeed.initialize saw the model, so LSP has no "
                    "subspace for it: call requires_grad_(True), add or replace parameters before deepspeed.initialize"
                )

    # Weights that lag

    def settle(self) -> None:
        """Brings every weight to the last step, where the layer-wise schedule let it lag until its next use."""
        for index in range(len(self._host_groups)):
            self._settle_for(index)

    def _settle_for(self, index: int | None) -> None:
        """Before group `index` is used; None: before a forward pass of the whole module."""
        if index is not None:
            group = self._host_groups[index]
            if group.moment is Moment.DUE:
                group.settle()
                self._prefetch()
            return
        for group in self._host_groups:
            if not group.is_block:
                group.settle()
        self._prefetch()

    def _prefetch(self) -> None:
        """Uploads what the forward pass needs next, as far as it is there and has room."""
        for group in self._host_groups:
            if group.moment is Moment.DUE and not group.prefetch():
                return

    # forward and backward

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self.module.training and torch.is_grad_enabled():
            self._check_parameters()
        return self.module(*args, **kwargs)

    def backward(self, loss: torch.Tensor, *, retain_graph: bool = False) -> None:
        self.settle()  # layers that this forward pass did not use
        self._find_groups()
        self._calibration.begin_backward(self._num_steps)
        for group in self._host_groups:
            group.num_expected = sum(self._trains(slot) for slot in group.slots)
            group.num_arrived = 0
        self._in_last_backward = self.is_last_micro_batch
        self._queue.last_first = False
        self._clock.begin()
        try:
            loss.backward(retain_graph=retain_graph)
        finally:
            self._in_last_backward = False
        self._clock.end()

    @torch.no_grad()
    def _arrived(self, slot: Slot) -> None:
        """One parameter's gradient is complete. A projected one's is gone when this returns."""
        p, grad = slot.parameter, slot.parameter.grad
        if grad is None or id(p) not in self._group_of:
            p.grad = None
            return
        group = self._host_group_of.get(id(slot))
        if group is not None and group.moment is not Moment.SUMMING:
            self._came_again(group, slot)
            grad = p.grad
            assert grad is not None
        if grad.is_sparse:
            grad = p.grad = grad.to_dense()
        if slot.subspace is not None:
            assert slot.total is not None
            self._calibration.before_compress(slot, grad)
            compress(grad, slot.subspace.P, slot.subspace.Q, out=slot.total, accumulate=slot.has_total)
            self._calibration.after_compress(slot, grad)
            p.grad = None
        slot.has_total = True
        if group is not None and self._in_last_backward:
            group.num_arrived += 1
            if self._starts_early and group.num_arrived == group.num_expected:
                self._start_early(group)

    def _came_again(self, group: HostGroup, slot: Slot) -> None:
        """See [Note: taken back]."""
        if group.moment is Moment.DUE:
            group.settle()
            return
        p = slot.parameter
        arrived, p.grad = p.grad, None
        assert arrived is not None
        group.take_back()
        restored: torch.Tensor | None = p.grad
        p.grad = arrived if restored is None else restored.add_(arrived)
        if self._starts_early:
            self._starts_early = False
            logger.warning(
                f"ds_zo: a gradient of {slot.name} came after its layer's work had begun (several backward passes a "
                "step, or reentrant checkpointing of a shared weight): from now on work begins in step()"
            )

    def _start_early(self, group: HostGroup) -> None:
        self._queue.last_first = self._host_groups.index(group) <= self._clock.transition(self._host_groups)
        group.start()

    # step

    def step(self) -> StepOutcome:
        self._find_groups()
        if self._world_size > 1:
            self._average_over_ranks()
        global_norm = self._clip_globally() if self._clips_globally else None
        for group in self._host_groups:  # in the order of the next forward pass
            if group.moment is Moment.SUMMING and any(slot.has_total for slot in group.slots):
                group.start()
        report = StepReport()
        for device_group in self._device_groups:
            report.add_device(device_group.step(self._rates(device_group.slots)))
        for group in self._host_groups:
            if group.moment is Moment.UPDATING:
                assert group.job is not None
                report.add_job(group.job)
                group.commit(self._rates(group.slots))
        self._num_steps += 1
        if self.settings.schedule == "sync":
            self.settle()
        if self._calibration.is_over:
            self._adopt()
        self._prefetch()
        self._calibration.report()
        return report.outcome(global_norm)

    def _rates(self, slots: list[Slot]) -> list[Rate | None]:
        rates: list[Rate | None] = []
        for slot in slots:
            group = self._group_of.get(id(slot.parameter))
            if group is None:
                rates.append(None)
                continue
            lr, weight_decay = float(group["lr"]), float(group.get("weight_decay", 0.0))
            rates.append(Rate(lr, weight_decay, self._num_steps, self._stochastic))
        return rates

    @torch.no_grad()
    def _average_over_ranks(self) -> None:
        """Every rank sends every sum, its own or zeros: a parameter may have been used by some of them only."""
        used = torch.tensor([float(slot.has_total) for slot in self._slots], device=self.device)
        dist.all_reduce(used, group=self.process_group)
        for slot, count in zip(self._slots, used.tolist(), strict=True):
            if not count:
                continue
            if not slot.has_total:
                slot.has_total = True
                if slot.total is not None:
                    slot.total.zero_()
                else:
                    slot.parameter.grad = torch.zeros_like(slot.parameter)
            dist.all_reduce(slot.gradient, group=self.process_group)
            slot.gradient.div_(self._world_size)

    @torch.no_grad()
    def _clip_globally(self) -> torch.Tensor | None:
        grads = [slot.gradient for slot in self._slots if slot.has_total]
        if not grads:
            return None
        norm = torch.stack([torch.linalg.vector_norm(grad, dtype=torch.float32) for grad in grads]).norm()
        coef = (self.config.gradient_clipping / (norm + NORM_FLOOR)).clamp_(max=1.0)
        for grad in grads:
            grad.mul_(coef)
        return norm

    def _adopt(self) -> None:
        self.settle()  # with the projectors that its directions belong to
        for slot, moments, carries in self._kept():
            if slot.refitted is not None:
                adopt(slot, moments, list(carries.values()))
        self._calibration.end_check()

    def zero_grad(self) -> None:
        self._take_back()
        for slot in self._slots:
            slot.forget()
        self.module.zero_grad(set_to_none=True)

    def _take_back(self) -> None:
        for group in self._host_groups:
            if group.moment is Moment.UPDATING:
                group.take_back()

    # Saving, loading, describing

    @property
    def biases(self) -> dict[str, float]:
        """What the projectors of each matrix lost of the gradient that they were last tested or fitted on."""
        return dict(self._calibration.biases)

    def state_dict(self) -> dict[str, Any]:
        self.settle()
        self._take_back()
        slots = {}
        for slot, moments, carries in self._kept():
            slots[slot.name] = {
                "moments": moments.state_dict(),
                "is_fitted": slot.is_fitted,
                "subspace": None if slot.subspace is None else slot.subspace.state_dict(),
                "refitted": None if slot.refitted is None else slot.refitted.state_dict(),
                "errors": {side: carry.errors[i] for side, (carry, i) in carries.items() if i in carry.errors},
            }
        return {"step": self._num_steps, "calibration": self._calibration.state_dict(), "slots": slots}

    def check_state(self, state: Mapping[str, Any]) -> None:
        for slot, _, _ in self._kept():
            saved = state["slots"].get(slot.name)
            if saved is not None and tuple(saved["moments"]["mean"].shape) != slot.shape:
                raise CheckpointError(
                    f"the checkpoint's subspace of {slot.name} is {tuple(saved['moments']['mean'].shape)}, here it is "
                    f"{slot.shape}: resume with the checkpoint's subspace_dim, projector and edge"
                )

    def load_state_dict(self, state: Mapping[str, Any], *, load_optimizer_states: bool = True) -> None:
        self.settle()
        self.zero_grad()
        kept = state["slots"] if load_optimizer_states else {}
        self._num_steps = int(state["step"]) if load_optimizer_states else 0
        self._calibration.load_state_dict(state["calibration"] if load_optimizer_states else None)
        for slot, moments, carries in self._kept():
            saved = kept.get(slot.name)
            for carry, i in carries.values():
                carry.errors.pop(i, None)
            if saved is None:
                moments.reset()
                slot.is_fitted = self.settings.projector != "learned"
                slot.refitted = None
                if slot.subspace is not None:
                    slot.subspace = first_projectors(slot.parameter, slot.index, self.settings, device=self.device)
                continue
            moments.load_state_dict(saved["moments"])
            slot.is_fitted = saved["is_fitted"]
            slot.subspace, slot.refitted = (
                None if saved[key] is None else Subspace.from_state(saved[key], self.device)
                for key in ("subspace", "refitted")
            )
            for side, error in saved["errors"].items():
                carry, i = carries[side]
                carry.errors[i] = error.to(carry.device, copy=True)

    def _kept(self) -> list[tuple[Slot, Moments, dict[str, tuple[Carry, int]]]]:
        found: list[tuple[Slot, Moments, dict[str, tuple[Carry, int]]]] = []
        for group in self._host_groups:
            for i, (slot, moments) in enumerate(zip(group.slots, group.moments, strict=True)):
                found.append((slot, moments, {"down": (group.carry_down, i), "up": (group.carry_up, i)}))
        for device_group in self._device_groups:
            pairs = zip(device_group.slots, device_group.moments, strict=True)
            found += [(slot, moments, {}) for slot, moments in pairs]
        return found

    def rank_state(self) -> dict[str, Any]:
        self._take_back()
        return {"totals": {slot.name: slot.gradient.cpu().clone() for slot in self._slots if slot.has_total}}

    def load_rank_state(self, state: Mapping[str, Any]) -> None:
        for slot in self._slots:
            slot.forget()
            if (total := state["totals"].get(slot.name)) is not None:
                slot.has_total = True
                if slot.total is not None:
                    slot.total.copy_(total)
                else:
                    slot.parameter.grad = total.to(self.device, slot.parameter.dtype, copy=True)

    def footprint(self) -> dict[str, int]:
        """Bytes that LSP takes besides the weights; scratch of the products comes on top."""
        subspaces = [slot.subspace for slot in self._slots if slot.subspace is not None]
        on_device = sum(s.P.num_bytes + s.Q.num_bytes for s in subspaces)
        on_device += sum(slot.total.nbytes for slot in self._slots if slot.total is not None)
        on_device += sum(m.num_bytes for group in self._device_groups for m in group.moments)
        on_device += 0 if self._links is None else self._links.num_bytes
        on_host = self._store.nbytes + sum(m.num_bytes for group in self._host_groups for m in group.moments)
        return {"device_bytes": on_device, "host_bytes": on_host}

    def describe(self) -> str:
        settings, footprint = self.settings, self.footprint()
        projected = [slot for slot in self._slots if slot.subspace is not None]
        whole = [slot for slot in self._slots if slot.subspace is None]
        dims = sorted({slot.shape for slot in projected})
        shown = ", ".join(f"{p} x {q}" for p, q in dims[-3:]) if dims else "no subspace"
        num_matrices = sum(slot.parameter.ndim >= 2 for slot in whole)
        return (
            f"ds_zo: {len(projected)} matrices in {shown} ({settings.nonzeros_per_row} non-zeros a row, "
            f"{settings.projector}), {num_matrices} matrices and {len(whole) - num_matrices} vectors whole, embeddings "
            f"and head: {settings.edge}\n"
            f"ds_zo: Adam on the {'CPU' if self._host_groups else 'device'}, schedule {settings.schedule}, payload "
            f"{settings.payload_dtype}; besides weights {footprint['device_bytes'] / 2**20:.0f} MiB on the device, "
            f"{footprint['host_bytes'] / 2**20:.0f} MiB on the host"
        )

    def close(self) -> None:
        if self._finalizer.alive:
            self.settle()
            self._finalizer()
            for handle in self._handles:
                handle.remove()
            self._store.close()


def _num_threads(device: torch.device) -> int | None:
    """On CUDA the main thread launches kernels meanwhile, and must not wait for a core."""
    if device.type != "cuda":
        return None
    return max(1, torch.get_num_threads() - _CORES_LEFT_TO_PYTHON)


def _dispatch(backend: weakref.ref[LSPBackend], slot: Slot, parameter: torch.Tensor) -> None:
    """A hook outlives an engine that was dropped without `destroy`; it then does nothing."""
    alive = backend()
    if alive is not None:
        alive._arrived(slot)


def _settle_hook(backend: weakref.ref[LSPBackend], index: int | None, *call: Any) -> None:
    alive = backend()
    if alive is not None:
        alive._settle_for(index)


def _settle_all_hook(backend: weakref.ref[LSPBackend], *call: Any) -> None:
    alive = backend()
    if alive is not None:
        alive.settle()
