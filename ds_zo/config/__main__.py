"""`python -m ds_zo.config [--write FILE]` prints the key tables, or writes them between the markers of a file."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from ds_zo.config.docs import key_tables, write_tables


def main() -> None:
    """Prints the tables, or updates the copy of them in a file."""
    parser = argparse.ArgumentParser(prog="python -m ds_zo.config", description="Markdown tables of every ds_zo key.")
    parser.add_argument("--write", type=Path, metavar="FILE", help="replace the tables between FILE's markers")
    path = parser.parse_args().write
    if path is None:
        sys.stdout.write(key_tables() + "\n")
    else:
        write_tables(path)


if __name__ == "__main__":
    main()
