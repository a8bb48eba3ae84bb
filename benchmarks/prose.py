"""Wraps the sentences of generated Markdown."""

from __future__ import annotations

import textwrap

WIDTH = 120
_KEPT = ("|", "#", "!", "<", "*", ">", " ")
"""First characters of lines that are no sentences: tables, headings, pictures, comments, quotations."""


def wrapped(markdown: str) -> str:
    """The text with its paragraphs and items of lists wrapped to WIDTH columns. Code, tables and headings stay as
    they are."""
    lines: list[str] = []
    is_code = False
    for line in markdown.splitlines():
        is_code ^= line.startswith("```")
        if is_code or line.startswith(_KEPT) or len(line) <= WIDTH:
            lines.append(line)
        else:
            indent = "  " if line.startswith("- ") else ""
            lines += textwrap.wrap(
                line, WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
            )
    return "\n".join(lines)
