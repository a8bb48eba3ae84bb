"""`ds-zo report`: checks of this machine, with remedies."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from ds_zo.commands.arguments import add_command, unprinted


def add(commands: Any) -> None:
    report = add_command(
        commands,
        "report",
        help="check this machine for ds_zo, and name remedies",
        about="Checks GPU, driver, versions, memory, disks and CPU, measures speeds, and names remedies.",
        examples=("ds-zo report --model facebook/opt-13b --dir runs", "ds-zo report --json > rates.json"),
    )
    report.add_argument("--model", help="compare the size of this model with memory and disk")
    report.add_argument("--dir", type=Path, default=Path(), help="folder of checkpoints (default: the current one)")
    report.add_argument("--layers", metavar="MODEL", help="also time a layer's forward, backward and update")
    report.add_argument("--batch", type=int, default=1, help="sequences for --layers (default: %(default)s)")
    report.add_argument("--seq", type=int, default=2048, help="tokens a sequence for --layers (default: %(default)s)")
    report.add_argument("--json", action="store_true", help="print JSON, which plan --rates reads")
    report.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    from ds_zo.bench.machine import inspect_machine

    found = unprinted(
        inspect_machine, model=args.model, folder=args.dir, layers=args.layers, batch=args.batch, seq=args.seq
    )
    print(json.dumps(found.to_json(), indent=2) if args.json else found.render())
