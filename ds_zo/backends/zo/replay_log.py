"""The log of past updates, each a few numbers.

[Note: replay instead of write-back] A ZO update is `coefficient * noise(seed, step)`: a few numbers, whatever the
model's size. So a block's stored weights may lag behind. Materialising a block replays, in float32, the updates that
its stored weights do not include yet, and writes perturbed copies of the result. Only every `writeback_interval` steps
is the result rounded, stored and downloaded (a fold). Stored weights plus this log are a consistent state at every
step.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ds_zo import ops

CAPACITY = 64
"""Number of entries that are kept. A unit that lags this far behind must fold."""


class ReplayLog:
    """A ring buffer of entries on the device: `[step | decay of each group | coefficient of each group and direction]`.

    Coefficients are computed and read on the device. The host never waits for them.
    """

    def __init__(self, *, num_groups: int, num_directions: int, device: torch.device) -> None:
        self.num_groups, self.num_directions = num_groups, num_directions
        self.rows = torch.zeros(
            CAPACITY, 1 + num_groups + num_groups * num_directions, dtype=torch.float32, device=device
        )
        self.length = 0
        """Number of entries ever appended, which is the index of the current step."""
        self._zero = torch.zeros((), device=device)

    def of_no_changes(self) -> ReplayLog:
        """A log of the same shape, whose updates change nothing."""
        log = ReplayLog(num_groups=self.num_groups, num_directions=self.num_directions, device=self.rows.device)
        log.rows[:, 1 : 1 + self.num_groups] = 1.0
        return log

    @property
    def last_row(self) -> torch.Tensor:
        """The newest entry."""
        return self.rows[(self.length - 1) % CAPACITY]

    def append_row(self, row: torch.Tensor) -> None:
        """Appends an entry that an earlier run logged."""
        self.rows[self.length % CAPACITY].copy_(row)
        self.length += 1

    def newest(self, num_entries: int) -> ops.Pending:
        """The newest entries, to be replayed."""
        return ops.Pending(self.rows, (self.length - num_entries) % CAPACITY, num_entries, self.num_directions)

    def num_skipped(self, rows: torch.Tensor) -> int:
        """The number of entries among `rows` whose steps were skipped (`append`)."""
        coefficients = rows[:, 1 + self.num_groups :]
        return int(((coefficients == 0.0) & coefficients.signbit()).all(dim=1).sum())

    def append(self, g: torch.Tensor, *, lrs: Sequence[float], weight_decays: Sequence[float]) -> torch.Tensor:
        """Logs the update of a step with projected gradients `g` (one per direction). If `g` is not finite, the update
        changes nothing. Returns on the device whether `g` was finite. Numbers reach the device as kernel arguments: a
        copy from the host might wait for the upload of a block. Coefficients of a skipped step are -0.0, and those of
        other steps are not, so that `num_skipped` can tell them apart."""
        lr = torch.tensor(lrs, dtype=torch.float32)
        decays = (1.0 - lr * torch.tensor(weight_decays, dtype=torch.float32)).tolist()
        scales = (lr / self.num_directions).tolist()
        finite = torch.isfinite(g).all()
        row = self.rows[self.length % CAPACITY]
        row[:1].view(torch.int32).fill_(self.length)
        row_decays, coefficients = row[1 : 1 + self.num_groups], row[1 + self.num_groups :].view(self.num_groups, -1)
        for group, (decay, scale) in enumerate(zip(decays, scales, strict=True)):
            row_decays[group].fill_(decay)
            torch.add(self._zero, g, alpha=scale, out=coefficients[group])  # 0.0 + -0.0 is 0.0
        row_decays.masked_fill_(~finite, 1.0)
        coefficients.masked_fill_(~finite, -0.0)
        self.length += 1
        return finite
