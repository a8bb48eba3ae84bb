"""A JSON that is being converted, with a record of its changes."""

from __future__ import annotations

import copy
import json
from dataclasses import dataclass
from typing import Any

from ds_zo.config.errors import shown
from ds_zo.config.keys import SECTION_AT
from ds_zo.config.registry import BackendEntry
from ds_zo.config.stock import lookup


class _Absent:
    def __repr__(self) -> str:
        return "not written"


ABSENT = _Absent()
"""The value of a key that is not in the JSON."""


@dataclass(frozen=True)
class Change:
    """One key of the JSON that differs. `old` or `new` is ABSENT where the key is not written."""

    key: str
    old: Any
    new: Any
    why: str

    def __str__(self) -> str:
        old = repr(ABSENT) if self.old is ABSENT else shown(self.old)
        new = "removed" if self.new is ABSENT else shown(self.new)
        return f"{self.key}: {old} -> {new}: {self.why}"


class Draft:
    """The JSON that is being changed, and the record of its changes."""

    def __init__(self, ds_config: dict[str, Any], entry: BackendEntry) -> None:
        self.config = copy.deepcopy(ds_config)
        self.entry = entry
        self.changes: list[Change] = []
        self.notes: list[str] = []

    @property
    def is_client(self) -> bool:
        """Whether the script makes the optimizer."""
        return "optimizer" not in self.config

    @property
    def params_at(self) -> str:
        return f"{SECTION_AT}.params" if self.is_client else "optimizer.params"

    @property
    def streams(self) -> bool:
        return bool(self.get("zero_optimization.offload_param.device") == "cpu")

    def get(self, path: str) -> Any:
        return lookup(self.config, path)

    def object(self, path: str) -> dict[str, Any]:
        found = self.get(path)
        return found if isinstance(found, dict) else {}

    def has(self, path: str) -> bool:
        parent, _, key = path.rpartition(".")
        return key in (self.object(parent) if parent else self.config)

    def set(self, path: str, value: Any, why: str) -> None:
        *parents, key = path.split(".")
        inner = self.config
        for name in parents:
            if not isinstance(inner.get(name), dict):
                inner[name] = {}
            inner = inner[name]
        old = inner.get(key, ABSENT)
        if old is ABSENT or json.dumps(old) != json.dumps(value):
            inner[key] = copy.deepcopy(value)
            self._record(path, old, value, why)

    def remove(self, path: str, why: str) -> None:
        if not self.has(path):
            return
        parent, _, key = path.rpartition(".")
        old = (self.object(parent) if parent else self.config).pop(key)
        self._record(path, old, ABSENT, why)
        while parent.startswith(SECTION_AT) and not self.object(parent):  # it says nothing
            parent, _, key = parent.rpartition(".")
            (self.object(parent) if parent else self.config).pop(key, None)

    def _record(self, key: str, old: Any, new: Any, why: str) -> None:
        self.changes.append(Change(key, old, new, why.format(type=self.entry.optimizer_type)))

    def note(self, text: str) -> None:
        self.notes.append(text.format(type=self.entry.optimizer_type))
