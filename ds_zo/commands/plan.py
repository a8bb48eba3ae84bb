"""`ds-zo plan`: memory and speed of every backend, computed before anything is allocated."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from ds_zo.commands.arguments import add_command, add_machine, json_object, machine_rates, unprinted


def add(commands: Any) -> None:
    plan = add_command(
        commands,
        "plan",
        help="memory and speed of every backend on a GPU, and which one to use",
        about="Computes memory and speed of every method before anything is allocated, and names the one to use.",
        examples=(
            "ds-zo plan --model facebook/opt-13b --gpu RTX4090 --host-memory-gb 64 --out ds_config.json",
            "ds-zo plan --model facebook/opt-13b --device-memory-gb 24 --host-memory-gb 64",
            "ds-zo plan --model random:opt-6.7b --backend zo --details",
        ),
    )
    plan.add_argument("--model", required=True, help="a folder, a name the Hub or its cache knows, or random:opt-6.7b")
    add_machine(plan)
    plan.add_argument("--batch", type=int, default=1, help="sequences of a GPU in a step (default: %(default)s)")
    plan.add_argument("--dtype", choices=("bf16", "fp16", "fp32"), default="bf16", help="default: %(default)s")
    plan.add_argument("--backend", action="append", metavar="NAME", help="only this one; may be repeated")
    plan.add_argument("--stream", default="{}", metavar="JSON", help="a ds_zo.stream section to plan with")
    plan.add_argument("--params", default="{}", metavar="JSON", help="optimizer.params of the one --backend")
    plan.add_argument("--offload", action=argparse.BooleanOptionalAction, help="default: where the GPU is too small")
    plan.add_argument("--checkpointing", action=argparse.BooleanOptionalAction, default=True, help="of activations")
    plan.add_argument("--gpus", type=int, default=1, help="of each machine, data parallel (default: %(default)s)")
    plan.add_argument("--nodes", type=int, default=1, help="machines (default: %(default)s)")
    plan.add_argument("--details", action="store_true", help="bytes by part and the JSON to use, for every backend")
    plan.add_argument("--out", type=Path, metavar="FILE", help="write the JSON of the method to use here")
    plan.add_argument("--json", action="store_true", help="print everything as JSON")
    plan.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    from ds_zo.planner import plan, render, render_scaling, scale

    rates = machine_rates(args, dtype=args.dtype)
    found = unprinted(
        plan,
        args.model,
        device_memory_gb=args.device_memory_gb,
        host_memory_gb=args.host_memory_gb,
        batch=args.batch,
        seq=args.seq,
        dtype=args.dtype,
        backends=args.backend,
        stream=json_object(args.stream, "--stream"),
        params=json_object(args.params, "--params"),
        offload=args.offload,
        checkpointing=args.checkpointing,
        rates=rates,
    )
    scaled = scale(found, gpus=args.gpus, nodes=args.nodes) if (args.gpus, args.nodes) != (1, 1) else []
    if args.out is not None:
        if found.recommended is None:
            raise ValueError(f"a JSON is written for what fits, got no method that does: plan without it ({args.out})")
        args.out.write_text(json.dumps(found.recommended.config, indent=2) + "\n", encoding="utf-8")
    if args.json:
        print(json.dumps(found.to_json() | {"scaled": [s.to_json() for s in scaled]}, indent=2))
        return
    print(render(found, details=args.details))
    if found.recommended is not None:
        print(f"JSON: {args.out}" if args.out else "JSON: --out FILE writes it")
    if scaled:
        print("\n" + render_scaling(scaled))
