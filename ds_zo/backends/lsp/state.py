"""The state of each parameter in checkpoints, and its transfer from the owner rank to the rank that writes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from deepspeed.utils import logger

from ds_zo.backends.lsp.groups import MatrixAndMoments
from ds_zo.backends.lsp.matrices import Candidate, Subspace, first_projectors
from ds_zo.backends.lsp.ranks import CollectiveThread
from ds_zo.backends.lsp.shared_groups import SharedHostGroup
from ds_zo.checkpoint.errors import CheckpointError
from ds_zo.config import LSPParams
from ds_zo.projectors.sparse import SparseProjector

LAYOUT = 3
"""Version of the stored format. From layout 2 on, the states of a matrix are transposed, as the products read them."""
_KEYS = {2: "slots", LAYOUT: "matrices"}
"""The key of the matrices' states, for each layout that can be loaded."""


def matrix_states(
    matrices_and_moments: Iterable[MatrixAndMoments], *, gathered: Mapping[str, dict[str, Any]]
) -> dict[str, dict[str, Any]]:
    """The states by parameter name. `gathered`: those that other ranks own, by name."""
    found = {}
    for matrix, moments in matrices_and_moments:
        if moments is not None:
            saved_moments = moments.state_dict()
        elif matrix.name in gathered:
            saved_moments = gathered[matrix.name]
        else:
            raise CheckpointError(
                f"from ZeRO stage 1 on, ranks must gather their states before one saves them, got none of "
                f"{matrix.name}, which another rank owns: call save_checkpoint on every rank"
            )
        found[matrix.name] = {
            "moments": saved_moments,
            "is_fitted": matrix.is_fitted,
            "subspace": None if matrix.subspace is None else matrix.subspace.state_dict(),
            "refitted": None if matrix.candidate is None else matrix.candidate.state_dict(),
        }
    return found


def saved_matrices(state: Mapping[str, Any]) -> dict[str, Any]:
    """The states of matrices in a checkpoint, by name. Raises if they have a layout that cannot be loaded."""
    layout = state.get("layout", 1)
    if layout not in _KEYS:
        raise CheckpointError(
            f"LSP's states are stored in layout {LAYOUT}, the checkpoint's in {layout}: resume it with the version of "
            "ds_zo that wrote it, or take its weights alone (load_optimizer_states=False)"
        )
    return dict(state[_KEYS[layout]])


def check_matrix_states(matrices_and_moments: Iterable[MatrixAndMoments], states: Mapping[str, Any]) -> None:
    """Raises if `load_matrix_states` could not load the states."""
    for matrix, _ in matrices_and_moments:
        saved = states.get(matrix.name)
        if saved is not None and tuple(saved["moments"]["mean"].shape) != matrix.shape:
            remedy = "resume with the checkpoint's subspace_dim, projector and edge"
            if saved["subspace"] is not None and matrix.subspace is None:
                remedy += ' (for embeddings and head, which ds_zo 0.1 projected by default: "edge": "lsp")'
            raise CheckpointError(
                f"the checkpoint's subspace of {matrix.name} is {tuple(saved['moments']['mean'].shape)}, here it is "
                f"{matrix.shape}: {remedy}"
            )
        if saved is not None:
            _check_matrix_state(saved, matrix.shape)


def _check_matrix_state(saved: Mapping[str, Any], shape: tuple[int, ...]) -> None:
    mean_square = saved["moments"]["mean_square"]
    if tuple(mean_square.shape) != shape or saved["moments"]["num_steps"].numel() != 1:
        raise ValueError(f"the mean of squares has shape {tuple(mean_square.shape)}")
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
    if any(saved.get("errors") for saved in states.values()):
        logger.warning(
            "ds_zo: the checkpoint has rounding errors of bf16 or int8 copies (payload_dtype), which are dropped: LSP "
            "copies float32"
        )
    for matrix, moments in matrices_and_moments:
        saved = states.get(matrix.name)
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


@torch.no_grad()
def gather_owned_states(
    groups: Sequence[SharedHostGroup], ranks: CollectiveThread, *, keeps: bool, has_several_writers: bool
) -> dict[str, dict[str, Any]]:
    """Gathers the moments of the parameters that other ranks own. `keeps`: this rank writes checkpoints; the result is
    empty on other ranks. `has_several_writers`: not only the first rank writes. All ranks must call this. One tensor at
    a time is broadcast from device memory, because some communication backends can send from nowhere else."""
    found: dict[str, dict[str, Any]] = {}
    for group in groups:
        if group.owner is None or (group.owner == 0 and not has_several_writers):
            continue
        for i, matrix in enumerate(group.matrices):
            mine = group.moments[i].state_dict() if group.moments else None
            state = _broadcast_state(mine, matrix.shape, owner=group.owner, ranks=ranks, keeps=keeps)
            if keeps and mine is None:
                found[matrix.name] = state
    return found


def _broadcast_state(
    mine: Mapping[str, Any] | None, shape: tuple[int, ...], *, owner: int, ranks: CollectiveThread, keeps: bool
) -> dict[str, Any]:
    """Broadcasts the moments of one parameter from its owner. `mine`: the moments on the owner; None on other
    ranks."""

    def send(name: str, empty: torch.Tensor) -> torch.Tensor:
        sent = (empty if mine is None else torch.as_tensor(mine[name])).to(ranks.device, torch.float32, copy=True)
        ranks.submit(lambda: ranks.broadcast_(sent, owner)).wait()
        return sent.cpu() if keeps else sent

    num_steps = send("num_steps", torch.zeros(()))
    return {name: send(name, torch.empty(shape)) for name in ("mean", "mean_square")} | {"num_steps": num_steps}
