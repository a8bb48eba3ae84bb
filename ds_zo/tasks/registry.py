"""Tasks by name."""

from __future__ import annotations

from ds_zo.tasks.base import Task
from ds_zo.tasks.classification import COPA, RTE, SST2, BoolQ
from ds_zo.tasks.data import DataSource
from ds_zo.tasks.embedded_task import CodeOrText
from ds_zo.tasks.errors import TaskError
from ds_zo.tasks.language import Alpaca, Text

TASKS: dict[str, type[Task]] = {task.name: task for task in (CodeOrText, SST2, RTE, BoolQ, COPA, Text, Alpaca)}


def make_task(name: str, source: DataSource | None = None) -> Task:
    """The task of that name (any letter case) on its data."""
    if name.lower() not in TASKS:
        raise TaskError(f"looked for a task named {name!r}: the tasks are {', '.join(sorted(TASKS))}")
    return TASKS[name.lower()](source)
