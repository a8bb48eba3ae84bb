"""BlockSGD, a backend from outside ds_zo: SGD with momentum that updates each block inside the backward pass.

With `offload_param` blocks are streamed, and each is computed again in a backward pass of its own. It is updated at the
end of that pass, while its weights are on the device, and its gradients are freed. All other parameters are updated at
the end of `backward`. Momenta are on the device. On several ranks, all ranks must run the same blocks.

Call `register` before `deepspeed.initialize`. A JSON names the backend by `"optimizer": {"type": "BlockSGD"}`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from typing import Any, ClassVar

import torch
from pydantic import Field
from torch import nn

import ds_zo
from ds_zo.backends import StepOutcome
from ds_zo.backends.common.caches import Caches
from ds_zo.backends.common.startup import StartupSummary
from ds_zo.backends.recompute.backend import RecomputedBackend
from ds_zo.backends.recompute.model_blocks import OneBackward
from ds_zo.config import ConfigError, OptimizerParams, Resolved
from ds_zo.streaming.units import Unit


class BlockSGDParams(OptimizerParams):
    """`lr`, `weight_decay` and a key of its own."""

    momentum: float = Field(0.0, ge=0, lt=1)
    """Fraction of the last update that is added to the next one."""

    def check_config(self, ds_config: dict[str, Any], config: Any) -> None:
        if config.gradient_accumulation_steps > 1:
            raise ConfigError(
                "gradient_accumulation_steps must be 1, because a block is updated when its gradients have come, got "
                f"{config.gradient_accumulation_steps}; use a larger micro-batch",
                at="gradient_accumulation_steps",
            )


class BlockSGD(RecomputedBackend):
    """SGD with momentum. See this module's docstring."""

    accumulates: ClassVar[bool] = False

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
        assert isinstance(config.optimizer, BlockSGDParams)
        self._momentum = config.optimizer.momentum
        self._momenta: dict[str, torch.Tensor] = {}
        """By the parameter's name."""
        self._is_updated = False
        """Whether `backward` has run since the last step."""
        self._caches = Caches(module)
        self.make_blocks()
        self._passes = OneBackward(self.blocks, on_block_end=self._end_block)
        self.blocks.wrap(self._passes)
        self.access_weights()
        self._names = {id(p): name for name, p in module.named_parameters()}
        in_blocks = {id(placed.parameter) for unit in self.blocks.units for placed in unit.placed}
        self._outside_blocks = [p for p in module.parameters() if id(p) not in in_blocks]

    # A step

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        caches = self._caches.off() if torch.is_grad_enabled() else nullcontext()
        with self.plain_parameters(), self.blocks.forward(), caches:
            return self.module(*args, **kwargs)

    def backward(self, loss: torch.Tensor, *, retain_graph: bool = False) -> None:
        with self.plain_parameters():
            with self._passes.run(retain_graph=retain_graph, downloads=self.blocks.units):
                loss.backward(retain_graph=retain_graph)
            self._update(self._outside_blocks)
        self._is_updated = True

    def _end_block(self, unit: Unit, more_to_come: bool) -> bool:
        """Updates a streamed block. Returns whether it did, so that the block is copied back."""
        return not more_to_come and self._update([placed.parameter for placed in unit.placed])

    @torch.no_grad()
    def _update(self, parameters: Iterable[nn.Parameter]) -> bool:
        group_of = {id(p): group for group in self.param_groups for p in group["params"]}
        trained = [p for p in parameters if p.requires_grad and id(p) in group_of]
        self.average_gradients(trained)
        reached = [p for p in trained if p.grad is not None]
        for p in reached:
            group, name = group_of[id(p)], self._names[id(p)]
            momentum = self._momenta.setdefault(name, torch.zeros_like(p.grad))
            momentum.mul_(self._momentum).add_(p.grad)
            p.mul_(1 - group["lr"] * group["weight_decay"]).add_(momentum, alpha=-group["lr"])
            p.grad = None
        return bool(reached)

    def step(self) -> StepOutcome:
        if not self._is_updated:
            raise RuntimeError("engine.backward makes the update, got engine.step without it: call engine.backward")
        self._is_updated = False
        self.blocks.fill_device()
        return StepOutcome(applied=True)

    # State besides the weights

    def state_dict(self) -> dict[str, Any]:
        return {"momenta": dict(self._momenta)}

    def check_state(self, state: Mapping[str, Any]) -> None:
        shapes = {name: p.shape for name, p in self.module.named_parameters()}
        if any(shapes.get(name) != saved.shape for name, saved in state["momenta"].items()):
            raise ValueError("a momentum has another shape than its parameter")

    def load_state_dict(self, state: Mapping[str, Any], *, load_optimizer_states: bool = True) -> None:
        saved = state["momenta"] if load_optimizer_states else {}
        self._momenta = {name: momentum.to(self.device, copy=True) for name, momentum in saved.items()}

    # The start-up table, and the end

    def startup_summary(self) -> StartupSummary:
        return self.blocks.startup_summary()

    def close(self) -> None:
        self.blocks.close()
        self.weights_by_name.close()


def register() -> None:
    ds_zo.register_backend("BlockSGD", BlockSGD, params=BlockSGDParams, streams=True, refuses_fp16=True)
