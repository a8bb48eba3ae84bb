"""The small pretrained decoder that is part of the package."""

from __future__ import annotations

from pathlib import Path

FOLDER = Path(__file__).parent / "embedded"
"""The model's folder, for `from_pretrained`. tools/pretrain_embedded.py makes it; its README.md names the data."""


def folder_of(name: str) -> str:
    """The argument of `from_pretrained` for a `--model`: this folder for "embedded", else `name` itself."""
    return str(FOLDER) if name == "embedded" else name
