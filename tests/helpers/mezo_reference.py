"""Plain MeZO, without blocks, streams, replay or twins: what the ZO backend has to equal.

It shares one thing with the package, the noise. Each loss is measured by a whole pass over the perturbed model, one
pass after the other, from one random state. Updates are made with the operations of `ds_zo.ops` in their
order.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import nn

from ds_zo import ops
from tests.helpers.weights import Weights
from tests.helpers.zo_runs import EPS, LR, set_snapshot, snapshot


class PlainMeZO:
    """Trains a copy of `model`. Parameters that are frozen at the time of a step stay. Buffers are the same in all
    passes; where a forward changes other state of its modules, `copies_model` gives each pass a deep copy."""

    def __init__(
        self,
        model: nn.Module,
        *,
        lr: float = LR,
        weight_decay: float = 0.0,
        zo_eps: float = EPS,
        num_directions: int = 1,
        distribution: ops.Distribution = "normal",
        seed: int = 0,
        copies_model: bool = False,
    ) -> None:
        self.model = copy.deepcopy(model)
        self.copies_model = copies_model
        for module in self.model.modules():
            if getattr(getattr(module, "config", None), "use_cache", False):
                module.config.use_cache = False  # type: ignore[union-attr]
        self.lr, self.zo_eps, self.num_directions = lr, zo_eps, num_directions
        self.largest_z = 1.0 if distribution == "rademacher" else 6.0
        self.steps = 0
        self._decay = (1.0 - torch.tensor(lr) * torch.tensor(weight_decay)).item()
        self._offsets, numel = dict[str, int](), 0
        for name, p in self.model.named_parameters():
            self._offsets[name] = numel
            numel += p.numel()
        self._draw = lru_cache(num_directions)(
            lambda step, direction: ops.noise(seed, step, direction, 0, numel, distribution, p.device)
        )
        self._padding_rows = padding_rows(self.model)

    @property
    def weights(self) -> Weights:
        return {name: p.detach() for name, p in self.model.named_parameters()}

    @torch.no_grad()
    def load(self, weights: Weights) -> None:
        for name, p in self.model.named_parameters():
            p.copy_(weights[name])

    def noise(self, name: str, direction: int = 0) -> torch.Tensor:
        """z is one long vector, of which a parameter has the stretch that starts at its offset. It is 0 for a row of
        padding."""
        p, offset = self.model.get_parameter(name), self._offsets[name]
        z = self._draw(self.steps, direction)[offset : offset + p.numel()].view(p.shape)
        if name in self._padding_rows:
            z = z.clone()
            z[self._padding_rows[name]] = 0.0
        return z

    def passes(self, call: Callable[[nn.Module], Any], weights: Weights | None = None) -> list[Any]:
        """`call`'s results at theta + eps z and theta - eps z of each direction, from `weights` (None: its own). Random
        states end as after one pass."""
        start, results = snapshot(), []
        values = [*self.model.parameters(), *self.model.buffers()]
        own = [value.detach().clone() for value in values]
        with torch.no_grad():
            for direction in range(self.num_directions):
                for sign in (1.0, -1.0):
                    set_snapshot(start)
                    model = copy.deepcopy(self.model) if self.copies_model else self.model
                    self._perturb_(model, sign * self.zo_eps, direction, weights)
                    try:
                        results.append(call(model))
                    finally:
                        for value, before in zip(values, own, strict=True):
                            value.copy_(before)
        return results

    def step(self, *calls: Callable[[nn.Module], torch.Tensor]) -> list[float]:
        """One update by the mean of the losses that `calls` return. Returns the losses of the first one's passes."""
        losses = torch.stack([torch.stack(self.passes(call)).float().cpu() for call in calls])
        g = (losses[:, 0::2] - losses[:, 1::2]) / len(calls) / (2 * self.zo_eps)
        self.update(g.sum(0).tolist())
        return losses[0].tolist()

    @torch.no_grad()
    def update(self, g: Sequence[float]) -> None:
        """theta = theta (1 - lr wd) - lr g z, in float32."""
        for name, p in self.model.named_parameters():
            if p.requires_grad:
                value = p * self._decay
                for direction, projected in enumerate(g):
                    coefficient = torch.tensor(self.lr) / self.num_directions * torch.tensor(projected)
                    value = value - self.noise(name, direction) * coefficient.item()
                p.copy_(value)
        self.steps += 1

    def _perturb_(self, model: nn.Module, scale: float, direction: int, weights: Weights | None) -> None:
        for name, p in model.named_parameters():
            value = p if weights is None else weights[name]
            p.copy_(self.noise(name, direction) * scale + value if p.requires_grad else value)


def loss_on(batch: Mapping[str, Any]) -> Callable[[nn.Module], torch.Tensor]:
    def call(model: nn.Module) -> torch.Tensor:
        output = model(**batch)
        loss: torch.Tensor = output if isinstance(output, torch.Tensor) else output.loss
        return loss

    return call


def padding_rows(model: nn.Module) -> dict[str, int]:
    """Rows of embeddings at `padding_idx`, by the names of their weights; none of a weight with a second name."""
    names = [id(p) for _, p in model.named_parameters(remove_duplicate=False)]
    return {
        f"{name}.weight": m.padding_idx
        for name, m in model.named_modules()
        if isinstance(m, nn.Embedding) and m.padding_idx is not None and names.count(id(m.weight)) == 1
    }
