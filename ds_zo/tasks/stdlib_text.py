"""Text of every Python installation: the sources of the standard library and pydoc's topics.

The embedded model is pretrained on the modules for which `is_held_out` is false. The embedded task and the
bits-per-byte measurement use the other modules, which the model has not seen.
"""

from __future__ import annotations

import ast
import gc
import hashlib
import sysconfig
from collections import deque
from collections.abc import Iterator
from pathlib import Path

_SKIPPED_FOLDERS = frozenset(
    {"site-packages", "dist-packages", "test", "tests", "idlelib", "encodings", "pydoc_data", "lib2to3"}
)
"""Folders with third-party code, tests, lookup tables, or packages that not every distribution has."""


def stable_hash(text: str) -> int:
    """A hash that does not change between processes or versions (unlike `hash`)."""
    return int.from_bytes(hashlib.sha256(text.encode("utf-8")).digest()[:8], "big")


def is_held_out(module: str) -> bool:
    """Whether a module is held out of pretraining: one in six, chosen by its relative path, so the choice is the same
    in all Python versions."""
    return stable_hash(module) % 6 == 0


def modules(*, held_out: bool) -> Iterator[tuple[str, str]]:
    """(relative path, source) of the standard library's modules, in path order."""
    root = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(_python_files(root)):
        relative = path.relative_to(root).as_posix()
        if is_held_out(relative) == held_out:
            yield relative, path.read_text(encoding="utf-8", errors="replace")


def _python_files(folder: Path) -> Iterator[Path]:
    """The Python files below a folder. Skipped folders are not read: site-packages can have a hundred times as many
    files as the library."""
    for entry in folder.iterdir():
        if entry.suffix == ".py":
            yield entry
        elif entry.is_dir() and entry.name not in _SKIPPED_FOLDERS:
            yield from _python_files(entry)


def parse(source: str) -> ast.Module | None:
    """The syntax tree of a source; None for a file that this Python cannot parse (templates, bad-syntax fixtures)."""
    collects = gc.isenabled()
    gc.disable()  # a tree has many objects and no garbage: garbage collection would take half the time
    try:
        return ast.parse(source)
    except (SyntaxError, ValueError):
        return None
    finally:
        if collects:
            gc.enable()


def statements(tree: ast.Module) -> Iterator[ast.AST]:
    """A module, its statements and the nodes that contain statements, in the order of `ast.walk`. `ast.walk` takes five
    times as long, because most nodes of a tree are expressions, which contain no statements."""
    nodes: deque[ast.AST] = deque([tree])
    while nodes:
        node = nodes.popleft()
        for held in ("body", "handlers", "orelse", "finalbody", "cases"):
            nodes.extend(getattr(node, held, ()))
        yield node


def docstrings(tree: ast.Module) -> Iterator[str]:
    """Every docstring of a module, dedented."""
    for node in statements(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            text = ast.get_docstring(node)
            if text:
                yield text
