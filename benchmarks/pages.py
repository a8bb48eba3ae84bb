"""Makes everything that is made of rows: the measured tables and sentences of the pages, and their pictures.

    python -m benchmarks.pages            # fills every page and draws every picture
    python -m benchmarks.pages --check    # names the pages that are not current, and exits with status 1

A page marks the place of a block by two comments on lines of their own, `<!-- rows: NAME -->` and `<!-- /rows -->`. The
text between them is replaced by the block of that name in `blocks/`, or the recipe of that name, and by nothing while a
block has no rows. The block `keys` has the tables of JSON keys. A page has no measured figure outside such blocks, so
new rows need no edit by hand.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks import blocks, pictures, recipes
from benchmarks.prose import wrapped
from ds_zo.config.docs import key_tables

REPO = Path(__file__).parents[1]
DOCS = REPO / "docs"
MARKED = re.compile(r"^(<!-- rows: ([\w.-]+) -->\n).*?^(<!-- /rows -->)$", flags=re.DOTALL | re.MULTILINE)


def text_of(name: str) -> str:
    """The Markdown of a block."""
    if name in blocks.specs():
        return blocks.text_of(name)
    others = {"keys": key_tables(), **recipes.blocks()}
    if name not in others:
        raise ValueError(f"a block must be one of {', '.join([*blocks.specs(), *others])}, got {name}; rename it")
    return others[name]


def filled(text: str) -> str:
    """The text of a page with all its blocks made from the rows."""

    def block(found: re.Match[str]) -> str:
        begin, name, end = found.groups()
        made = wrapped(text_of(name))
        return f"{begin}\n{made}\n\n{end}" if made else f"{begin}{end}"  # empty while it has no rows

    return MARKED.sub(block, text)


def marked_pages() -> list[Path]:
    """The README and the pages of docs/ that have blocks."""
    pages = [REPO / "README.md", *sorted(DOCS.glob("*.md"))]
    return [page for page in pages if MARKED.search(page.read_text(encoding="utf-8"))]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--check", action="store_true", help="write nothing; exit with status 1 if a page is not current"
    )
    args = parser.parse_args(arguments)
    stale = []
    for page in marked_pages():
        text = page.read_text(encoding="utf-8")
        new = filled(text)
        if new != text:
            stale.append(page.name)
            if not args.check:
                page.write_text(new, encoding="utf-8")
    if not args.check:
        stale += pictures.write_all()
    if args.check and stale:
        sys.exit(f"not current: {', '.join(stale)}; run: python -m benchmarks.pages")
    print(f"{'written' if stale else 'all current'}{': ' if stale else ''}{', '.join(stale)}")


if __name__ == "__main__":
    main()
