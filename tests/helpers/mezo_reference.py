"""Plain MeZO, without blocks, streams, replay or twins: what the ZO backend has to equal.

It shares one thing with the package, the noise. Clean weights are kept apart in float32, each loss is measured on a
copy that was perturbed from them, and the update is made with the operations of `ds_zo.ops` in their order.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import nn

from ds_zo import ops

Weights = dict[str, torch.Tensor]


class PlainMeZO:
    """Trains a copy of `model`."""

    def __init__(
        self,
        model: nn.Module,
        *,
        lr: float,
        weight_decay: float = 0.0,
        zo_eps: float = 1e-3,
        num_directions: int = 1,
        distribution: ops.Distribution = "normal",
        seed: int = 0,
    ) -> None:
        self.probe = copy.deepcopy(model).train()
        for module in self.probe.modules():
            if getattr(getattr(module, "config", None), "use_cache", False):
                module.config.use_cache = False  # type: ignore[union-attr]
        self.weights: Weights = {n: p.detach().clone() for n, p in self.probe.named_parameters()}
        self.frozen = {n for n, p in self.probe.named_parameters() if not p.requires_grad}
        self.lr = lr
        self._decay = (1.0 - torch.tensor(lr) * torch.tensor(weight_decay)).item()
        self.zo_eps, self.num_directions = zo_eps, num_directions
        self.largest_z = 1.0 if distribution == "rademacher" else 6.0
        self._offsets: dict[str, int] = {}
        offset = 0
        for name, value in self.weights.items():
            self._offsets[name] = offset
            offset += value.numel()
        numel, device = offset, next(iter(self.weights.values())).device
        self._draw = lru_cache(num_directions)(
            lambda step, direction: ops.noise(seed, step, direction, 0, numel, distribution, device)
        )
        self._padding_rows = padding_rows(self.probe)
        self.num_steps = 0

    def noise(self, name: str, direction: int) -> torch.Tensor:
        """z is one long vector, of which a parameter has the stretch that starts at its offset. It is 0 for a row of
        padding."""
        value, offset = self.weights[name], self._offsets[name]
        z = self._draw(self.num_steps, direction)[offset : offset + value.numel()].view(value.shape)
        if name in self._padding_rows:
            z = z.clone()
            z[self._padding_rows[name]] = 0.0
        return z

    @torch.no_grad()
    def losses(
        self, batch: Mapping[str, Any], weights: Weights | None = None
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """(l+, l-) of each direction at this step, from `weights` (None: its own)."""
        return [
            (self._loss(batch, direction, +1.0, weights), self._loss(batch, direction, -1.0, weights))
            for direction in range(self.num_directions)
        ]

    def step(self, micro_batches: Sequence[Mapping[str, Any]]) -> list[float]:
        """One update; its projected gradients."""
        g = torch.zeros(self.num_directions)
        for batch in micro_batches:
            for direction, (plus, minus) in enumerate(self.losses(batch)):
                g[direction] += (plus - minus).cpu() / len(micro_batches) / (2 * self.zo_eps)
        self.update(g.tolist())
        return g.tolist()

    @torch.no_grad()
    def update(self, g: Sequence[float]) -> None:
        """theta = theta (1 - lr wd) - lr g z, in float32."""
        for name in self.weights:
            if name in self.frozen:
                continue
            value = self.weights[name] * self._decay
            for direction, projected in enumerate(g):
                coefficient = (torch.tensor(self.lr) / self.num_directions) * torch.tensor(
                    projected, dtype=torch.float32
                )
                value = value - self.noise(name, direction) * coefficient.item()
            self.weights[name] = value
        self.num_steps += 1

    def _loss(self, batch: Mapping[str, Any], direction: int, sign: float, weights: Weights | None) -> torch.Tensor:
        source = self.weights if weights is None else weights
        for name, parameter in self.probe.named_parameters():
            moved = source[name]
            if name not in self.frozen:
                moved = self.noise(name, direction) * (sign * self.zo_eps) + moved
            parameter.copy_(moved)
        output = self.probe(**batch)
        loss: torch.Tensor = output if isinstance(output, torch.Tensor) else output.loss
        return loss.detach().clone()


def padding_rows(model: nn.Module) -> dict[str, int]:
    """Rows of embeddings at `padding_idx`, by the names of their weights; none of a weight with a second name."""
    names = [id(p) for _, p in model.named_parameters(remove_duplicate=False)]
    return {
        f"{name}.weight": m.padding_idx
        for name, m in model.named_modules()
        if isinstance(m, nn.Embedding) and m.padding_idx is not None and names.count(id(m.weight)) == 1
    }
