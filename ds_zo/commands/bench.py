"""`ds-zo bench`: stock DeepSpeed and ds_zo compared."""

from __future__ import annotations

import argparse
from typing import Any

from ds_zo.commands.arguments import add_command


def add(commands: Any) -> None:
    from ds_zo.bench.compare import add_arguments

    bench = add_command(
        commands,
        "bench",
        help="compare stock DeepSpeed and ds_zo: rows, table, page",
        examples=("ds-zo bench --list", "ds-zo bench --model random:opt-6.7b --device-memory-gb 24"),
    )
    add_arguments(bench)
    bench.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    from ds_zo.bench import compare
    from ds_zo.bench.runner import prepare_to_fork

    if not (args.list or args.report_only):
        prepare_to_fork()
    compare.run(args)
