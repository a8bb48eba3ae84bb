"""`ds-zo config`: the tables of JSON keys."""

from __future__ import annotations

import argparse
from typing import Any

from ds_zo.commands.arguments import add_command
from ds_zo.config.docs import key_tables


def add(commands: Any) -> None:
    text = "print the tables of JSON keys: type, default, meaning"
    config = add_command(commands, "config", help=text, examples=("ds-zo config | less",))
    config.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    print(key_tables())
