"""The embedded task: is a line Python code or English text? Its lines are from modules held out of the embedded model's
pretraining."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache

from ds_zo.tasks.base import Choice, ChoiceTask
from ds_zo.tasks.data import DataSource, Row, Split, draw_ready
from ds_zo.tasks.errors import TaskError
from ds_zo.tasks.stdlib_text import docstrings, modules, parse, stable_hash, statements

NUM_PER_LABEL: dict[Split, int] = {"test": 200, "dev": 100, "train": 500}
_MIN_CHARS, _MAX_CHARS = 24, 64
_STATEMENTS = (ast.Assign, ast.AugAssign, ast.Assert, ast.Expr, ast.Raise, ast.Return)


class CodeOrText(ChoiceTask):
    """Classifies lines as code or text. Every split has equally many lines of both; no line is in two splits."""

    name = "code_or_text"
    fields = ("line", "label")
    text_fields = ("line",)

    def __init__(self, source: DataSource | None = None) -> None:
        super().__init__(source)
        if not self.source.is_empty:
            given = self.source.folder or self.source.file or "a request for the Hub's copy"
            raise TaskError(f"task {self.name} is made from Python's standard library and reads no data; got {given}")

    def rows(self, split: Split) -> list[Row]:
        return draw_ready(_splits()[split], split, draw=self.source.draw)

    def choice(self, row: Row) -> Choice:
        return Choice(f"{row['line']}\nis_code =", (" True", " False"), self.answer_index(row, {"code": 0, "text": 1}))


@cache
def _splits() -> dict[Split, list[Row]]:
    """The rows of each split. Lines are chosen by their hash, so the choice does not depend on their position in the
    library."""
    found: dict[str, set[str]] = {"code": set(), "text": set()}
    for _, source in modules(held_out=True):
        tree = parse(source)
        if tree is not None:
            found["code"].update(_statements(source, tree))
            found["text"].update(_sentences(tree))
    ordered = {label: sorted(lines, key=stable_hash) for label, lines in found.items()}
    splits: dict[Split, list[Row]] = {}
    start = 0
    for split, num in NUM_PER_LABEL.items():
        picked = range(start, start + num)
        splits[split] = [{"line": lines[i], "label": label} for i in picked for label, lines in ordered.items()]
        start += num
    return splits


def _statements(source: str, tree: ast.Module) -> Iterator[str]:
    """Simple statements on one line, without the indentation, which would reveal the label."""
    lines = source.encode("utf-8").splitlines()
    for node in statements(tree):
        if not isinstance(node, _STATEMENTS) or node.end_lineno != node.lineno:
            continue
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            continue
        text = lines[node.lineno - 1][node.col_offset : node.end_col_offset].decode("utf-8", errors="replace")
        if _MIN_CHARS <= len(text) <= _MAX_CHARS:
            yield text


def _sentences(tree: ast.Module) -> Iterator[str]:
    """Sentences of docstrings, without paragraphs that have interpreter examples."""
    for text in docstrings(tree):
        for paragraph in re.split(r"\n\s*\n", text):
            if ">>>" in paragraph:
                continue
            for sentence in re.split(r"(?<=[.!?])\s+", " ".join(paragraph.split())):
                if _MIN_CHARS <= len(sentence) <= _MAX_CHARS and sentence[0].isalpha() and sentence.endswith("."):
                    yield sentence
