"""The `ds-zo` command."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from ds_zo import __version__
from ds_zo.config.docs import key_tables


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of the console script; returns its exit status."""
    parser = argparse.ArgumentParser(prog="ds-zo", description="DeepSpeed update paths chosen in the JSON.")
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("config", help="print the tables of JSON keys: type, default, meaning")
    parser.parse_args(argv)
    print(key_tables())
    return 0
