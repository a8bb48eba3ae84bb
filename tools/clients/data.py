"""Tiny data and a tiny model, in the folder that a client's command runs in."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

EMBEDDED = Path(__file__).parents[2] / "ds_zo" / "tasks" / "embedded"
_TOPICS = ("while", "for", "if", "try", "with", "def", "class", "return", "import", "lambda", "yield", "assert")
_QUESTIONS = [f"What does the {topic} statement do?" for topic in _TOPICS]
_GOOD = [f"The {topic} statement controls how a program goes on." for topic in _TOPICS]
_BAD = [f"Nothing at all about {topic}." for topic in _TOPICS]

ROWS: dict[str, list[dict[str, Any]]] = {
    "sft": [{"prompt": question, "completion": " " + good} for question, good in zip(_QUESTIONS, _GOOD, strict=True)],
    "dpo": [
        {"prompt": question, "chosen": " " + good, "rejected": " " + bad}
        for question, good, bad in zip(_QUESTIONS, _GOOD, _BAD, strict=True)
    ],
    "alpaca": [
        {"instruction": question, "input": "", "output": good} for question, good in zip(_QUESTIONS, _GOOD, strict=True)
    ],
    "messages": [
        {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": good}]}
        for question, good in zip(_QUESTIONS, _GOOD, strict=True)
    ],
}
"""The rows of `data/NAME/train.jsonl`."""


def write_data(folder: Path) -> None:
    for name, rows in ROWS.items():
        (folder / name).mkdir(parents=True)
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / name / "train.jsonl").write_text(lines, encoding="utf-8")


def write_model(folder: Path) -> None:
    shutil.copytree(EMBEDDED, folder)
