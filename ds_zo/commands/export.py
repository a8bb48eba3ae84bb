"""`ds-zo export`: a checkpoint as a folder for `from_pretrained`."""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import Any

from ds_zo.commands.arguments import add_command

_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


def add(commands: Any) -> None:
    export = add_command(
        commands,
        "export",
        help="make a folder for from_pretrained of a checkpoint",
        examples=(
            "ds-zo export runs/out/checkpoint-500 exported --tokenizer facebook/opt-1.3b",
            "ds-zo export runs/lora/checkpoint-500 merged --merge",
        ),
    )
    export.add_argument(
        "checkpoint", type=Path, metavar="CKPT", help="a checkpoint's folder, or one with a latest file"
    )
    export.add_argument("out", type=Path, metavar="OUT", help="the folder to make")
    export.add_argument("--shard-gb", type=float, default=4.0, help="largest file, in GB (default: %(default)s)")
    export.add_argument(
        "--tokenizer", metavar="NAME_OR_PATH", help="save this tokenizer in OUT too: an engine's checkpoint has none"
    )
    export.add_argument(
        "--merge", action="store_true", help="merge the adapters of a PEFT model into its weights, layer by layer"
    )
    export.add_argument(
        "--base",
        type=Path,
        metavar="FOLDER",
        help="with --merge: the base model's safetensors (default: the folder that the run has read)",
    )
    export.add_argument(
        "--dtype", choices=tuple(_DTYPES), help="of the weights, with --merge (default: bf16; else that of the run)"
    )
    export.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    from ds_zo.checkpoint.export import export
    from ds_zo.checkpoint.manifest import folder_of
    from ds_zo.checkpoint.reader import open_folder, tag_to_load

    if not 0 < args.shard_gb < math.inf:
        raise ValueError(f"the size of a file must be > 0 GB, got {args.shard_gb:g}: name a larger one (--shard-gb)")
    if args.base is not None and not args.merge:
        raise ValueError(
            f"the base model is read where adapters are merged, got {args.base} alone: add --merge (--base)"
        )
    if args.dtype is not None and not args.merge:
        raise ValueError(
            f"weights keep the run's dtype where no adapters are merged, got {args.dtype}: leave it out, or add "
            "--merge (--dtype)"
        )
    latest = tag_to_load(args.checkpoint, None)
    folder = args.checkpoint if latest is None else folder_of(args.checkpoint, latest)
    tokenizer = None
    if args.tokenizer is not None:
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(args.tokenizer)  # first, so that a wrong name fails before the export
    shard_nbytes = int(args.shard_gb * 1e9)
    saved = open_folder(folder)
    if args.merge:
        import torch

        from ds_zo.checkpoint.merge import export_merged

        dtype = getattr(torch, _DTYPES[args.dtype or "bf16"])
        export_merged(saved, args.out, base=args.base, dtype=dtype, shard_nbytes=shard_nbytes)
    else:
        export(saved, args.out, shard_nbytes=shard_nbytes)
    if tokenizer is not None:
        tokenizer.save_pretrained(args.out)
    notes = [] if tokenizer else ["without a tokenizer: --tokenizer NAME adds one"]
    if not args.merge and saved.backend_state.get("omitted"):
        notes.append("without the frozen base, which the checkpoint does not have: --merge writes a whole model")
    print(f"{folder} -> {args.out}" + (f" ({'; '.join(notes)})" if notes else ""))
