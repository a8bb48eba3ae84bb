"""Rows of what ran, and the page docs/clients.md made of them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from clients.client import Client
from clients.environment import REPO

ROWS = REPO / "benchmarks" / "results" / "cpu_clients.jsonl"
PAGE = REPO / "docs" / "clients.md"
_STAGES = ("train", "resume", "export")


def read_rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []


def write_rows(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Writes rows in place of older rows of the same cases."""
    kept = {_case(row): row for row in [*read_rows(path), *rows]}
    lines = [json.dumps(kept[case]) + "\n" for case in sorted(kept)]
    path.write_text("".join(lines), encoding="utf-8")


def _case(row: Mapping[str, Any]) -> tuple[str, str, str]:
    return row["client"], row["task"], row["backend"]


def summary(rows: Sequence[Mapping[str, Any]]) -> str:
    """A table for the terminal."""
    heads = ("client", "version", "task", "backend", *_STAGES, "seconds")
    return _table(heads, [[str(row.get(head, "")) for head in heads] for row in rows])


def _table(heads: Sequence[str], cells: Sequence[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(row)} |" for row in (heads, ["---"] * len(heads), *cells))


def page(clients: Mapping[str, Client], rows: Sequence[Mapping[str, Any]]) -> str:
    return summary(rows) + "\n"
