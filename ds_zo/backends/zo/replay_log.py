"""Past updates as numbers.

[Note: replay instead of write-back] A ZO update is `coefficient * noise(seed, step)`: a few numbers, whatever the
model's size. So a block's stored weights may lag: each visit replays the updates since the block was last folded, in
float32, on the way to the perturbed copies, and only every `writeback_interval` visits is the result rounded, stored
and sent back. Stored weights plus this log are a consistent state at every step.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

CAPACITY = 64
"""Entries kept. A unit that is this far behind must fold."""


class ReplayLog:
    """A ring of entries on the device: `[step | decay of each group | coefficient of each group and direction]`.

    Coefficients are computed and read on the device; the host never waits for them.
    """

    def __init__(self, *, num_groups: int, num_directions: int, device: torch.device) -> None:
        self.num_groups, self.num_directions = num_groups, num_directions
        self.rows = torch.zeros(
            CAPACITY, 1 + num_groups + num_groups * num_directions, dtype=torch.float32, device=device
        )
        self.length = 0
        """Entries ever appended: the number of the step that is being made."""

    @property
    def last_row(self) -> torch.Tensor:
        return self.rows[(self.length - 1) % CAPACITY]

    def append_row(self, row: torch.Tensor) -> None:
        """An update that was logged before, by this run's earlier life."""
        self.rows[self.length % CAPACITY].copy_(row)
        self.length += 1

    def append(self, g: torch.Tensor, *, lrs: Sequence[float], weight_decays: Sequence[float]) -> torch.Tensor:
        """Logs the update of a step whose projected gradients are `g` (one a direction). A `g` that is not finite
        becomes an update that changes nothing. Returns whether it was finite, on the device. Numbers travel as
        arguments of kernels: a copy of them might wait for the upload of a block."""
        lr = torch.tensor(lrs, dtype=torch.float32)
        decays = (1.0 - lr * torch.tensor(weight_decays, dtype=torch.float32)).tolist()
        scales = (lr / self.num_directions).tolist()
        finite = torch.isfinite(g).all()
        row = self.rows[self.length % CAPACITY]
        row[:1].view(torch.int32).fill_(self.length)
        kept, coefficients = row[1 : 1 + self.num_groups], row[1 + self.num_groups :].view(self.num_groups, -1)
        for group, (decay, scale) in enumerate(zip(decays, scales, strict=True)):
            kept[group].fill_(decay)
            torch.mul(g, scale, out=coefficients[group])
        kept.masked_fill_(~finite, 1.0)
        coefficients.masked_fill_(~finite, 0.0)
        self.length += 1
        return finite
