"""Only a use, the transports and the placement change a unit's state, version or buffers."""

from __future__ import annotations

import ast

from tests.helpers.processes import REPO

TRANSITIONS = {"folded", "rewritten", "bind", "bind_stored", "leave", "use_in_place", "assign_buffers"}
"""Methods of `Unit` that change its state, the version of its stored bytes or its buffers."""
NO_UNITS = {
    *("inspect.signature(maker)", "ENGINE_SIGNATURE", "calls", "self._overlap"),
    *("self", "owner", "self._storage", "self._store", "self._store.blocks"),
}
"""Objects with a method of such a name that are no units. (`Unit` calls its own, which is its job.)"""
OWNERS = {f"streaming/{name}.py" for name in ("use", "transport", "placement", "device_shards")}
"""Files whose job it is. `DeviceShards` holds the bytes of a transport."""
REMAINING = {
    "backends/common/unit_weights.py": 3,
    "backends/recompute/stored_weights.py": 1,
    "backends/zo/checkpoint.py": 5,
    "backends/zo/model_check.py": 1,
    "backends/zo/replayed_weights.py": 4,
    "checkpoint/layout.py": 1,
    "checkpoint/rebuild.py": 2,
    "checkpoint/replay.py": 2,
    "streaming/block_store.py": 7,
    "streaming/claims.py": 1,
    "streaming/runtime.py": 1,
}
"""Calls in other files. The list only gets shorter: lower a number, or drop a file, when calls go."""


def calls_in(source: str) -> list[str]:
    """Calls of a transition, on whatever may be a unit."""
    return [
        ast.unparse(node.func)
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in TRANSITIONS
        and ast.unparse(node.func.value) not in NO_UNITS
    ]


def test_units_are_changed_where_it_is_the_job() -> None:
    root = REPO / "ds_zo"
    found = {str(path.relative_to(root)): len(calls_in(path.read_text())) for path in root.rglob("*.py")}
    others = {path: number for path, number in found.items() if number and path not in OWNERS}
    assert others == REMAINING, "change units through ds_zo/streaming/use.py, and keep REMAINING current"


def test_a_call_is_noticed() -> None:
    source = "unit.folded(3)\nself._of[key][0].bind([])\nfor u in units: u.leave()\nleave()\nunit.views()\n"
    assert calls_in(source) == ["unit.folded", "self._of[key][0].bind", "u.leave"]
    assert not calls_in("calls.leave(block)\nself._overlap.leave(0, module)")


def test_transitions_are_methods_of_units() -> None:
    tree = ast.parse((REPO / "ds_zo/streaming/units.py").read_text())
    [unit] = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "Unit"]
    assert {node.name for node in unit.body if isinstance(node, ast.FunctionDef)} >= TRANSITIONS
