"""The half of a backend's interface that trains: forward, backward, step."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import nn

from ds_zo.backends.common.deferred_scalar import DeferredScalar


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
    """Computes the loss, takes the gradients and updates the weights."""

    module: nn.Module
    optimizer: torch.optim.Optimizer
    process_group: Any
    accumulates: ClassVar[bool] = True
    """True: `backward` accumulates gradients for `step`, so that `zero_grad` can drop them. False: `backward` updates
    the weights itself."""
    is_last_micro_batch: bool = False
    """Set by the engine before each `backward`: True if it expects `step` next. It is wrong where a user calls
    `backward` for several losses before one step."""

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

    def average_gradients(self) -> None:
        """Replaces `grad` of every trainable parameter by its mean over the data-parallel ranks. A `step` that reads
        `grad` calls it first. A parameter without a gradient on some ranks counts as zero there."""
        if not dist.is_initialized() or dist.get_world_size(self.process_group) == 1:
            return
        for parameter in (p for group in self.param_groups for p in group["params"] if p.requires_grad):
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
