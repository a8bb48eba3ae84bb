"""The `ds-zo` command."""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any, TypeVar

from ds_zo import __version__
from ds_zo.checkpoint import CheckpointError
from ds_zo.config.docs import key_tables

_T = TypeVar("_T")


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of the console script; returns its exit status."""
    parser = argparse.ArgumentParser(prog="ds-zo", description="DeepSpeed update paths chosen in the JSON.")
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    config = commands.add_parser("config", help="print the tables of JSON keys: type, default, meaning")
    config.set_defaults(run=_config)

    export = commands.add_parser("export", help="make a folder for from_pretrained of a checkpoint")
    export.add_argument(
        "checkpoint", type=Path, metavar="CKPT", help="a checkpoint's folder, or one with a latest file"
    )
    export.add_argument("out", type=Path, metavar="OUT", help="the folder to make")
    export.add_argument("--shard-gb", type=float, default=4.0, help="largest file, in GB (default: %(default)s)")
    export.add_argument(
        "--tokenizer", metavar="NAME_OR_PATH", help="save this tokenizer in OUT too: an engine's checkpoint has none"
    )
    export.set_defaults(run=_export)

    replay = commands.add_parser("replay", help="rebuild the weights of any step of a ZO run from its trajectory")
    replay.add_argument(
        "--base", type=Path, required=True, metavar="MODEL", help="the folder the run started from, or a checkpoint"
    )
    replay.add_argument("--trajectory", type=Path, required=True, metavar="FILE", help="the run's trajectory.bin")
    replay.add_argument("--step", type=int, required=True, metavar="N", help="number of steps made at that point")
    replay.add_argument("--out", type=Path, required=True, metavar="DIR", help="the model folder to make")
    replay.add_argument("--device", default="cpu", help="cpu or cuda (default: %(default)s)")
    replay.set_defaults(run=_replay)

    _add_plan(commands)
    _add_report(commands)
    _add_bench(commands)

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


def _add_plan(commands: Any) -> None:
    plan = commands.add_parser(
        "plan", help="memory and speed of every backend on a GPU, computed before anything is allocated"
    )
    plan.add_argument("--model", required=True, help="a folder, a name the Hub or its cache knows, or random:opt-6.7b")
    plan.add_argument("--device-memory-gb", type=float, metavar="GB", help="of each GPU (default: unlimited)")
    plan.add_argument("--host-memory-gb", type=float, metavar="GB", help="of the machine (default: unlimited)")
    plan.add_argument("--batch", type=int, default=1, help="sequences of a GPU in a step (default: %(default)s)")
    plan.add_argument("--seq", type=int, default=2048, help="tokens of a sequence (default: %(default)s)")
    plan.add_argument("--dtype", choices=("bf16", "fp16", "fp32"), default="bf16", help="default: %(default)s")
    plan.add_argument("--backend", action="append", metavar="NAME", help="only this one; may be repeated")
    plan.add_argument("--stream", default="{}", metavar="JSON", help="a ds_zo.stream section to plan with")
    plan.add_argument("--params", default="{}", metavar="JSON", help="optimizer.params of the one --backend")
    plan.add_argument("--offload", action=argparse.BooleanOptionalAction, help="default: where the GPU is too small")
    plan.add_argument("--checkpointing", action=argparse.BooleanOptionalAction, default=True, help="of activations")
    plan.add_argument("--rates", type=Path, metavar="FILE", help="of this machine, from ds-zo report --json")
    plan.add_argument("--gpus", type=int, default=1, help="of each machine, data parallel (default: %(default)s)")
    plan.add_argument("--nodes", type=int, default=1, help="machines (default: %(default)s)")
    plan.add_argument("--details", action="store_true", help="bytes by part and the JSON to use, for every backend")
    plan.add_argument("--json", action="store_true", help="print everything as JSON")
    plan.set_defaults(run=_plan)


def _plan(args: argparse.Namespace) -> None:
    from ds_zo.planner import load_rates, plan, render, render_scaling, scale

    found = _unprinted(
        plan,
        args.model,
        device_memory_gb=args.device_memory_gb,
        host_memory_gb=args.host_memory_gb,
        batch=args.batch,
        seq=args.seq,
        dtype=args.dtype,
        backends=args.backend,
        stream=_json_object(args.stream, "--stream"),
        params=_json_object(args.params, "--params"),
        offload=args.offload,
        checkpointing=args.checkpointing,
        rates=load_rates(args.rates) if args.rates else None,
    )
    scaled = scale(found, gpus=args.gpus, nodes=args.nodes) if (args.gpus, args.nodes) != (1, 1) else []
    if args.json:
        print(json.dumps(found.to_json() | {"scaled": [s.to_json() for s in scaled]}, indent=2))
        return
    print(render(found, details=args.details))
    if scaled:
        print("\n" + render_scaling(scaled))


def _unprinted(work: Callable[..., _T], *args: Any, **kwargs: Any) -> _T:
    """Calls `work` with standard output redirected to standard error, because libraries print there.

    DeepSpeed, for one, prints how long an operator took to load.
    """
    with redirect_stdout(sys.stderr):
        return work(*args, **kwargs)


def _json_object(text: str, option: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{option} must be a JSON object, got {text!r}: {error} ({option})") from None
    if not isinstance(found, dict):
        raise ValueError(f"{option} must be a JSON object, got {text!r}: write {{...}} ({option})")
    return found


def _add_report(commands: Any) -> None:
    report = commands.add_parser("report", help="check this machine for ds_zo, and name remedies")
    report.add_argument("--layers", metavar="MODEL", help="also time a layer's forward, backward and update")
    report.add_argument("--batch", type=int, default=1, help="sequences for --layers (default: %(default)s)")
    report.add_argument("--seq", type=int, default=2048, help="tokens a sequence for --layers (default: %(default)s)")
    report.add_argument("--json", action="store_true", help="print JSON, which plan --rates reads")
    report.set_defaults(run=_report)


def _report(args: argparse.Namespace) -> None:
    from ds_zo.bench.machine import inspect_machine

    found = _unprinted(inspect_machine, layers=args.layers, batch=args.batch, seq=args.seq)
    print(json.dumps(found.to_json(), indent=2) if args.json else found.render())


def _config(args: argparse.Namespace) -> None:
    print(key_tables())


def _export(args: argparse.Namespace) -> None:
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


def _replay(args: argparse.Namespace) -> None:
    import torch

    from ds_zo.checkpoint.rebuild import replay

    if args.device.partition(":")[0] not in ("cpu", *(["cuda"] if torch.cuda.is_available() else [])):
        raise ValueError(
            f"a device must be cpu, or cuda where there is a GPU, got {args.device}: name one of them (--device)"
        )
    verified = replay(args.base, args.trajectory, step=args.step, out=args.out, device=args.device)
    how = "its hash is the recorded one" if verified else "no hash was recorded at this step on this kind of device"
    print(f"step {args.step} -> {args.out} ({how})")


def _add_bench(commands: Any) -> None:
    from ds_zo.bench.compare import add_arguments

    bench = commands.add_parser("bench", help="compare stock DeepSpeed and ds_zo: rows, table, page")
    add_arguments(bench)
    bench.set_defaults(run=_bench)


def _bench(args: argparse.Namespace) -> None:
    from ds_zo.bench.compare import run
    from ds_zo.bench.runner import prepare_to_fork

    if not (args.list or args.report_only):
        prepare_to_fork()
    run(args)


if __name__ == "__main__":
    sys.exit(main())
