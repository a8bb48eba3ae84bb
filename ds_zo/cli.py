"""The `ds-zo` command."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from ds_zo import __version__
from ds_zo.checkpoint import CheckpointError
from ds_zo.config.docs import key_tables


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of the console script; returns its exit status."""
    parser = argparse.ArgumentParser(prog="ds-zo", description="DeepSpeed update paths chosen in the JSON.")
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    config = commands.add_parser("config", help="print the tables of JSON keys: type, default, meaning")
    config.set_defaults(run=_config)

    export = commands.add_parser("export", help="make a checkpoint a folder that from_pretrained loads")
    export.add_argument(
        "checkpoint", type=Path, metavar="CKPT", help="a checkpoint's folder, or one with a latest file"
    )
    export.add_argument("out", type=Path, metavar="OUT", help="the folder to make")
    export.add_argument("--shard-gb", type=float, default=4.0, help="largest file, in GB (default: %(default)s)")
    export.set_defaults(run=_export)

    replay = commands.add_parser("replay", help="rebuild the weights of any step of a ZO run from its trajectory")
    replay.add_argument(
        "--base", type=Path, required=True, metavar="MODEL", help="the folder the run started from, or a checkpoint"
    )
    replay.add_argument("--trajectory", type=Path, required=True, metavar="FILE", help="the run's trajectory.bin")
    replay.add_argument("--step", type=int, required=True, metavar="N", help="how many steps to have made")
    replay.add_argument("--out", type=Path, required=True, metavar="DIR", help="the model folder to make")
    replay.add_argument("--device", default="cpu", help="cpu or cuda (default: %(default)s)")
    replay.set_defaults(run=_replay)

    args = parser.parse_args(argv)
    try:
        args.run(args)
    except (CheckpointError, FileNotFoundError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def _config(args: argparse.Namespace) -> None:
    print(key_tables())


def _export(args: argparse.Namespace) -> None:
    from ds_zo.checkpoint.export import export
    from ds_zo.checkpoint.manifest import folder_of
    from ds_zo.checkpoint.reader import open_folder, tag_to_load

    latest = tag_to_load(args.checkpoint, None)
    folder = args.checkpoint if latest is None else folder_of(args.checkpoint, latest)
    export(open_folder(folder), args.out, shard_nbytes=int(args.shard_gb * 1e9))
    print(f"{folder} -> {args.out}")


def _replay(args: argparse.Namespace) -> None:
    from ds_zo.checkpoint.rebuild import replay

    verified = replay(args.base, args.trajectory, step=args.step, out=args.out, device=args.device)
    how = "its hash is the recorded one" if verified else "no hash to compare with was recorded at this step and device"
    print(f"step {args.step} -> {args.out} ({how})")
