"""What checkpoints hold of each parameter; states that only their owners keep, brought to the rank that writes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from ds_zo.backends.lsp.groups import Kept
from ds_zo.backends.lsp.matrices import Candidate, Subspace, first_projectors
from ds_zo.backends.lsp.payload import Carry
from ds_zo.backends.lsp.ranks import CollectiveThread
from ds_zo.backends.lsp.shared_groups import SharedHostGroup
from ds_zo.checkpoint.errors import CheckpointError
from ds_zo.config import LSPParams
from ds_zo.optim.subspace_adam import Moments
from ds_zo.projectors.sparse import SparseProjector

LAYOUT = 2
"""How the states of a matrix are stored: 2, transposed, as the products read them."""
_SIDES = ("down", "up")


def moments_and_errors(moments: Moments, carries: dict[str, tuple[Carry, int]]) -> dict[str, Any]:
    errors = {side: carry.error_of(i) for side, (carry, i) in carries.items()}
    found = {side: error for side, error in errors.items() if error is not None}
    return {"moments": moments.state_dict(), "errors": found}


def slot_states(kept: Iterable[Kept], *, gathered: Mapping[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """By parameter. `gathered`: other ranks' states."""
    found = {}
    for slot, moments, carries in kept:
        if moments is not None:
            states = moments_and_errors(moments, carries)
        elif slot.name in gathered:
            states = gathered[slot.name]
        else:
            raise CheckpointError(
                f"the states of {slot.name} are on another rank, which ZeRO stage 1 and above ask for: call "
                "save_checkpoint on every rank, which gathers them"
            )
        found[slot.name] = {
            **states,
            "is_fitted": slot.is_fitted,
            "subspace": None if slot.subspace is None else slot.subspace.state_dict(),
            "refitted": None if slot.candidate is None else slot.candidate.state_dict(),
        }
    return found


def check_layout(layout: int) -> None:
    if layout != LAYOUT:
        raise CheckpointError(
            f"LSP's states are stored in layout {LAYOUT}, the checkpoint's in {layout}: resume it with the version of "
            "ds_zo that wrote it, or take its weights alone (load_optimizer_states=False)"
        )


def check_slot_states(kept: Iterable[Kept], states: Mapping[str, Any]) -> None:
    """Raises where `load_slot_states` could not take them."""
    for slot, _, _ in kept:
        saved = states.get(slot.name)
        if saved is not None and tuple(saved["moments"]["mean"].shape) != slot.shape:
            raise CheckpointError(
                f"the checkpoint's subspace of {slot.name} is {tuple(saved['moments']['mean'].shape)}, here it is "
                f"{slot.shape}: resume with the checkpoint's subspace_dim, projector and edge"
            )
        if saved is not None:
            _check_slot_state(saved, slot.shape)


def _check_slot_state(saved: Mapping[str, Any], shape: tuple[int, ...]) -> None:
    tensors = [saved["moments"]["mean_square"], *saved["errors"].values()]
    if any(tuple(tensor.shape) != shape for tensor in tensors) or saved["moments"]["num_steps"].numel() != 1:
        raise ValueError(f"moments and errors have shapes {[tuple(tensor.shape) for tensor in tensors]}")
    bool(saved["is_fitted"])
    for key in ("subspace", "refitted"):
        if saved[key] is not None:
            int(saved[key]["num_draws"])
            for side in ("P", "Q"):
                SparseProjector.from_state(saved[key][side])
    candidate = saved["refitted"] or {}
    total, gain = candidate.get("total"), candidate.get("gain")
    if total is not None and tuple(total.t().shape) != shape:
        raise ValueError(f"a candidate's sum has shape {tuple(total.shape)}")
    int(candidate.get("num_batches", 0)), float(gain or 0.0)


def load_slot_states(
    kept: Iterable[Kept], states: Mapping[str, Any], *, settings: LSPParams, device: torch.device
) -> None:
    """A parameter without a state starts afresh."""
    for slot, moments, carries in kept:
        saved = states.get(slot.name)
        for carry, i in carries.values():
            carry.set_error(i, None)
        if saved is None:
            if moments is not None:
                moments.reset()
            slot.is_fitted = settings.projector != "learned"
            slot.candidate = None
            if slot.subspace is not None:
                slot.subspace = first_projectors(slot.parameter, slot.index, settings, device=device)
            continue
        if moments is not None:
            moments.load_state_dict(saved["moments"])
        slot.is_fitted = saved["is_fitted"]
        present, candidate = saved["subspace"], saved["refitted"]
        slot.subspace = None if present is None else Subspace.from_state(present, device)
        slot.candidate = None if candidate is None else Candidate.from_state(candidate, device)
        for side, error in saved["errors"].items():
            if side in carries:
                carry, i = carries[side]
                carry.set_error(i, error)


@torch.no_grad()
def gather_owned(groups: Sequence[SharedHostGroup], ranks: CollectiveThread) -> dict[str, dict[str, Any]]:
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


def _from_owner(
    mine: dict[str, Any] | None, shape: tuple[int, ...], *, owner: int, ranks: CollectiveThread
) -> dict[str, Any]:
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
