"""Losses of timed steps, smoothed, and the seconds until they reach a target."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

SMOOTHED_STEPS = 4
"""Losses are means over this many steps: one batch's says little."""


def smoothed(losses: Sequence[float]) -> list[float]:
    windows = (losses[max(0, i + 1 - SMOOTHED_STEPS) : i + 1] for i in range(len(losses)))
    return [sum(window) / len(window) for window in windows]


def time_to_loss(row: dict[str, Any], target: float) -> float | None:
    """Seconds of training until the smoothed loss is at `target`, at the mean speed of the timed steps."""
    for i, loss in enumerate(smoothed(row.get("losses") or [])):
        if loss <= target:
            return float((i + 1) * row["step_wall_s"])
    return None
