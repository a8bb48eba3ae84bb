"""`ds-zo train`: fine-tunes a model on one device."""

from __future__ import annotations

import argparse
import sys
import traceback
from typing import Any


def add(commands: Any) -> None:
    from ds_zo.training.arguments import DESCRIPTION, add_arguments

    train = commands.add_parser(
        "train",
        help="fine-tune a model; without options, the embedded one",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_arguments(train)
    train.set_defaults(run=lambda args: run(args, train))


def run(args: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    from ds_zo.training.arguments import complete
    from ds_zo.training.job import run_or_exit

    complete(args, parser)
    try:
        run_or_exit(args)
    except Exception:  # `ds-zo` would show the message alone, which does not explain an error in a long run
        traceback.print_exc()
        sys.exit(1)
