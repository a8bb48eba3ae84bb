"""`ds-zo replay`: the weights of any step of a ZO run, from its trajectory."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from ds_zo.commands.arguments import add_command


def add(commands: Any) -> None:
    replay = add_command(
        commands,
        "replay",
        help="rebuild the weights of any step of a ZO run from its trajectory",
        examples=("ds-zo replay --base ./folder --trajectory runs/out/trajectory.bin --step 300 --out step300",),
    )
    replay.add_argument(
        "--base", type=Path, required=True, metavar="MODEL", help="the folder the run started from, or a checkpoint"
    )
    replay.add_argument("--trajectory", type=Path, required=True, metavar="FILE", help="the run's trajectory.bin")
    replay.add_argument("--step", type=int, required=True, metavar="N", help="number of steps made at that point")
    replay.add_argument("--out", type=Path, required=True, metavar="DIR", help="the model folder to make")
    replay.add_argument("--device", default="cpu", help="cpu or cuda (default: %(default)s)")
    replay.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    import torch

    from ds_zo.checkpoint.rebuild import replay

    try:
        kind = torch.device(args.device).type
    except RuntimeError:  # not the name of a device
        kind = ""
    if kind not in ("cpu", *(["cuda"] if torch.cuda.is_available() else [])):
        raise ValueError(
            f"a device must be cpu, or cuda where there is a GPU, got {args.device}: name one of them (--device)"
        )
    verified = replay(args.base, args.trajectory, step=args.step, out=args.out, device=args.device)
    how = "its hash is the recorded one" if verified else "no hash was recorded at this step on this kind of device"
    print(f"step {args.step} -> {args.out} ({how})")
