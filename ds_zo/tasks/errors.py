"""What a user can get wrong about a task: its name, its files, their fields."""

from __future__ import annotations


class TaskError(ValueError):
    """The message says what was looked for, what was found and what to do."""
