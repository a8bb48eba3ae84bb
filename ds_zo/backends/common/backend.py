"""What the plugin's engine asks of a backend, and what every backend shares.

The engine keeps DeepSpeed's promises (accumulation, schedulers, monitors, checkpoints); a backend keeps the
mathematics and the memory. Nothing here knows DeepSpeed.
"""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn

from ds_zo.backends.common.deferred_scalar import DeferredScalar
from ds_zo.checkpoint.errors import CheckpointError, reading_content
from ds_zo.checkpoint.export import Spec, Stream
from ds_zo.checkpoint.reader import Saved
from ds_zo.checkpoint.recorder import TrajectoryRecorder
from ds_zo.checkpoint.snapshot import Snapshot, host_copy, module_pieces, without_aliases
from ds_zo.checkpoint.stock import Weights, check_forms, check_weights
from ds_zo.config import Resolved

_WHERE: dict[str, tuple[str, str]] = {
    "zo": ("ds_zo.backends.zo.backend", "ZOBackend"),
    "lomo": ("ds_zo.backends.lomo.backend", "LOMOBackend"),
    "adalomo": ("ds_zo.backends.lomo.adalomo", "AdaLOMOBackend"),
    "lsp": ("ds_zo.backends.lsp.backend", "LSPBackend"),
}
"""Module and class of each backend. Imported on first use: one's kernels cost the others nothing."""


@dataclass(frozen=True)
class StepOutcome:
    """What one boundary step did."""

    applied: bool | DeferredScalar
    """False when the step was skipped (overflow, NaN): the engine counts it in `skipped_steps`."""

    grad_norm: float | DeferredScalar | None = None
    """What `engine.get_global_grad_norm()` returns."""

    advance_schedule: bool = True
    """Whether the lr scheduler moves on. A skipped step of ours still consumed a batch, so it does by default."""


class GroupedOptimizer(torch.optim.Optimizer):
    """Parameter groups for schedulers to drive; the update itself is `Backend.step`.

    Schedulers, Accelerate and Trainer insist on a real `torch.optim.Optimizer`, and read and write `lr` and
    `weight_decay` through its groups. It never creates state.
    """

    def __init__(self, params: Any, *, lr: float, weight_decay: float = 0.0, **defaults: Any) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, **defaults})

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        raise RuntimeError(
            "this optimizer only carries parameter groups: call step() on the engine deepspeed.initialize returned"
        )


