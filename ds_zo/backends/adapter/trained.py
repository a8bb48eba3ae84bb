"""The trained parameters, their gradients, and float32 masters of 16-bit ones.

[Note: float32 masters] An AdamW step of a LoRA weight is often smaller than half the distance between two bfloat16
numbers, and would be lost. So the optimizer is given a float32 copy of each 16-bit parameter, as by DeepSpeed's own
bf16 and fp16 optimizers. After a step the parameters are the rounded masters. A parameter that a user has changed since
then differs from its rounded master. The master takes over such elements.

[Note: one gradient] autograd sums the gradient of a 16-bit parameter in float32 (`grad_dtype`), and the master has the
same tensor as its `grad`. So a script that clips or changes gradients between `backward` and `step` changes the update,
whether it takes the parameters of the model or of the optimizer.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ds_zo.backends.common.ownership import LowBits
from ds_zo.checkpoint.errors import CheckpointError
from ds_zo.streaming.placement import adapter_ids


@dataclass
class Trained:
    name: str
    parameter: nn.Parameter
    master: nn.Parameter
    """The parameter that the optimizer updates: in float32, or `parameter` itself if that is not 16-bit."""
    shared_gradient: torch.Tensor | None = None
    """The gradient that parameter and master had when they were last given the same one."""

    @property
    def has_master(self) -> bool:
        return self.master is not self.parameter

    def share_gradient(self) -> None:
        """Gives parameter and master the same gradient: the one that was replaced, by a backward or a script."""
        if self.master.grad is self.shared_gradient:
            self.master.grad = self.parameter.grad
        else:
            self.parameter.grad = self.master.grad
        self.shared_gradient = self.master.grad


class AdapterParameters(LowBits):
    """The parameters of an optimizer that may be trained. Replaces 16-bit ones in its param groups by masters."""

    def __init__(
        self, module: nn.Module, optimizer: torch.optim.Optimizer, *, chosen: Collection[int], process_group: Any = None
    ) -> None:
        """`chosen`: ids of the parameters that may be trained."""
        self._optimizer = optimizer
        self._process_group = process_group
        names = {id(p): name for name, p in module.named_parameters()}
        self.names: list[list[str]] = []
        """The names of the parameters in each group of the optimizer, in its order. A parameter that is not the
        module's has its number in the group."""
        self._trained: list[Trained] = []
        self._frozen: list[tuple[str, nn.Parameter]] = []
        """Names and parameters of the optimizer that may not be trained."""
        self._foreign: list[torch.Tensor] = []
        """Parameters of the optimizer that are not the module's. They are not trained, of which the engine warns."""
        for group in optimizer.param_groups:
            self.names.append([names.get(id(p), f"parameter {i}") for i, p in enumerate(group["params"])])
            for i, p in enumerate(group["params"]):
                if id(p) not in names:
                    self._foreign.append(p)
                    continue
                if id(p) not in chosen:
                    self._frozen.append((names[id(p)], p))
                    continue
                master = p
                if p.dtype in (torch.bfloat16, torch.float16):
                    master = nn.Parameter(p.detach().float())
                    group["params"][i] = master
                    _set_grad_dtype(p, torch.float32)
                    if p in optimizer.state:
                        optimizer.state[master] = optimizer.state.pop(p)
                self._trained.append(Trained(names[id(p)], p, master))
        self._master_of = {id(t.parameter): t.master for t in self._trained if t.has_master}
        self._known = {id(p) for group in optimizer.param_groups for p in group["params"]}

    @property
    def nbytes(self) -> int:
        """Bytes of the masters."""
        return sum(t.master.nbytes for t in self._trained if t.has_master)

    # Gradients

    def check_groups(self) -> None:
        """Raises if the optimizer has got parameters since it was given, or if one that may not be trained requires a
        gradient."""
        for group in self._optimizer.param_groups:
            for p in group["params"]:
                if id(p) not in self._known:
                    raise ValueError(
                        "the optimizer trains the parameters that it had when deepspeed.initialize ran, got another "
                        f"one of shape {tuple(p.shape)} in its groups: add parameters and adapters before initialize"
                    )
        for name, p in self._frozen:
            if p.requires_grad:
                raise ValueError(
                    f"parameter {name} was frozen when deepspeed.initialize ran, so its gradients would not be "
                    "averaged, clipped or dropped: unfreeze it before initialize, or freeze it again"
                )

    def share_gradients(self) -> None:
        """Brings the gradients of masters and parameters together ([Note: one gradient]). Drops gradients of parameters
        that are not the module's."""
        for p in self._foreign:
            p.grad = None
        for t in self._trained:
            if t.has_master:
                t.share_gradient()

    def average_gradients(self) -> None:
        """Replaces gradients by their mean over the ranks. A gradient that some ranks lack counts as zero there. One
        that all ranks lack stays None."""
        group = self._process_group
        if not self._trained or not dist.is_initialized() or dist.get_world_size(group) == 1:
            return
        masters = [t.master for t in self._trained]
        device = masters[0].device
        has_grad = torch.tensor([m.grad is not None for m in masters], dtype=torch.int32, device=device)
        dist.all_reduce(has_grad, op=dist.ReduceOp.MAX, group=group)
        wanted = [m for m, has in zip(masters, has_grad.tolist(), strict=True) if has]
        for dtype in sorted({m.dtype for m in wanted}, key=str):
            members = [m for m in wanted if m.dtype is dtype]
            flat = torch.cat([torch.zeros_like(m).view(-1) if m.grad is None else m.grad.reshape(-1) for m in members])
            dist.all_reduce(flat, group=group)
            flat.div_(dist.get_world_size(group))
            for m, grad in zip(members, flat.split([m.numel() for m in members]), strict=True):
                m.grad = grad.view(m.shape)

    def unscale_and_clip(self, *, scale: float, clipping: float) -> float:
        """Divides gradients by the loss scale and clips them to a norm of `clipping` (0: no limit). Returns the norm
        before clipping."""
        masters = [t.master for t in self._trained if t.master.grad is not None]
        if scale != 1.0:
            for m in masters:
                assert m.grad is not None
                m.grad.mul_(1.0 / scale)
        return float(nn.utils.clip_grad_norm_(masters, clipping or float("inf")))

    def drop_gradients(self) -> None:
        for t in self._trained:
            t.parameter.grad = t.master.grad = t.shared_gradient = None

    # Masters: see [Note: float32 masters]

    @torch.no_grad()
    def adopt_changes(self) -> None:
        """Takes over elements of 16-bit parameters that are not the rounded masters."""
        for t in self._trained:
            if t.has_master:
                rounded = t.master.to(t.parameter.dtype)
                torch.where(rounded == t.parameter, t.master, t.parameter.float(), out=t.master.data)

    @torch.no_grad()
    def round_masters(self) -> None:
        """Sets 16-bit parameters to the rounded masters."""
        with_masters = [t for t in self._trained if t.has_master]
        if with_masters:
            torch._foreach_copy_([t.parameter.data for t in with_masters], [t.master.data for t in with_masters])

    def return_to_optimizer(self) -> None:
        """Puts the parameters back into the optimizer's groups."""
        parameter_of = {id(t.master): t.parameter for t in self._trained if t.has_master}
        for group in self._optimizer.param_groups:
            group["params"] = [parameter_of.get(id(p), p) for p in group["params"]]
        for t in self._trained:
            if t.has_master:
                _set_grad_dtype(t.parameter, t.parameter.dtype)
            if t.has_master and t.master in self._optimizer.state:
                self._optimizer.state[t.parameter] = self._optimizer.state.pop(t.master)

    def master_of(self, parameter: nn.Parameter) -> torch.Tensor | None:
        """The float32 master of a parameter. None: it has none."""
        found = self._master_of.get(id(parameter))
        return None if found is None else found.detach()

    def added(self, parameter: nn.Parameter, full: torch.Tensor) -> torch.Tensor:
        master = self.master_of(parameter)
        return full if master is None else with_low_bits(full, master.to(full.device), parameter.dtype)

    @torch.no_grad()
    def keep(self, parameter: nn.Parameter, value: torch.Tensor) -> None:
        master = self.master_of(parameter)
        if master is not None:
            master.copy_(value)

    # State

    def masters(self) -> dict[str, torch.Tensor]:
        return {t.name: t.master.detach() for t in self._trained if t.has_master}

    def check_masters(self, saved: Mapping[str, torch.Tensor]) -> None:
        _check_shapes({t.name: t.master for t in self._trained if t.has_master}, saved, "master")

    @torch.no_grad()
    def load_masters(self, saved: Mapping[str, torch.Tensor]) -> None:
        """Loads saved masters. A parameter without a saved one is its own."""
        for t in self._trained:
            if t.has_master:
                t.master.copy_(saved.get(t.name, t.parameter))

    def gradients(self) -> dict[str, torch.Tensor]:
        self.share_gradients()
        return {t.name: t.master.grad.cpu() for t in self._trained if t.master.grad is not None}

    def check_gradients(self, saved: Mapping[str, torch.Tensor]) -> None:
        _check_shapes({t.name: t.master for t in self._trained}, saved, "gradient")

    def load_gradients(self, saved: Mapping[str, torch.Tensor]) -> None:
        for t in self._trained:
            grad = saved.get(t.name)
            t.master.grad = None if grad is None else grad.to(t.master.device, t.master.dtype, copy=True)
            t.parameter.grad = t.shared_gradient = t.master.grad

    def __iter__(self) -> Any:
        return iter(self._trained)

    def __len__(self) -> int:
        return len(self._trained)


