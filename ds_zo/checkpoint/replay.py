"""Computes a unit's weights of a later step from its stored planes and the replay log."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ds_zo import ops
from ds_zo.checkpoint.layout import allocate_buffers, fill_unit, rebuild
from ds_zo.checkpoint.reader import Saved
from ds_zo.streaming.units import PlacedParameter, Unit


@dataclass(frozen=True)
class Recipe:
    """Settings of a run that determine its updates and do not change."""

    seed: int
    distribution: ops.Distribution
    rounding: ops.Rounding
    num_directions: int
    interval: int
    capacity: int
    """Number of rows in the replay log. A unit that lags by that many steps folds."""

    def noise(self, step: int) -> ops.Noise:
        return ops.Noise(self.seed, step, distribution=self.distribution, rounding=self.rounding)

    def pending(self, unit: Unit, rows: torch.Tensor, first_row_step: int, step: int) -> ops.Pending:
        """The updates of steps `unit.version` to `step - 1`, whose rows are in a log from `first_row_step` on."""
        first = (unit.version - first_row_step) % rows.shape[0]
        return ops.Pending(rows, first, step - unit.version if unit.trainable else 0, self.num_directions)


def fold(unit: Unit, *, rows: torch.Tensor, first_row_step: int, step: int, recipe: Recipe) -> None:
    """Folds the updates of steps `unit.version` to `step - 1` into the stored planes, as the forward of `step` does."""
    pending = recipe.pending(unit, rows, first_row_step, step)
    for part, planes in zip(unit.parts, unit.planes(unit.store_buffer, unit.low_buffer), strict=True):
        if part.frozen:
            continue
        ops.replay_perturb(
            planes,
            table=part.table(unit.store_buffer.device),
            noise=recipe.noise(step),
            pending=pending,
            store=ops.Store(planes, fold=True),
        )
    unit.folded(step)


def values(
    unit: Unit, *, rows: torch.Tensor, first_row_step: int, step: int, recipe: Recipe, exact: bool = False
) -> Iterator[tuple[PlacedParameter, torch.Tensor]]:
    """The weights of `step`, in the parameters' own dtype, or in float32 if `exact`. The planes do not change."""
    pending = recipe.pending(unit, rows, first_row_step, step)
    for part, planes in zip(unit.parts, unit.planes(unit.store_buffer, unit.low_buffer), strict=True):
        if part.direct:
            yield from ((placed, placed.view(planes.storage)) for placed in part.placed)
            continue
        dtype = torch.float32 if exact else part.dtype
        out = torch.empty(part.numel, dtype=dtype, device=unit.store_buffer.device)
        if part.frozen:
            part.decode_(out, planes)
            yield from ((placed, placed.view(out)) for placed in part.placed)
            continue
        ops.replay_perturb(
            planes,
            table=part.table(unit.store_buffer.device),
            noise=recipe.noise(step),
            pending=pending,
            copies=ops.Copies(out),
        )
        yield from ((placed, placed.view(out)) for placed in part.placed)


def recipe_of(state: Mapping[str, Any]) -> Recipe:
    if state["noise_version"] != ops.NOISE_VERSION:
        raise ValueError(
            f"this ds_zo makes noise of version {ops.NOISE_VERSION}, and the checkpoint has version "
            f"{state['noise_version']}: use the ds_zo that wrote it"
        )
    names = ("seed", "distribution", "rounding", "num_directions", "interval")
    return Recipe(**{name: state[name] for name in names}, capacity=state["rows"].shape[0])


def saved_values(
    saved: Saved, *, device: torch.device | str = "cpu", exact: bool = False
) -> Iterator[tuple[PlacedParameter, torch.Tensor]]:
    """All weights of a ZO checkpoint's step. One unit is in memory at a time."""
    for description in saved.backend_state["units"]:
        yield from unit_values(saved, description, device=device, exact=exact)


def unit_values(
    saved: Saved, description: Mapping[str, Any], *, device: torch.device | str = "cpu", exact: bool = False
) -> Iterator[tuple[PlacedParameter, torch.Tensor]]:
    """The weights of one unit of a ZO checkpoint, given its description there."""
    device = torch.device(device)
    state = saved.backend_state
    omitted = set(state["omitted"])
    unit = rebuild(description)
    allocate_buffers(unit, device)
    fill_unit(unit, saved.tensor, omitted=omitted)
    unit.rewritten(description["version"])
    rows = state["rows"].to(device)
    found = values(unit, rows=rows, first_row_step=0, step=state["step"], recipe=recipe_of(state), exact=exact)
    yield from ((placed, value) for placed, value in found if placed.name not in omitted)