class Backend(ABC):
    """One way to update parameters, driven by the engine: forward, backward, and step at accumulation boundaries.

    The constructor is where a backend places parameters; by then the configuration has been validated, the
    module has the JSON's dtype, and `optimizer` is final, so `__init__` may allocate.
    """

    name: ClassVar[str]
    recorder: TrajectoryRecorder | None = None
    """Where `ds_zo.checkpoint.trajectory` asks for it, on the rank that writes."""
    accumulates: ClassVar[bool] = True
    """Whether what `backward` adds waits for `step`, so that `zero_grad` can drop it."""
    is_last_micro_batch: bool = False
    """Whether the engine expects `step` after the `backward` that it is calling. It may be wrong: two losses a step."""

    def __init__(
        self,
        module: nn.Module,
        config: Resolved,
        *,
        optimizer: torch.optim.Optimizer,
        device: torch.device,
        process_group: Any = None,
    ) -> None:
        self.module = module
        self.config = config
        self.optimizer = optimizer
        """Its `param_groups` carry the lr and weight decay of the moment; its own `step()` is not the update."""
        self.device = device
        self.process_group = process_group
        """The data-parallel ranks whose batches count as one (None: the default group, or no distributed run)."""

    @classmethod
    def places_parameters(cls, config: Resolved) -> bool:
        """True: the engine leaves the module where it is and `__init__` moves what it wants to `device`.
        False: the whole module is on `device` before `__init__` runs."""
        return config.stream

    @classmethod
    def make_optimizer(cls, params: Any, config: Resolved) -> torch.optim.Optimizer:
        """Groups for a model whose optimizer is named in the JSON. `params` are parameters or group dicts,
        frozen ones included: they may be thawed later."""
        return GroupedOptimizer(params, lr=config.optimizer.lr, weight_decay=config.optimizer.weight_decay)

    @classmethod  # noqa: B027
    def take_optimizer(cls, optimizer: torch.optim.Optimizer, config: Resolved) -> None:
        """The JSON's or the user's own, before a scheduler of the JSON's changes its rates."""

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.optimizer.param_groups

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Every call of the engine, in training and in evaluation: the backend tells them apart by
        `self.module.training and torch.is_grad_enabled()`."""
        return self.module(*args, **kwargs)

    def backward(self, loss: torch.Tensor, *, retain_graph: bool = False) -> None:
        """`loss` is already divided by the accumulation steps."""
        loss.backward(retain_graph=retain_graph)

    @abstractmethod
    def step(self) -> StepOutcome:
        """Applies what `backward` accumulated since the last step. Called at accumulation boundaries only."""

    def zero_grad(self) -> None:
        """Forgets what `backward` accumulated; the engine calls it where DeepSpeed's own `zero_grad` is asked for."""
        self.module.zero_grad(set_to_none=True)

    def describe(self) -> str:
        """Lines for the start-up log: what automatic values became, bytes planned. Empty: nothing to add."""
        return ""

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs besides the module's weights and the parameter groups."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any], *, load_optimizer_states: bool = True) -> None:  # noqa: B027
        """`load_optimizer_states=False` asks for the weights only: counters and moments start afresh."""

    def check_state(self, state: Mapping[str, Any]) -> None:  # noqa: B027
        """Raises where `load_state_dict` could not take it; called before anything is changed."""

    def module_state_dict(self, **kwargs: Any) -> dict[str, Any]:
        """The weights of the current step, whatever is still pending; keywords are those of `nn.Module.state_dict`."""
        return self.module.state_dict(**kwargs)

    def load_module_state_dict(self, state: Mapping[str, Any], *, strict: bool = True) -> None:
        here = dict(self.module.named_parameters(remove_duplicate=False))
        forms = {name: (v.dtype, tuple(v.shape)) for name, v in state.items() if isinstance(v, torch.Tensor)}
        check_forms(forms, here, of="the state dict")  # torch raises after it has copied what fits
        self.module.load_state_dict(state, strict=strict)

    def stored(self) -> dict[str, torch.Tensor]:
        """Weights and buffers by the names of `state_dict`, as they are stored: to write to them is to change the
        model, if `stored_changed` follows."""
        return {name: value for name, value in self.module.state_dict().items() if isinstance(value, torch.Tensor)}

    def write_stored(self, name: str, target: torch.Tensor, value: torch.Tensor) -> None:
        """By every rank: `target` is what `stored` returned for `name`."""
        target.copy_(value)

    @contextmanager
    def readable_alone(self) -> Iterator[None]:
        """Entered by every rank; inside, the first reads weights without the others."""
        yield

    @property
    def stored_is_held(self) -> bool:
        """What `stored` returns now are copies that training does not change."""
        return False

    def stored_changed(self) -> None:  # noqa: B027
        """Somebody wrote to what `stored` returned."""

    def snapshot(self, *, hold: bool, omit_frozen: bool = False) -> Snapshot:
        """What a checkpoint holds of this moment. `hold`: it stays so while training goes on, as copies in host memory
        of all of it: weights and state."""
        tensors, aliases = without_aliases(self.stored())
        frozen = {name for name, p in self.module.named_parameters() if omit_frozen and not p.requires_grad}
        tensors = {name: value for name, value in tensors.items() if name not in frozen}
        own = self.state_dict()
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()  # the writer's threads have streams of their own
        state = {"state": host_copy(own) if hold else own, "aliases": aliases, "omitted": sorted(frozen)}
        return Snapshot(module_pieces(tensors, hold=hold and not self.stored_is_held), lambda: state)

    @torch.no_grad()
    def restore(self, saved: Saved, *, resume: bool, strict: bool = True) -> None:
        """Goes on from a checkpoint; `resume` False takes its weights only. Checks before it changes anything."""
        here = self.stored()
        with reading_content(saved.folder, "its state"):
            names = {name: name for name in saved.names()} | saved.backend_state["aliases"]
            frozen = set(saved.backend_state.get("omitted", ()))  # left out when it was saved: they stay as they are
            if not set(names.values()) <= saved.names() | frozen:
                raise KeyError("an alias of a tensor that is not there")
        omitted = frozen | {name for name, of in names.items() if of in frozen}
        names = {name: of for name, of in names.items() if name not in omitted}
        here = {name: value for name, value in here.items() if name not in omitted}
        if strict and names.keys() != here.keys():
            only = sorted(names.keys() ^ here.keys())
            raise CheckpointError(
                f"checkpoint {saved.folder} is of another model: {len(only)} tensors are only in one of them, such as "
                f"{only[0]}; load_module_strict=False takes what they share"
            )
        shared = names.keys() & here.keys()
        check_forms({name: saved.form(names[name]) for name in shared}, here, of=f"checkpoint {saved.folder}")
        if resume:
            with reading_content(saved.folder, "its state"):
                self.check_state(saved.backend_state["state"])
        for name in sorted(shared, key=lambda name: names[name]):
            self.write_stored(name, here[name], saved.tensor(names[name]))
        self.stored_changed()
        self.load_state_dict(saved.backend_state["state"], load_optimizer_states=resume)

    def aliases(self) -> dict[str, str]:
        """The other names of tied parameters, and the name that each is saved under."""
        first = {id(p): name for name, p in self.module.named_parameters()}
        every = self.module.named_parameters(remove_duplicate=False)
        return {name: first[id(p)] for name, p in every if name != first[id(p)]}

    def weights(self, *, omitted: Collection[str] = ()) -> Stream:
        """The weights of the current step in host memory, one after the other, tied ones once."""
        tensors, _ = without_aliases(self.stored())
        chosen = {name: value for name, value in tensors.items() if name not in omitted}
        specs = [Spec(name, value.dtype, tuple(value.shape)) for name, value in chosen.items()]
        return specs, ((name, value.cpu()) for name, value in chosen.items())

    @torch.no_grad()
    def load_weights(self, weights: Weights, *, strict: bool = True) -> None:
        """Replaces weights by name, reading one at a time; an alias does for a tied parameter."""
        here = self.stored()
        check_weights(weights, here, self.aliases(), strict=strict)
        for name, value in here.items():
            if name in weights:
                self.write_stored(name, value, weights[name])
        self.stored_changed()

    def replay_steps(self, rows: torch.Tensor) -> None:
        """Makes steps again that a trajectory recorded after the state that was restored."""
        raise NotImplementedError(f"backend {self.name} records no trajectory")

    def rank_state(self) -> dict[str, Any]:
        """What differs from rank to rank: sums of an accumulation window that is not over."""
        return {}

    def check_rank_state(self, state: Mapping[str, Any]) -> None:  # noqa: B027
        """Raises where `load_rank_state` could not take it."""

    def load_rank_state(self, state: Mapping[str, Any]) -> None:  # noqa: B027
        """Its counterpart."""

    def close(self) -> None:  # noqa: B027
        """Gives back buffers and hooks when the engine is destroyed. Safe to call twice."""


def backend_class(name: str) -> type[Backend]:
    module_name, class_name = _WHERE[name]
    found: type[Backend] = getattr(importlib.import_module(module_name), class_name)
    return found
