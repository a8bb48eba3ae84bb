"""Updates of one parameter by its gradient: learning rate, rounding and guards, and the rule that uses them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ds_zo.backends.common.param_groups import ParamGroupIndex
from ds_zo.backends.lomo.parameters import ParameterState
from ds_zo.backends.lomo.window import AccumulationWindow
from ds_zo.config import LOMOParams, Resolved
from ds_zo.optim import AdamMoments, Dither, adamw_update_, gradient_guard, sgd_update_
from ds_zo.streaming.device_shards import ParameterShard


@dataclass(frozen=True)
class UpdateRule:
    """How a parameter that is not an adapter is updated."""

    update: Callable[..., torch.Tensor | None]
    """Called with a parameter state, a gradient, the optimizer's params, and the keywords of `update_by_sgd`."""
    is_elementwise: bool
    """A rank can update its piece of a parameter without the rest."""
    has_moments: bool
    """The first update of every parameter makes moments."""


def update_by_sgd(
    state: ParameterState,
    grad: torch.Tensor,
    settings: LOMOParams,
    *,
    lr: float,
    decay: float,
    coef: torch.Tensor | None,
    dither: Dither | None,
    guards: Sequence[torch.Tensor],
) -> torch.Tensor | None:
    """LOMO's rule. `guards`: none, the loss's, or the loss's and the gradient's. Returns the gradient's guard, or None
    if `guards` is empty. The other keywords are those of `sgd_update_`."""
    if len(guards) == 1:
        guards = (*guards, gradient_guard(grad))
    sgd_update_(
        state.parameter,
        grad,
        lr=lr,
        decay=decay,
        coef=coef,
        clip_value=settings.clip_grad_value,
        dither=dither,
        residue=state.residue,
        guards=guards,
    )
    return guards[-1] if guards else None


SGD = UpdateRule(update_by_sgd, is_elementwise=True, has_moments=False)


class Updater:
    """Updates parameters, and rank's pieces of parameters, by their gradients."""

    def __init__(
        self, rule: UpdateRule, config: Resolved, *, optimizer: torch.optim.Optimizer, window: AccumulationWindow
    ) -> None:
        assert isinstance(config.optimizer, LOMOParams)
        self._rule = rule
        self._settings = config.optimizer
        self._rounding = config.section.rounding
        self._optimizer = optimizer
        self._window = window
        self.groups = ParamGroupIndex()
        self._initial_lrs = [float(group.get("initial_lr", group["lr"])) for group in optimizer.param_groups]
        self.follow_groups()

    def follow_groups(self) -> None:
        """Takes over changes of the optimizer's param groups. Called before each backward."""
        self.groups.follow(self._optimizer.param_groups)

    def trains(self, state: ParameterState) -> bool:
        return state.parameter.requires_grad and state.parameter in self.groups

    def update(
        self, state: ParameterState, grad: torch.Tensor, *, coef: torch.Tensor | None, guards: Sequence[torch.Tensor]
    ) -> None:
        """Updates a parameter by its whole gradient. `coef`: see `BackwardPasses.coef`. `guards`: see
        `update_by_sgd`."""
        p, group = state.parameter, self.groups[state.parameter]
        lr = float(group["lr"])
        decay = 1.0 - lr * float(group.get("weight_decay", 0.0))
        rounds = self._rounding if p.dtype is not torch.float32 else None
        dither = Dither(step=self._window.num_updates, offset=state.offset) if rounds == "stochastic" else None
        if rounds == "kahan" and state.residue is None:
            state.residue = torch.zeros_like(p, memory_format=torch.contiguous_format)
        if not state.is_adapter:
            guard = self._rule.update(
                state, grad, self._settings, lr=lr, decay=decay, coef=coef, dither=dither, guards=guards
            )
        else:
            adapter = self._settings.adapter
            assert adapter is not None
            lr = adapter.lr * self._schedule_factor(group)
            state.moments = state.moments or AdamMoments.zeros(p)
            assert isinstance(state.moments, AdamMoments)
            guard = adamw_update_(
                p,
                grad,
                state.moments,
                lr=lr,
                decay=1.0 - lr * adapter.weight_decay,
                betas=adapter.betas,
                coef=coef,
                clip_value=self._settings.clip_grad_value,
                dither=dither,
                residue=state.residue,
                guards=guards,
            )
        if guard is not None:
            self._window.skipped.add(state, guard)

    def update_piece(
        self,
        state: ParameterState,
        segment: ParameterShard,
        shard: torch.Tensor,
        grad: torch.Tensor,
        *,
        coef: torch.Tensor | None,
        guards: Sequence[torch.Tensor],
    ) -> None:
        """Updates this rank's piece of a parameter. `shard`: the bytes of this rank's piece of the block."""
        group = self.groups[state.parameter]
        lr, dtype = float(group["lr"]), state.parameter.dtype
        rounds = self._rounding == "stochastic" and dtype is not torch.float32
        sgd_update_(
            segment.view(shard, dtype),
            grad,
            lr=lr,
            decay=1.0 - lr * float(group.get("weight_decay", 0.0)),
            coef=coef,
            clip_value=self._settings.clip_grad_value,
            dither=Dither(step=self._window.num_updates, offset=state.offset + segment.begin) if rounds else None,
            guards=guards,
        )

    def _schedule_factor(self, group: Mapping[str, Any]) -> float:
        """Current learning rate of the group divided by its initial one. The learning rate of the group's adapters is
        multiplied by it, so that adapters follow the same schedule."""
        index = next(i for i, other in enumerate(self._optimizer.param_groups) if other is group)
        initial = self._initial_lrs[index] if index < len(self._initial_lrs) else float(group["lr"])
        return float(group["lr"]) / initial if initial else 1.0
