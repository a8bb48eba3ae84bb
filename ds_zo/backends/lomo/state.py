"""The states of parameters in checkpoints: moments and rounding residues."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ds_zo.backends.lomo.parameters import ParameterState
from ds_zo.checkpoint.errors import CheckpointError
from ds_zo.config import Resolved
from ds_zo.optim import AdamMoments, FactoredMoments


def saved_states(states: Sequence[ParameterState]) -> dict[str, Any]:
    return {
        "moments": {state.name: state.moments.state_dict() for state in states if state.moments is not None},
        "residues": {state.name: state.residue for state in states if state.residue is not None},
    }


def check_saved_states(states: Sequence[ParameterState], saved: Mapping[str, Any], config: Resolved) -> None:
    """Raises if `load_saved_states` cannot load `saved`."""
    for state in states:
        moments = saved["moments"].get(state.name)
        residue = saved.get("residues", {}).get(state.name)
        if moments is not None and ("mean" in moments) is not state.is_adapter:
            was, now = (config.backend, "an adapter") if state.is_adapter else ("an adapter", config.backend)
            raise CheckpointError(
                f"{state.name} was trained as {was} in the checkpoint and is trained as {now} here: write the "
                f"checkpoint's adapter in {config.params_at}, or pass load_optimizer_states=False"
            )
        if residue is not None and residue.shape != state.parameter.shape:
            raise ValueError(
                f"the rounding residue of {state.name} has the shape of the parameter, "
                f"{tuple(state.parameter.shape)}, got {tuple(residue.shape)}"
            )
        if moments is not None:
            _moments_of(state, moments, torch.device("meta"))


def load_saved_states(
    states: Sequence[ParameterState], saved: Mapping[str, Any], *, device: torch.device, keeps_residues: bool
) -> None:
    for state in states:
        residue = saved.get("residues", {}).get(state.name) if keeps_residues else None
        state.residue = None if residue is None else residue.to(device, state.parameter.dtype, copy=True)
        moments = saved["moments"].get(state.name)
        state.moments = None if moments is None else _moments_of(state, moments, device)


def _moments_of(state: ParameterState, saved: Mapping[str, Any], device: torch.device) -> AdamMoments | FactoredMoments:
    return (AdamMoments if state.is_adapter else FactoredMoments).from_state_dict(saved, device=device)
