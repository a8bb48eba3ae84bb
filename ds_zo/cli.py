"""The `ds-zo` command."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from ds_zo import __version__
from ds_zo.checkpoint import CheckpointError
from ds_zo.commands import autoload, bench, config, convert, export, plan, replay, report, run, train

COMMANDS = (train, run, autoload, convert, plan, report, config, export, replay, bench)


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of the console script; returns its exit status."""
    parser = argparse.ArgumentParser(
        prog="ds-zo",
        description="Fine-tunes models with little GPU memory through DeepSpeed, and plans, converts and checks "
        "such runs.",
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    for command in COMMANDS:
        command.add(commands)

    args = parser.parse_args(argv)
    try:
        args.run(args)
        sys.stdout.flush()
    except BrokenPipeError:  # the reader has closed the pipe, as `| head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (CheckpointError, OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
