"""States that only their owners keep, brought to the rank that writes checkpoints."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ds_zo.engines.lsp_payload import Carry
from ds_zo.engines.lsp_ranks import RankLine
from ds_zo.engines.lsp_shared import SharedHostGroup
from ds_zo.optim.subspace_adam import Moments

_SIDES = ("down", "up")


def moments_and_errors(moments: Moments, carries: dict[str, tuple[Carry, int]]) -> dict[str, Any]:
    errors = {side: carry.errors[i] for side, (carry, i) in carries.items() if i in carry.errors}
    return {"moments": moments.state_dict(), "errors": errors}


@torch.no_grad()
def gather_owned(groups: Sequence[SharedHostGroup], ranks: RankLine) -> dict[str, dict[str, Any]]:
    """On the first rank: what `moments_and_errors` says of each parameter that another rank owns. Collective; one
    tensor at a time crosses a device, since some backends send from nowhere else."""
    found: dict[str, dict[str, Any]] = {}
    for group in groups:
        if group.owner is None or group.owner == 0:
            continue
        for i, slot in enumerate(group.slots):
            mine: dict[str, Any] | None = None
            if group.keeps_states:
                mine = moments_and_errors(group.moments[i], {"down": (group.carry_down, i), "up": (group.carry_up, i)})
            state = _from_owner(mine, slot.shape, owner=group.owner, ranks=ranks)
            if ranks.index == 0:
                found[slot.name] = state
    return found


def _from_owner(mine: dict[str, Any] | None, shape: tuple[int, ...], *, owner: int, ranks: RankLine) -> dict[str, Any]:
    def send(value: torch.Tensor) -> torch.Tensor:
        held = value.to(ranks.device, torch.float32, copy=True)
        ranks.ask(lambda: ranks.broadcast_(held, owner)).wait()
        return held.cpu() if ranks.index == 0 else held[:0]

    head = torch.zeros(1 + len(_SIDES))
    if mine is not None:
        has = [float(side in mine["errors"]) for side in _SIDES]
        head = torch.tensor([float(mine["moments"]["num_steps"]), *has])
    on_device = head.to(ranks.device, copy=True)
    ranks.ask(lambda: ranks.broadcast_(on_device, owner)).wait()
    head = on_device.cpu()

    def part(value: torch.Tensor | None) -> torch.Tensor:
        return send(torch.empty(shape) if value is None else value)

    moments = {name: part(None if mine is None else mine["moments"][name]) for name in ("mean", "mean_square")}
    errors = {
        side: part(None if mine is None else mine["errors"][side])
        for side, has_it in zip(_SIDES, head[1:].tolist(), strict=True)
        if has_it
    }
    return {"moments": {**moments, "num_steps": head[0].clone()}, "errors": errors}
