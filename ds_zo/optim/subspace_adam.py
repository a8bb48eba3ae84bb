"""Adam where the weights are not at hand: it turns gradients into directions, and somebody else moves the weights.

One fused kernel for a list of tensors, the same on the CPU (all threads of the caller) and on CUDA; nothing is built
and nothing is read by the host.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

NORM_FLOOR = 1e-6


@dataclass
class Moments:
    """Adam's memory of one tensor, in float32."""

    mean: torch.Tensor
    mean_square: torch.Tensor
    num_steps: torch.Tensor
    """A float32 scalar beside the others: a step that is skipped on the device is not counted there either."""

    @classmethod
    def zeros(cls, shape: Sequence[int], device: torch.device | str) -> Moments:
        zeros = torch.zeros
        return cls(zeros(*shape, device=device), zeros(*shape, device=device), zeros((), device=device))

    def state_dict(self) -> dict[str, Any]:
        return dict(vars(self))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for name, value in vars(self).items():
            value.copy_(state[name])

    def reset(self) -> None:
        for value in vars(self).values():
            value.zero_()

    @property
    def num_bytes(self) -> int:
        return self.mean.nbytes + self.mean_square.nbytes


@torch.no_grad()
def clip_(
    grads: list[torch.Tensor], max_norm: float, *, together: tuple[torch.Tensor, torch.Tensor] | None = None
) -> torch.Tensor:
    """Scales each tensor to a norm of at most `max_norm` (0: no limit); returns their norms as they came. `together`:
    where they stand one behind the other, and the sizes of each, so that many small ones take one launch."""
    norms = torch.stack(torch._foreach_norm(grads))
    if max_norm > 0:
        coefs = (max_norm / (norms + NORM_FLOOR)).clamp_(max=1.0)
        if norms.is_cuda or bool((coefs != 1.0).any()):  # on the CPU to look is free, and most steps clip nothing
            if together is None:
                torch._foreach_mul_(grads, list(coefs.unbind()))
            else:
                flat, sizes = together
                flat.mul_(coefs.repeat_interleave(sizes, output_size=flat.numel()))
    return norms


@torch.no_grad()
def directions_(
    out: list[torch.Tensor],
    grads: list[torch.Tensor],
    moments: Sequence[Moments],
    *,
    norms: torch.Tensor,
    betas: tuple[float, float],
    eps: float,
) -> None:
    """out <- m / (sqrt(v) + eps), bias-corrected, after the moments have taken in `grads`; all float32.

    Where one of `norms` is not finite, nothing happens: moments stay, directions are zero.
    """
    overflow = (~norms.isfinite().all()).to(torch.float32)
    steps = [m.num_steps for m in moments]
    torch._foreach_add_(steps, 1.0 - overflow)
    torch._foreach_zero_(out)
    torch._fused_adamw_(
        out,
        grads,
        [m.mean for m in moments],
        [m.mean_square for m in moments],
        [],
        steps,
        lr=-1.0,  # from zero, by +1: the direction itself
        beta1=betas[0],
        beta2=betas[1],
        weight_decay=0.0,
        eps=eps,
        amsgrad=False,
        maximize=False,
        grad_scale=None,
        found_inf=overflow,
    )


@torch.no_grad()
def take_back_(grads: list[torch.Tensor], moments: Sequence[Moments], *, betas: tuple[float, float]) -> None:
    """The moments as they were before they took in finite `grads` (as clipped), but for rounding."""
    for grad, m in zip(grads, moments, strict=True):
        m.mean.sub_(grad, alpha=1 - betas[0]).div_(betas[0] or 1.0)
        m.mean_square.addcmul_(grad, grad, value=betas[1] - 1).div_(betas[1] or 1.0).clamp_(min=0.0)
        m.num_steps.sub_(1.0)
        if float(m.num_steps) == 0:
            m.reset()
