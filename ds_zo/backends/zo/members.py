"""The members of a step with rank-1 noise: which rows of a forward each evaluates, and what its losses say.

[Note: members] A member is a direction of the log: it has its own z, and its own coefficient. All members of a rank are
evaluated in one pass, over weights without noise. The rows of the batch are repeated so that each member has its own
rows, and the forwards of linear modules and embeddings add its noise to these rows (`member_forwards`). The projected
gradient of a member is that of two passes: (mean loss of its + rows - mean loss of its - rows) / (2 zo_eps).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch

from ds_zo.backends.common.chunked_loss import RowLosses
from ds_zo.backends.zo.outputs import loss_of

Shaping = Literal["none", "zscore", "rank"]


@dataclass(frozen=True)
class MemberRows:
    """The rows of one forward: for each member, for + and then -, the sequences that it evaluates."""

    num_sequences: int
    num_members: int
    antithetic: bool

    def __post_init__(self) -> None:
        fewer, more = sorted((self.num_sequences, self.num_members))
        if fewer == 0 or more % fewer:
            raise ValueError(
                "of a rank's members and the sequences of its batch, the smaller number must divide the larger one, "
                f"got {self.num_members} members and {self.num_sequences} sequences: change num_members or the batch, "
                "and drop a last batch that is smaller, by drop_last of DataLoader or dataloader_drop_last of Trainer "
                "(optimizer.params.num_members)"
            )

    @property
    def num_signs(self) -> int:
        return 2 if self.antithetic else 1

    @property
    def num_each(self) -> int:
        """Number of rows of a member with one sign."""
        return max(1, self.num_sequences // self.num_members)

    @property
    def num_rows(self) -> int:
        return self.num_members * self.num_signs * self.num_each

    @property
    def num_groups(self) -> int:
        """Number of groups of members that are compared: the members of one sequence, or all."""
        return self.num_sequences if self.num_members > self.num_sequences else 1

    def repeated(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor with a row for each sequence, with a row for each row of the forward."""
        rows = tensor.repeat_interleave(max(1, self.num_members // self.num_sequences), dim=0)
        rows = rows.unflatten(0, (self.num_members, 1, self.num_each))
        return rows.expand(-1, self.num_signs, *rows.shape[2:]).flatten(0, 2)

    def by_member(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor with a row for each row of the forward, as [member, sign, row, ...]."""
        return tensor.unflatten(0, (self.num_members, self.num_signs, self.num_each))

    def of_sequences(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor with a row for each row of the forward, with the first row of each sequence."""
        plus = self.by_member(tensor)[:, 0]
        return plus.flatten(0, 1)[:: max(1, self.num_members // self.num_sequences)]

    def parts(self) -> list[slice]:
        """The rows of each member and sign."""
        return [slice(at, at + self.num_each) for at in range(0, self.num_rows, self.num_each)]


def losses_of_members(found: RowLosses, output: Any, rows: MemberRows) -> torch.Tensor | None:
    """The losses [member, sign] of the forward that returned `output`. None if its loss is not the causal loss that
    `found` has seen."""
    if found.loss is None or loss_of(output) is not found.loss or found.loss._version != found.version:
        return None
    if len(found.sums) != rows.num_rows:
        return None
    sums, counts = rows.by_member(found.sums).sum(2), rows.by_member(found.counts).sum(2)
    if found.num_items is None:
        losses = sums / counts
        return torch.where(counts > 0, losses, losses.nanmean())  # a member without labels has no say
    return sums * (rows.num_sequences / rows.num_each) / found.num_items


def differences(losses: torch.Tensor, rows: MemberRows, *, shaping: Shaping) -> torch.Tensor:
    """For each member, what stands for `l+ - l-` in the update. `losses`: [member, sign]."""
    shape = _SHAPES[shaping]
    groups = losses.reshape(rows.num_groups, -1, rows.num_signs)
    shaped = shape(groups.flatten(1)).view_as(groups)
    if rows.antithetic:
        found = shaped[..., 0] - shaped[..., 1]
    else:  # the other loss is as far from the mean on its other side
        found = 2 * (shaped[..., 0] - shaped.mean(1))
    return found.flatten()


def _zscores(scores: torch.Tensor) -> torch.Tensor:
    centred = scores - scores.mean(1, keepdim=True)
    deviation = centred.square().mean(1, keepdim=True).sqrt()
    return centred / deviation.clamp_min(torch.finfo(scores.dtype).tiny)


def _ranks(scores: torch.Tensor) -> torch.Tensor:
    """From -0.5 to 0.5 in the order of the scores. Equal scores have equal ranks."""
    ours, theirs = scores[:, :, None], scores[:, None, :]
    above = (ours > theirs).float().sum(2) - (ours < theirs).float().sum(2)
    found = above / (2 * max(1, scores.shape[1] - 1))
    return found.masked_fill(~scores.isfinite().all(1, keepdim=True), torch.nan)


_SHAPES: dict[Shaping, Callable[[torch.Tensor], torch.Tensor]] = {
    "none": lambda scores: scores,
    "zscore": _zscores,
    "rank": _ranks,
}