def with_low_bits(stored: torch.Tensor, master: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The master of a parameter of `dtype`. Elements that a user has changed since the last step are not in the master
    yet, and are those of `stored` ([Note: float32 masters])."""
    return torch.where(master.to(dtype) == stored.to(dtype), master, stored)


def _set_grad_dtype(parameter: nn.Parameter, dtype: torch.dtype) -> None:
    """Sets the dtype in which autograd sums the gradient of a parameter, and converts the gradient that it has."""
    grad, parameter.grad = parameter.grad, None
    parameter.grad_dtype = dtype
    parameter.grad = None if grad is None else grad.to(dtype)


def _check_shapes(here: Mapping[str, torch.Tensor], saved: Mapping[str, torch.Tensor], what: str) -> None:
    for name, value in saved.items():
        if name not in here or here[name].shape != value.shape:
            found = tuple(here[name].shape) if name in here else None
            raise ValueError(f"the {what} of {name} has shape {tuple(value.shape)}, its parameter {found}")


def in_own_order(
    saved: Mapping[str, Any], optimizer: torch.optim.Optimizer, *, there: Sequence[Sequence[str]], here: list[list[str]]
) -> dict[str, Any]:
    """A saved state of the optimizer with each parameter's state at the parameter's present index. `there`, `here`: the
    names of the parameters in each group, of the saved run and of this one."""
    index_of = {
        name: i
        for names, group in zip(there, saved["param_groups"], strict=True)
        for name, i in zip(names, group["params"], strict=True)
    }
    groups, states = [], dict[int, Any]()
    for names, group, own in zip(here, saved["param_groups"], optimizer.state_dict()["param_groups"], strict=True):
        indices = own["params"]
        found = {i: saved["state"].get(index_of[name]) for name, i in zip(names, indices, strict=True)}
        states |= {i: state for i, state in found.items() if state is not None}
        groups.append({**{key: value for key, value in group.items() if key != "param_names"}, "params": indices})
    return {"state": states, "param_groups": groups}


def check_names(there: Sequence[Sequence[str]], here: Sequence[Sequence[str]]) -> None:
    """Raises unless the groups of a saved optimizer and of this one have the same parameters, in any order."""
    if len(there) != len(here):
        raise CheckpointError(_other_groups(f"{len(there)} groups", f"{len(here)}"))
    for i, (saved, own) in enumerate(zip(there, here, strict=True)):
        only = sorted(set(saved) ^ set(own))
        if only:
            has = "only the saved one has" if only[0] in set(saved) else "only this one has"
            raise CheckpointError(_other_groups("each in its group", f"{only[0]}, which {has} in group {i}"))


def check_shapes_by_index(saved: Mapping[str, Any], optimizer: torch.optim.Optimizer) -> None:
    """Raises where a state of an optimizer without saved names can't be that of the parameter at its index."""
    there = [len(group["params"]) for group in saved["param_groups"]]
    here = [len(group["params"]) for group in optimizer.param_groups]
    if there != here:
        raise CheckpointError(_other_groups(f"{there} in its groups", f"{here}"))
    indices = [i for group in saved["param_groups"] for i in group["params"]]
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for i, p in zip(indices, parameters, strict=True):
        for key, value in saved["state"].get(i, {}).items():
            # States with fewer dimensions, as Adafactor's and of 8-bit optimizers, tell nothing.
            if isinstance(value, torch.Tensor) and value.dim() >= max(2, p.dim()) and value.shape != p.shape:
                raise CheckpointError(
                    _other_groups(f"{key} of shape {tuple(value.shape)}", f"a parameter of shape {tuple(p.shape)}")
                )


def _other_groups(saved: str, found: str) -> str:
    return (
        f"a resumed optimizer has the parameters of the saved one, {saved}, got {found}: train the same parameters, or "
        "call load_checkpoint(load_optimizer_states=False)"
    )


def resident_ids(module: nn.Module, param_groups: Sequence[dict[str, Any]]) -> set[int]:
    """Ids of the parameters that stay on the device in their own dtype: those that are trained, and PEFT's adapters,
    trained or not."""
    trained = {id(p) for group in param_groups for p in group["params"] if p.requires_grad}
    return trained | adapter_ids(module)
