"""Updates of one parameter by its gradient: learning rate, rounding and guards, and the rule that uses them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

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
    """A rank can update its shard of a parameter without the rest."""
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
    """Updates parameters, and rank's shards of parameters, by their gradients."""

    def __init__(
        self, rule: UpdateRule, config: Resolved, *, optimizer: torch.optim.Optimizer, window: AccumulationWindow
    ) -> None:
        assert isinstance(config.optimizer, LOMOParams)
        self._rule = rule
        self._settings = config.optimizer
        self._rounding = config.section.rounding
        self._optimizer = optimizer
        self._window = window
        self.rates: dict[int, tuple[float, float, float]] = {}
        """By the id of a parameter in a param group: lr, 1 - lr * weight_decay, and lr divided by the initial lr. The
        learning rates of adapters are multiplied by the last, so that adapters follow the same schedule."""
        self._initial_lrs = [float(group.get("initial_lr", group["lr"])) for group in optimizer.param_groups]
        self.follow_groups()

    def follow_groups(self) -> None:
        """Takes over changes of the optimizer's param groups. Called before each backward."""
        self.rates = {}
        for i, group in enumerate(self._optimizer.param_groups):
            lr = float(group["lr"])
            fallback = self._initial_lrs[i] if i < len(self._initial_lrs) else lr
            initial = float(group.get("initial_lr", fallback))  # of the saved run in a resumed one, as lr is
            rate = lr, 1.0 - lr * float(group.get("weight_decay", 0.0)), lr / initial if initial else 1.0
            self.rates |= dict.fromkeys(map(id, group["params"]), rate)

    def trains(self, state: ParameterState) -> bool:
        return state.parameter.requires_grad and id(state.parameter) in self.rates

    def update(
        self, state: ParameterState, grad: torch.Tensor, *, coef: torch.Tensor | None, guards: Sequence[torch.Tensor]
    ) -> None:
        """Updates a parameter by its whole gradient. `coef`: see `BackwardPasses.coef`. `guards`: see
        `update_by_sgd`."""
        p = state.parameter
        lr, decay, schedule_factor = self.rates[id(p)]
        rounds = self._rounding if p.dtype is not torch.float32 else None
        dither = Dither(step=self._window.num_updates, offset=state.offset) if rounds == "stochastic" else None
        if rounds == "kahan" and state.residue is None:
            state.residue = torch.zeros_like(p, memory_format=torch.contiguous_format)
        residue = state.residue
        if not state.is_adapter:
            guard = self._rule.update(
                state, grad, self._settings, lr=lr, decay=decay, coef=coef, dither=dither, guards=guards
            )
        else:
            adapter = self._settings.adapter
            assert adapter is not None
            lr = adapter.lr * schedule_factor
            state.moments = state.moments or AdamMoments.zeros(p)
            assert isinstance(state.moments, AdamMoments)
            guard = adamw_update_(
                p,
                grad,
                state.moments,
                self._settings,
                lr=lr,
                decay=1.0 - lr * adapter.weight_decay,
                coef=coef,
                dither=dither,
                residue=state.residue,
                guards=guards,
            )
        state.residue = residue  # with the version of the updated parameter
        if guard is not None:
            self._window.skipped.add(state, guard)

    def update_shard(
        self,
        state: ParameterState,
        segment: ParameterShard,
        shard: torch.Tensor,
        grad: torch.Tensor,
        *,
        coef: torch.Tensor | None,
        guards: Sequence[torch.Tensor],
    ) -> None:
        """Updates this rank's shard of a parameter. `shard`: the bytes of this rank's shard of the block."""
        lr, decay, _ = self.rates[id(state.parameter)]
        dtype = state.parameter.dtype
        rounds = self._rounding == "stochastic" and dtype is not torch.float32
        sgd_update_(
            segment.view(shard, dtype),
            grad,
            lr=lr,
            decay=decay,
            coef=coef,
            clip_value=self._settings.clip_grad_value,
            dither=Dither(step=self._window.num_updates, offset=state.offset + segment.begin) if rounds else None,
            guards=guards,
        )
