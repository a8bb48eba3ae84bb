"""Rows of a task from local files: a folder with one JSONL file a split, or one file cut into splits."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ds_zo.tasks.errors import TaskError

Split = Literal["train", "dev", "test"]
SPLITS: tuple[Split, ...] = ("train", "dev", "test")
Row = dict[str, Any]

_CUT_PERIOD = 20
"""A single file gives two rows in twenty away: one to dev, one to test."""


@dataclass(frozen=True)
class DataSource:
    """Where a task's rows come from; exactly one of the two is set, or none for a task that makes its own."""

    folder: Path | None = None
    """Holds train.jsonl, dev.jsonl and test.jsonl."""
    file: Path | None = None
    """One .jsonl file, or plain text, cut into the three splits by `cut`."""

    def __post_init__(self) -> None:
        if self.folder is not None and self.file is not None:
            raise TaskError(f"give a folder or a file of data, not both: got {self.folder} and {self.file}")

    @property
    def is_empty(self) -> bool:
        return self.folder is None and self.file is None


def read_jsonl(path: Path) -> list[Row]:
    """All rows of a file, each a JSON object; blank lines are skipped."""
    if not path.is_file():
        beside = sorted(p.name for p in path.parent.glob("*")) if path.parent.is_dir() else None
        found = (
            f"that folder holds {', '.join(beside) or 'nothing'}" if beside is not None else "there is no such folder"
        )
        raise TaskError(f"looked for the file {path}: not found ({found})")
    rows: list[Row] = []
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                raise TaskError(f"every line must be one JSON object; {path}:{number} is not JSON ({error})") from None
            if not isinstance(row, dict):
                raise TaskError(f"every line must be one JSON object; {path}:{number} is a {type(row).__name__}")
            rows.append(row)
    if not rows:
        raise TaskError(f"{path} has no rows")
    return rows


def check_fields(rows: Sequence[Row], fields: Sequence[str], *, task: str, place: str) -> None:
    """Every row must have the task's fields; more are welcome."""
    for number, row in enumerate(rows, start=1):
        missing = [field for field in fields if field not in row]
        if missing:
            raise TaskError(
                f"task {task} reads the fields {', '.join(fields)}; row {number} of {place} lacks {', '.join(missing)} "
                f"(fields found: {', '.join(map(str, row)) or 'none'})"
            )


def cut(rows: Sequence[Row], split: Split, *, place: str) -> list[Row]:
    """The rows of one split of a file that has no splits of its own; disjoint, and the same in every run."""
    if len(rows) < _CUT_PERIOD:
        raise TaskError(
            f"one file is cut into train, dev and test, which takes at least {_CUT_PERIOD} rows; {place} has "
            f"{len(rows)} (a folder with train.jsonl, dev.jsonl and test.jsonl may be as small as you like)"
        )
    part = {_CUT_PERIOD - 2: "dev", _CUT_PERIOD - 1: "test"}
    return [row for i, row in enumerate(rows) if part.get(i % _CUT_PERIOD, "train") == split]


def read_rows(source: DataSource, split: Split, *, fields: Sequence[str], task: str) -> list[Row]:
    """One split of a JSONL task, its fields checked."""
    if source.folder is not None:
        if not source.folder.is_dir():
            raise TaskError(
                f"task {task} reads train.jsonl, dev.jsonl and test.jsonl from a folder; "
                f"looked for {source.folder}: not a folder"
            )
        path = source.folder / f"{split}.jsonl"
        rows = read_jsonl(path)
        check_fields(rows, fields, task=task, place=str(path))
        return rows
    if source.file is not None:
        rows = read_jsonl(source.file)
        check_fields(rows, fields, task=task, place=str(source.file))
        return cut(rows, split, place=str(source.file))
    raise TaskError(
        f"task {task} needs data: a folder with train.jsonl, dev.jsonl and test.jsonl (--data-dir), "
        f"or one .jsonl file (--data), with the fields {', '.join(fields)}"
    )
