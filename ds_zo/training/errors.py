"""The error of a mistake that the user can correct."""

from __future__ import annotations


class UserError(ValueError):
    """A mistake of the user. `run_or_exit` shows it as one line, without a traceback."""
