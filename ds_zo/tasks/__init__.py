"""Prompts, metrics and data of the tasks that `ds-zo train` and the benchmarks run."""

from __future__ import annotations

from ds_zo.tasks.base import Choice, ChoiceTask, LabelledTask, LanguageTask, Task
from ds_zo.tasks.data import DataSource
from ds_zo.tasks.encoding import Encoded, collate, pad_token_id
from ds_zo.tasks.errors import TaskError
from ds_zo.tasks.heads import HeadTask
from ds_zo.tasks.hub import HubName
from ds_zo.tasks.order import GroupedOrder, SeededOrder
from ds_zo.tasks.registry import TASKS, make_task, register
from ds_zo.tasks.sampling import Draw
from ds_zo.tasks.score import Score
from ds_zo.tasks.scoring import Evaluator

__all__ = [
    "TASKS",
    "Choice",
    "ChoiceTask",
    "DataSource",
    "Draw",
    "Encoded",
    "Evaluator",
    "GroupedOrder",
    "HeadTask",
    "HubName",
    "LabelledTask",
    "LanguageTask",
    "Score",
    "SeededOrder",
    "Task",
    "TaskError",
    "collate",
    "make_task",
    "pad_token_id",
    "register",
]
