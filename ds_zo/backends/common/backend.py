"""The interface between the plugin's engine and a backend.

The engine implements DeepSpeed's interface: gradient accumulation, learning-rate schedulers, monitors, checkpoint
folders. A backend implements the update rule (`TrainingStep`) and decides where weights and states are stored
(`StateAccess`). This module does not import DeepSpeed.

To write a backend, subclass `Backend`, implement `step`, override the methods whose defaults do not fit, and add one
`BackendEntry`. The defaults fit a backend that keeps the whole module on the device, leaves gradients in
`parameter.grad` and has no state of its own.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import nn

from ds_zo.backends.common.deferred_scalar import DeferredScalar
from ds_zo.backends.common.startup import StartupSummary, resident_summary
from ds_zo.backends.common.state_access import StateAccess
from ds_zo.config import Resolved
from ds_zo.config.registry import entry_of, imported

__all__ = ["Backend", "GroupedOptimizer", "StepOutcome", "backend_class"]


class GroupedOptimizer(torch.optim.Optimizer):
    """A `torch.optim.Optimizer` that holds parameter groups only; `Backend.step` makes the update.

    Schedulers, Accelerate and Trainer require an instance of `torch.optim.Optimizer`. They read and write `lr` and
    `weight_decay` in its groups. The instance has no optimizer state.
    """

    def __init__(self, params: Any, *, lr: float, weight_decay: float = 0.0, **defaults: Any) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, **defaults})

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        raise RuntimeError(
            "this optimizer only holds parameter groups: call step() on the engine that deepspeed.initialize returned"
        )


@dataclass(frozen=True)
class StepOutcome:
    """The result of one optimizer step, which the engine reports.

    A backend gives a `DeferredScalar` for a number that is still on the device. The engine reads it at its next step,
    or earlier when a caller asks for it.
    """

    applied: bool | DeferredScalar
    """False or zero: the step was skipped, because of an overflow or a NaN. The engine counts it in `skipped_steps`."""

    grad_norm: float | DeferredScalar | None = None
    """The return value of `engine.get_global_grad_norm()`. None: the backend has not computed a norm."""

    advance_schedule: bool = True
    """Whether the engine steps the learning-rate scheduler. The default is True also for a skipped step, because that
    step has consumed a batch."""


class TrainingStep(ABC):
    """The half of a backend's interface that trains: it computes the loss and gradients, and updates the weights."""

    module: nn.Module
    config: Resolved
    optimizer: torch.optim.Optimizer
    process_group: Any
    accumulates: ClassVar[bool] = True
    """True: `backward` accumulates gradients for `step`, so that `zero_grad` can drop them. False: `backward` updates
    the weights itself."""
    is_last_micro_batch: bool = False
    """Set by the engine before each `backward`: True if it expects `step` next. It is wrong where a user calls
    `backward` for several losses before one step."""

    scales_loss: bool = False
    """True: `backward` multiplies the loss by a scale, and `step` divides the gradients by it. The engine then refuses
    a direct `loss.backward()`, which does not multiply. A backend that refuses it itself leaves this False."""

    num_failed_scores: int = 0
    """Number of failed scores that `on_error` of `engine.zo_step` has replaced."""

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The optimizer's param groups. A scheduler or a user may replace a group or its list between steps."""
        return self.optimizer.param_groups

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the module and returns its output. The engine calls it for every call of the engine, in training and in
        evaluation. It is a training forward if `self.module.training and torch.is_grad_enabled()`."""
        return self.module(*args, **kwargs)

    def backward(self, loss: torch.Tensor, *, retain_graph: bool = False) -> None:
        """Computes and accumulates gradients. `engine.backward(loss)` calls it once per micro-batch.

        `loss` is a scalar with a graph. The engine has divided it by `gradient_accumulation_steps`. A backend for which
        `accumulates` is False updates the weights here.
        """
        loss.backward(retain_graph=retain_graph)

    def scored_by(self, objective: Any, *, minimise: bool, on_error: Any) -> AbstractContextManager[None]:
        """Context of a training forward that returns its loss alone. With an objective, the loss is the negated score
        of the outputs. `engine.zo_step` calls it, and only ZO has it."""
        raise RuntimeError(
            'engine.zo_step needs the optimizer "ZO", the only one that trains without gradients, got '
            f'"{entry_of(self.config.backend).optimizer_type}": set it, or call engine(...), engine.backward and '
            "engine.step instead (optimizer.type)"
        )

    def average_gradients(self, parameters: Iterable[nn.Parameter] | None = None) -> None:
        """Replaces `grad` of every trainable parameter by its mean over the data-parallel ranks. An update that reads
        `grad` calls it first. A parameter without a gradient on some ranks counts as zero there. `parameters`: the
        same ones on all ranks. None: those of all groups."""
        if not dist.is_initialized() or dist.get_world_size(self.process_group) == 1:
            return
        if parameters is None:
            parameters = (p for group in self.param_groups for p in group["params"])
        for parameter in (p for p in parameters if p.requires_grad):
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            dist.all_reduce(parameter.grad, group=self.process_group)
            parameter.grad.div_(dist.get_world_size(self.process_group))

    @abstractmethod
    def step(self) -> StepOutcome:
        """Updates the weights by the gradients accumulated since the last step, and drops these gradients. The engine
        calls it at accumulation boundaries only. Averages over ranks and clipping are the backend's."""

    def zero_grad(self) -> None:
        """Drops the accumulated gradients. The engine calls it when a user calls `zero_grad` of the engine, of the
        optimizer or of the module, not after `step`."""
        self.module.zero_grad(set_to_none=True)


