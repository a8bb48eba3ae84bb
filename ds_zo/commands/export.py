"""`ds-zo export`: a checkpoint as a folder for `from_pretrained`."""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import Any

from ds_zo.commands.arguments import add_command


def add(commands: Any) -> None:
    export = add_command(
        commands,
        "export",
        help="make a folder for from_pretrained of a checkpoint",
        examples=("ds-zo export runs/out/checkpoint-500 exported --tokenizer facebook/opt-1.3b",),
    )
    export.add_argument(
        "checkpoint", type=Path, metavar="CKPT", help="a checkpoint's folder, or one with a latest file"
    )
    export.add_argument("out", type=Path, metavar="OUT", help="the folder to make")
    export.add_argument("--shard-gb", type=float, default=4.0, help="largest file, in GB (default: %(default)s)")
    export.add_argument(
        "--tokenizer", metavar="NAME_OR_PATH", help="save this tokenizer in OUT too: an engine's checkpoint has none"
    )
    export.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    from ds_zo.checkpoint.export import export
    from ds_zo.checkpoint.manifest import folder_of
    from ds_zo.checkpoint.reader import open_folder, tag_to_load

    if not 0 < args.shard_gb < math.inf:
        raise ValueError(f"the size of a file must be > 0 GB, got {args.shard_gb:g}: name a larger one (--shard-gb)")
    latest = tag_to_load(args.checkpoint, None)
    folder = args.checkpoint if latest is None else folder_of(args.checkpoint, latest)
    tokenizer = None
    if args.tokenizer is not None:
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(args.tokenizer)  # first, so that a wrong name fails before the export
    export(open_folder(folder), args.out, shard_nbytes=int(args.shard_gb * 1e9))
    if tokenizer is not None:
        tokenizer.save_pretrained(args.out)
    print(f"{folder} -> {args.out}{'' if tokenizer else ' (without a tokenizer: --tokenizer NAME adds one)'}")
