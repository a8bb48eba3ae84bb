"""Rows: one JSON object a line of a file, and the Markdown tables that are made of them."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

Row = dict[str, Any]


def read_objects(path: Path) -> list[Row]:
    """Every line that holds an object: what a killed process left half-written is passed over."""
    found = []
    for line in path.read_text(encoding="utf-8").splitlines():
        with suppress(json.JSONDecodeError):
            value = json.loads(line)
            found += [value] if isinstance(value, dict) else []  # a number may be all that is left of a line
    return found


def append_row(path: Path, row: Row) -> None:
    """One line by one write, so that runs that end together do not mix theirs; also after a line that a killed process
    left unfinished."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+b") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - 1))
        torn = file.read(1) not in (b"", b"\n")
        file.write(b"\n" * torn + json.dumps(row).encode() + b"\n")
        file.flush()
        os.fsync(file.fileno())


def table_lines(heads: Sequence[str], cells: Iterable[Sequence[str]]) -> list[str]:
    """Of a Markdown table."""
    escaped = ([cell.replace("|", "\\|") for cell in row] for row in cells)
    return [f"| {' | '.join(row)} |" for row in (heads, ["---"] * len(heads), *escaped)]


def table(heads: Sequence[str], cells: Iterable[Sequence[str]]) -> str:
    return "\n".join(table_lines(heads, cells))
