"""The one error of this package."""

from __future__ import annotations


class CheckpointError(RuntimeError):
    """A checkpoint could not be written, or must not be loaded. What was there before is untouched."""
