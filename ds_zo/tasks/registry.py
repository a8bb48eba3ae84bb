"""The registry of tasks by name."""

from __future__ import annotations

from typing import Literal, TypeVar

from ds_zo.tasks.base import ChoiceTask, LabelledTask, Task
from ds_zo.tasks.data import DataSource
from ds_zo.tasks.embedded_task import CodeOrText
from ds_zo.tasks.errors import TaskError
from ds_zo.tasks.glue import MNLI, MRPC, QNLI, QQP, SST2, STSB, CoLA
from ds_zo.tasks.heads import HeadTask
from ds_zo.tasks.language import Alpaca, Chat, Text
from ds_zo.tasks.superglue import CB, COPA, RTE, WSC, BoolQ, MultiRC, WiC

Head = Literal["lm", "classifier"]
T = TypeVar("T", bound=type[Task])

TASKS: dict[str, type[Task]] = {
    task.name: task
    for task in (
        *(CodeOrText, SST2, RTE, CB, BoolQ, WSC, WiC, MultiRC, COPA),
        *(CoLA, MRPC, QNLI, QQP, MNLI, STSB),
        *(Text, Alpaca, Chat),
    )
}


def register(task: T) -> T:
    """A class decorator that adds a user's task to the registry under its `name`."""
    if TASKS.get(task.name, task).__qualname__ != task.__qualname__:
        raise TaskError(f"there is a task named {task.name!r} already: {TASKS[task.name].__qualname__}")
    TASKS[task.name] = task
    return task


def make_task(name: str, source: DataSource | None = None, *, head: Head = "lm") -> Task:
    """The task of that name (any letter case) on its data, for a language model or for a classification head."""
    if name.lower() not in TASKS:
        raise TaskError(f"looked for a task named {name!r}: the tasks are {', '.join(sorted(TASKS))}")
    task = TASKS[name.lower()](source)
    if head == "lm":
        if isinstance(task, LabelledTask) and not isinstance(task, ChoiceTask):
            raise TaskError(f"task {task.name} asks for a number, not for one of a few words (--head classifier)")
        return task
    if not isinstance(task, LabelledTask):
        raise TaskError(f"task {task.name} has no labels to classify by: it needs a language model (--head lm)")
    return HeadTask(task)