class Backend(TrainingStep, StateAccess):
    """A training method.

    The engine calls a backend in this order:

    1. `places_parameters`, `make_optimizer` and `prepare_optimizer`, which are class methods, in
       `deepspeed.initialize`;
    2. the constructor, once the configuration is validated, the module has the dtype of the JSON and `optimizer` is
       final, so that the constructor may allocate;
    3. for each micro-batch `forward` and `backward`, and at each accumulation boundary `step`;
    4. the methods for checkpoints and weights between these calls, never inside one;
    5. `close`.

    Every rank calls every method in the same order, except where a docstring says otherwise.
    """

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
        """Its `param_groups` hold the current learning rates and weight decays. A backend calls its `step()`
        only if `stock_types` of its entry names such optimizers."""
        self.device = device
        self.process_group = process_group
        """The data-parallel ranks, whose batches form one global batch. None: the default group, or a run without
        torch.distributed."""

    @classmethod
    def places_parameters(cls, config: Resolved) -> bool:
        """Whether the backend decides where parameters are stored. The engine asks before it moves the module.

        True: the engine leaves the module where it is, and `__init__` places parameters and buffers. False: the engine
        moves the whole module to `device` before `__init__`.
        """
        return config.stream

    @classmethod
    def make_optimizer(cls, params: Any, config: Resolved) -> torch.optim.Optimizer:
        """Returns the optimizer of an engine whose JSON names this backend's optimizer. Not called where the user
        passes an optimizer to `deepspeed.initialize`.

        `params` are parameters or param-group dicts. Frozen parameters are among them, because a user may unfreeze them
        later.
        """
        return GroupedOptimizer(params, lr=config.optimizer.lr, weight_decay=config.optimizer.weight_decay)

    @classmethod
    def prepare_optimizer(cls, optimizer: torch.optim.Optimizer, config: Resolved) -> None:
        """Prepares the optimizer, whether the JSON names it or the user passed it. The engine calls this method before
        a scheduler of the JSON changes the learning rates. The default does nothing."""

    def describe(self) -> str:
        """Returns lines for the debug log: the values chosen for automatic settings, and the bytes planned. An empty
        string adds no line. The engine calls it once, after the constructor."""
        return ""

    def startup_summary(self) -> StartupSummary:
        """Returns the backend's rows of the start-up table. The engine calls it once, after the constructor. The
        default is that of a module on the device."""
        return resident_summary(self.module, self.device)

    def close(self) -> None:
        """Frees buffers and removes hooks when the engine is destroyed. It may be called twice. A user may go on using
        the module."""


def backend_class(name: str) -> type[Backend]:
    """The class of a registered backend, imported if its entry gives its place."""
    found = imported(entry_of(name).backend)
    if not (isinstance(found, type) and issubclass(found, Backend)):
        raise TypeError(
            f"a registered backend must be a subclass of ds_zo.backends.Backend, got {found!r} for {name}; correct the "
            "call of register_backend"
        )
    return found
