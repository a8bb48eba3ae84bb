"""AdaLOMO written plainly: all gradients first, then one parameter after the other, v as a full matrix."""

from __future__ import annotations

import torch
from torch import nn


class PlainAdaLOMO:
    def __init__(
        self,
        module: nn.Module,
        *,
        lr: float,
        weight_decay: float = 0.0,
        decay_rate: float = -0.8,
        eps: tuple[float, float] = (1e-30, 1e-3),
        clip_threshold: float = 1.0,
    ) -> None:
        self.parameters = list(module.parameters())
        self.lr, self.weight_decay, self.decay_rate = lr, weight_decay, decay_rate
        self.eps, self.clip_threshold = eps, clip_threshold
        self.averages: dict[int, list[torch.Tensor]] = {}
        self.t = 0

    @torch.no_grad()
    def step(self) -> None:
        self.t += 1
        beta = 1 - self.t**self.decay_rate
        for p in self.parameters:
            g = p.grad.double()
            square = g * g + self.eps[0]
            new = [square] if p.ndim < 2 else [square.mean(-1, keepdim=True), square.mean(-2, keepdim=True)]
            old = self.averages.get(id(p), [torch.zeros_like(value) for value in new])
            averages = self.averages[id(p)] = [beta * o + (1 - beta) * n for o, n in zip(old, new, strict=True)]
            if p.ndim < 2:
                v = averages[0]
            else:
                rows, cols = averages
                v = rows * cols / rows.mean(-2, keepdim=True)
            u = g / v.sqrt()
            u = u / max(1.0, (u.square().mean().sqrt() / self.clip_threshold).item())
            size = max(self.eps[1], p.double().square().mean().sqrt().item())
            p.copy_(p.double() * (1 - self.lr * self.weight_decay) - self.lr * size * u)

    def zero_grad(self) -> None:
        for p in self.parameters:
            p.grad = None
