"""Rows, each one JSON object on a line of a file, and the Markdown tables made of them."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

Row = dict[str, Any]


def read_objects(path: Path) -> list[Row]:
    """Reads every line that holds an object, and skips lines that a killed process left unfinished."""
    found = []
    for line in path.read_text(encoding="utf-8").splitlines():
        with suppress(json.JSONDecodeError):
            value = json.loads(line)
            found += [value] if isinstance(value, dict) else []  # a cut line may still parse as a number
    return found


def append_row(path: Path, row: Row) -> None:
    """Appends a row by one write, so that runs that end together do not mix their lines. Starts a new line if a killed
    process left one unfinished."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+b") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - 1))
        torn = file.read(1) not in (b"", b"\n")
        file.write(b"\n" * torn + json.dumps(row).encode() + b"\n")
        file.flush()
        os.fsync(file.fileno())


def table_lines(heads: Sequence[str], cells: Iterable[Sequence[str]]) -> list[str]:
    """The lines of a Markdown table."""
    escaped = ([cell.replace("|", "\\|") for cell in row] for row in cells)
    return [f"| {' | '.join(row)} |" for row in (heads, ["---"] * len(heads), *escaped)]


def table(heads: Sequence[str], cells: Iterable[Sequence[str]]) -> str:
    return "\n".join(table_lines(heads, cells))
