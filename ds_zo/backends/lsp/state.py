"""The state of each parameter in checkpoints, and its transfer from the owner rank to the rank that writes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from ds_zo.backends.lsp.groups import MatrixAndMoments
from ds_zo.backends.lsp.matrices import Candidate, Subspace, first_projectors
from ds_zo.backends.lsp.payload import ErrorFeedback
from ds_zo.backends.lsp.ranks import CollectiveThread
from ds_zo.backends.lsp.shared_groups import SharedHostGroup
from ds_zo.checkpoint.errors import CheckpointError
from ds_zo.config import LSPParams
from ds_zo.optim.subspace_adam import Moments
from ds_zo.projectors.sparse import SparseProjector

LAYOUT = 2
"""Version of the stored format. Layout 2 stores the states of a matrix transposed, as the products read them."""
_SIDES = ("down", "up")
"""The payloads that have rounding errors: gradients to the host, directions to the device."""


def moments_and_errors(moments: Moments, feedbacks: dict[str, tuple[ErrorFeedback, int]]) -> dict[str, Any]:
    """Moments and, by direction, the payloads' rounding errors; a direction without errors is left out."""
    errors = {side: feedback.error_of(i) for side, (feedback, i) in feedbacks.items()}
    found = {side: error for side, error in errors.items() if error is not None}
    return {"moments": moments.state_dict(), "errors": found}


def matrix_states(
    matrices_and_moments: Iterable[MatrixAndMoments], *, gathered: Mapping[str, dict[str, Any]]
) -> dict[str, dict[str, Any]]:
    """The states by parameter name. `gathered`: those that other ranks own, by name."""
    found = {}
    for matrix, moments, feedbacks in matrices_and_moments:
        if moments is not None:
            states = moments_and_errors(moments, feedbacks)
        elif matrix.name in gathered:
            states = gathered[matrix.name]
        else:
            raise CheckpointError(
                f"from ZeRO stage 1 on, ranks must gather their states before one saves them, got none of "
                f"{matrix.name}, which another rank owns: call save_checkpoint on every rank"
            )
        found[matrix.name] = {
            **states,
            "is_fitted": matrix.is_fitted,
            "subspace": None if matrix.subspace is None else matrix.subspace.state_dict(),
            "refitted": None if matrix.candidate is None else matrix.candidate.state_dict(),
        }
    return found


def check_layout(layout: int) -> None:
    if layout != LAYOUT:
        raise CheckpointError(
            f"LSP's states are stored in layout {LAYOUT}, the checkpoint's in {layout}: resume it with the version of "
            "ds_zo that wrote it, or take its weights alone (load_optimizer_states=False)"
        )


def check_matrix_states(matrices_and_moments: Iterable[MatrixAndMoments], states: Mapping[str, Any]) -> None:
    """Raises if `load_matrix_states` could not load the states."""
    for matrix, _, _ in matrices_and_moments:
        saved = states.get(matrix.name)
        if saved is not None and tuple(saved["moments"]["mean"].shape) != matrix.shape:
            raise CheckpointError(
                f"the checkpoint's subspace of {matrix.name} is {tuple(saved['moments']['mean'].shape)}, here it is "
                f"{matrix.shape}: resume with the checkpoint's subspace_dim, projector and edge"
            )
        if saved is not None:
            _check_matrix_state(saved, matrix.shape)


def _check_matrix_state(saved: Mapping[str, Any], shape: tuple[int, ...]) -> None:
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


def load_matrix_states(
    matrices_and_moments: Iterable[MatrixAndMoments],
    states: Mapping[str, Any],
    *,
    settings: LSPParams,
    device: torch.device,
) -> None:
    """Loads the states. A parameter without a saved state starts with new projectors and zero moments."""
    for matrix, moments, feedbacks in matrices_and_moments:
        saved = states.get(matrix.name)
        for feedback, i in feedbacks.values():
            feedback.set_error(i, None)
        if saved is None:
            if moments is not None:
                moments.reset()
            matrix.is_fitted = settings.projector != "learned"
            matrix.candidate = None
            if matrix.subspace is not None:
                matrix.subspace = first_projectors(matrix.parameter, matrix.index, settings, device=device)
            continue
        if moments is not None:
            moments.load_state_dict(saved["moments"])
        matrix.is_fitted = saved["is_fitted"]
        present, candidate = saved["subspace"], saved["refitted"]
        matrix.subspace = None if present is None else Subspace.from_state(present, device)
        matrix.candidate = None if candidate is None else Candidate.from_state(candidate, device)
        for side, error in saved["errors"].items():
            if side in feedbacks:
                feedback, i = feedbacks[side]
                feedback.set_error(i, error)


@torch.no_grad()
def gather_owned_states(groups: Sequence[SharedHostGroup], ranks: CollectiveThread) -> dict[str, dict[str, Any]]:
    """Gathers `moments_and_errors` of the parameters that other ranks own; the result is empty on all but the first
    rank. All ranks must call this. One tensor at a time is broadcast from device memory, because some communication
    backends can send from nowhere else."""
    found: dict[str, dict[str, Any]] = {}
    for group in groups:
        if group.owner is None or group.owner == 0:
            continue
        for i, matrix in enumerate(group.matrices):
            mine: dict[str, Any] | None = None
            if group.keeps_states:
                mine = moments_and_errors(
                    group.moments[i], {"down": (group.feedback_down, i), "up": (group.feedback_up, i)}
                )
            state = _broadcast_state(mine, matrix.shape, owner=group.owner, ranks=ranks)
            if ranks.index == 0:
                found[matrix.name] = state
    return found


def _broadcast_state(
    mine: dict[str, Any] | None, shape: tuple[int, ...], *, owner: int, ranks: CollectiveThread
) -> dict[str, Any]:
    """Broadcasts one parameter's state from its owner. `mine`: the state on the owner; None on other ranks."""

    def send(value: torch.Tensor) -> torch.Tensor:
        sent = value.to(ranks.device, torch.float32, copy=True)
        ranks.submit(lambda: ranks.broadcast_(sent, owner)).wait()
        return sent.cpu() if ranks.index == 0 else sent[:0]

    head = torch.zeros(1 + len(_SIDES))
    if mine is not None:
        has = [float(side in mine["errors"]) for side in _SIDES]
        head = torch.tensor([float(mine["moments"]["num_steps"]), *has])
    on_device = head.to(ranks.device, copy=True)
    ranks.submit(lambda: ranks.broadcast_(on_device, owner)).wait()
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
