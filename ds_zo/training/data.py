"""The task of a run, and its training batches."""

from __future__ import annotations

import argparse
import hashlib
import json
import runpy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from ds_zo.tasks import DataSource, Draw, GroupedOrder, SeededOrder, Task, make_task
from ds_zo.tasks.data import SPLITS
from ds_zo.training.errors import UserError


def task_of(args: argparse.Namespace) -> Task:
    """Makes the task of the options, and checks its data."""
    if args.task_file is not None:
        _run_task_file(args.task_file)
    task = make_task(args.task, _data_source(args), head=args.head)
    task.check()
    return task


def rows_digest(task: Task) -> str:
    """A short hash of the rows of all splits."""
    found = hashlib.sha256()
    for split in SPLITS:
        for row in task.rows(split):
            found.update(f"{split} {json.dumps(row, default=str)}\n".encode())
    return found.hexdigest()[:12]


def _run_task_file(path: Path) -> None:
    if not path.is_file():
        raise UserError(f"looked for a Python file at {path}: not found (--task-file)")
    runpy.run_path(str(path))


def _data_source(args: argparse.Namespace) -> DataSource:
    asked = {"num_train": args.num_train, "num_dev": args.num_dev, "num_test": args.num_test}
    given = {name: number for name, number in asked.items() if number is not None}
    draw = Draw(seed=args.data_seed, **given) if given or args.data_seed else None
    return DataSource(folder=args.data_dir, file=args.data, from_hub=args.hub, draw=draw)


class TrainingBatches:
    """The training sequences, in an order that depends on the seed alone."""

    def __init__(
        self, sequences: Sequence[Any], *, task: Task, args: argparse.Namespace, pad_token_id: int, batch_size: int
    ) -> None:
        self._sequences = sequences
        self._task = task
        self.pad_token_id = pad_token_id
        self.side = args.padding_side
        self.multiple = args.pad_multiple
        self.batch_size = batch_size
        """Sequences in a micro-batch of one rank."""
        self._order = self._make_order(args)

    def __len__(self) -> int:
        return len(self._sequences)

    def at(self, position: int) -> dict[str, torch.Tensor]:
        """Returns the micro-batch that begins at this position of the order."""
        return self._task.collate(
            [self._sequences[i] for i in self.indices(position)],
            pad_token_id=self.pad_token_id,
            side=self.side,
            multiple=self.multiple,
        )

    def indices(self, position: int) -> list[int]:
        """Returns the indices of the examples of that micro-batch."""
        return self._order.batch(position, self.batch_size)

    def _make_order(self, args: argparse.Namespace) -> SeededOrder:
        if not args.group_by_length:
            return SeededOrder(len(self._sequences), seed=args.seed)
        lengths = [len(sequence.input_ids) for sequence in self._sequences]
        try:
            return GroupedOrder(lengths, batch_size=self.batch_size, seed=args.seed)
        except ValueError as error:
            raise UserError(f"{error} (--group-by-length)") from None
