"""Reads the text of a JSON file."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ds_zo.config.errors import shown

_MAX_DEPTH = 100
"""Levels of objects and lists within each other, below which recursive code meets no limit of Python."""


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object of a file. Raises ValueError with the reason alone: the caller adds the file and the remedy."""
    return parse_object(path.read_text(encoding="utf-8"))


def parse_object(text: str) -> dict[str, Any]:
    """The JSON object of a text without repeated keys. Raises ValueError with the reason alone."""
    found = parse_json(text, object_pairs_hook=_without_repeats)
    if not isinstance(found, dict):
        raise ValueError(f"it must be an object, got {shown(found)}")
    return found


def parse_json(text: str | bytes, **arguments: Any) -> Any:
    """As `json.loads`. Raises ValueError, with the reason alone, also for a value that is nested too deeply."""
    too_deep = f"objects and lists must be at most {_MAX_DEPTH} levels deep"
    try:
        found = json.loads(text, **arguments)
    except RecursionError:
        raise ValueError(too_deep) from None
    level: list[Any] = [found]
    for _ in range(_MAX_DEPTH):
        level = [inner for value in level for inner in _entries(value)]
    if level:
        raise ValueError(too_deep)
    return found


def check_file_names(names: Iterable[Any]) -> None:
    """Raises ValueError, with the reason alone, unless each is a name of a file in a folder, which fits in one line."""
    for name in names:
        if name in ("", ".", "..") or "/" in name or not name.isprintable() or len(name) > 255:
            raise ValueError(f"{shown(name)} is not the name of a file in the folder")


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"a key must stand once, got {shown(next(key for key in keys if keys.count(key) > 1))} again")
    return found


def _entries(value: Any) -> list[Any]:
    return [*value.values()] if isinstance(value, dict) else value if isinstance(value, list) else []
