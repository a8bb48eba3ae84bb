"""Reads a task's rows: from a folder with a JSONL file for each split, one file cut into splits, or the Hub."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ds_zo.config.json_text import parse_json
from ds_zo.tasks.errors import TaskError
from ds_zo.tasks.hub import HubName, read_official_split
from ds_zo.tasks.sampling import NUM_TEST, Draw

Split = Literal["train", "dev", "test"]
SPLITS: tuple[Split, ...] = ("train", "dev", "test")
Row = dict[str, Any]

_CUT_PERIOD = 20
"""Of every twenty rows of a single file, one is for dev and one for test."""


OFFICIAL_TEST = "validation.jsonl"
"""A folder with this file and without dev.jsonl has a suite's official splits, from which train, dev and test are
drawn."""


@dataclass(frozen=True)
class DataSource:
    """The source of a task's rows. At most one of the first three fields is set; none for a task that makes its own
    rows."""

    folder: Path | None = None
    """A folder with train.jsonl, dev.jsonl and test.jsonl, or with the official train.jsonl and validation.jsonl."""
    file: Path | None = None
    """One .jsonl file, or plain text, cut into the three splits by `cut`."""
    from_hub: bool = False
    """Whether to read the official splits from the Hub, with `datasets`."""
    draw: Draw | None = None
    """The subset to use. None: `Draw()` for official splits, all rows of other splits."""

    def __post_init__(self) -> None:
        given = [str(place) for place in (self.folder, self.file) if place is not None]
        given += ["the Hub"] * self.from_hub
        if len(given) > 1:
            raise TaskError(f"give a folder or a file of data or the Hub, not both: got {' and '.join(given)}")

    @property
    def is_empty(self) -> bool:
        return self.folder is None and self.file is None and not self.from_hub


def read_jsonl(path: Path) -> list[Row]:
    """All rows of a file, each a JSON object; blank lines are skipped."""
    if not path.is_file():
        beside = sorted(p.name for p in path.parent.glob("*")) if path.parent.is_dir() else None
        found = (
            f"that folder holds {', '.join(beside) or 'nothing'}" if beside is not None else "there is no such folder"
        )
        raise TaskError(f"looked for the file {path}: not found ({found})")
    with path.open(encoding="utf-8-sig", errors="surrogateescape") as lines:
        return parse_jsonl(lines, place=str(path))


def parse_jsonl(lines: Iterable[str], *, place: str) -> list[Row]:
    """The rows of a file's lines; `place` names the file in errors."""
    rows: list[Row] = []
    for number, line in enumerate(lines, start=1):
        if not line.isascii() and any("\udc80" <= char <= "\udcff" for char in line):
            raise TaskError(f"files of rows are UTF-8; {place}:{number} is not")
        if not line.strip():
            continue
        try:
            row = parse_json(line)
        except ValueError as error:
            raise TaskError(f"every line must be one JSON object; {place}:{number} is not JSON ({error})") from None
        if not isinstance(row, dict):
            raise TaskError(f"every line must be one JSON object; {place}:{number} is a {type(row).__name__}")
        rows.append(row)
    if not rows:
        raise TaskError(f"{place} has no rows")
    return rows


def check_fields(rows: Sequence[Row], fields: Sequence[str], *, task: str, place: str) -> None:
    """Raises unless every row has the task's fields. Rows may have further fields."""
    for number, row in enumerate(rows, start=1):
        missing = [field for field in fields if field not in row]
        if missing:
            raise TaskError(
                f"task {task} reads the fields {', '.join(fields)}; row {number} of {place} lacks {', '.join(missing)} "
                f"(fields found: {', '.join(map(str, row)) or 'none'})"
            )
        empty = [field for field in fields if row[field] is None]
        if empty:  # the prompt would contain "None"
            raise TaskError(f"task {task} needs {', '.join(empty)}, which is null in row {number} of {place}: {row}")


def cut(rows: Sequence[Row], split: Split, *, place: str) -> list[Row]:
    """The rows of one split of a file without splits. Splits are disjoint, and the same in every run."""
    if len(rows) < _CUT_PERIOD:
        raise TaskError(
            f"one file is cut into train, dev and test, which takes at least {_CUT_PERIOD} rows; {place} has "
            f"{len(rows)} (a folder with train.jsonl, dev.jsonl and test.jsonl may be as small as you like)"
        )
    part = {_CUT_PERIOD - 2: "dev", _CUT_PERIOD - 1: "test"}
    return [row for i, row in enumerate(rows) if part.get(i % _CUT_PERIOD, "train") == split]


def read_rows(
    source: DataSource, split: Split, *, fields: Sequence[str], task: str, hub: HubName | None = None
) -> list[Row]:
    """Reads the rows of one split of a task and checks their fields."""

    def read(path: Path) -> list[Row]:
        rows = read_jsonl(path)
        check_fields(rows, fields, task=task, place=str(path))
        return rows

    if source.from_hub:
        if hub is None:
            raise TaskError(f"task {task} has no public copy on the Hub: give its data (--data-dir or --data)")
        rows = read_official_split(hub, hub.test if split == "test" else "train", task=task)
        check_fields(rows, fields, task=task, place=f"{hub.dataset} on the Hub")
        return _draw_official(rows, split, draw=source.draw or Draw())
    if source.folder is not None:
        if not source.folder.is_dir():
            raise TaskError(
                f"task {task} reads train.jsonl, dev.jsonl and test.jsonl from a folder; "
                f"looked for {source.folder}: not a folder"
            )
        if (source.folder / OFFICIAL_TEST).is_file() and not (source.folder / "dev.jsonl").is_file():
            name = OFFICIAL_TEST if split == "test" else "train.jsonl"
            return _draw_official(read(source.folder / name), split, draw=source.draw or Draw())
        return draw_ready(read(source.folder / f"{split}.jsonl"), split, draw=source.draw)
    if source.file is not None:
        return draw_ready(cut(read(source.file), split, place=str(source.file)), split, draw=source.draw)
    public = ", or the Hub's copy (--hub)" if hub is not None else ""
    raise TaskError(
        f"task {task} needs data: a folder with train.jsonl, dev.jsonl and test.jsonl (--data-dir), "
        f"or one .jsonl file (--data), with the fields {', '.join(fields)}{public}"
    )


def draw_ready(rows: list[Row], split: Split, *, draw: Draw | None) -> list[Row]:
    """The requested subset of a split that was read whole; all rows if `draw` requests no number."""
    asked = None if draw is None else draw.asked(split)
    return rows if draw is None or asked is None else draw.pick(rows, asked)


def _draw_official(rows: list[Row], split: Split, *, draw: Draw) -> list[Row]:
    if split == "test":
        return draw.pick(rows, NUM_TEST if draw.num_test is None else draw.num_test)
    train, dev = draw.cut_train(rows)
    return train if split == "train" else dev
