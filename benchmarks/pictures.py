"""Saves the pictures that are drawn from rows."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def save(figure: Figure, path: Path) -> None:
    """Writes the kind of picture that the path's suffix names. The texts of an SVG stay texts, and the same rows make
    the same file."""
    from matplotlib import rc_context

    path.parent.mkdir(parents=True, exist_ok=True)
    metadata = {"Date": None} if path.suffix == ".svg" else None
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "ds_zo"}):
        figure.savefig(path, dpi=150, metadata=metadata)
