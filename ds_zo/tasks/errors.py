"""Errors in a task's name, its files or their fields."""

from __future__ import annotations


class TaskError(ValueError):
    """An error of the user in naming a task or its data. The message names the expected and the found value and the
    remedy."""
