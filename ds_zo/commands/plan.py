"""`ds-zo plan`: memory and speed of every backend, computed before anything is allocated."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ds_zo.commands.arguments import add_command, add_machine, json_object, machine_rates, unprinted

if TYPE_CHECKING:
    from ds_zo.planner import Plan, Rates


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
            "ds-zo plan --model random:llama-70b --backend adapter-nf4 --link-gb-s 12 --tokens-per-step auto",
        ),
    )
    plan.add_argument("--model", required=True, help="a folder, a name the Hub or its cache knows, or random:opt-6.7b")
    add_machine(plan)
    tokens = plan.add_mutually_exclusive_group()
    tokens.add_argument("--batch", type=int, default=1, help="sequences of a GPU in a step (default: %(default)s)")
    text = "tokens of all GPUs in a step, in place of --batch; auto: the fewest at which the link does not bound the "
    text += "speed of the one --backend"
    tokens.add_argument("--tokens-per-step", metavar="N", help=text)
    text = "GB/s from host to GPU, in place of those of --gpu or --rates"
    plan.add_argument("--link-gb-s", type=float, metavar="GB/S", help=text)
    plan.add_argument("--dtype", choices=("bf16", "fp16", "fp32"), default="bf16", help="default: %(default)s")
    plan.add_argument("--backend", action="append", metavar="NAME", help="only this one; may be repeated")
    plan.add_argument("--stream", default="{}", metavar="JSON", help="a ds_zo.stream section to plan with")
    plan.add_argument("--params", default="{}", metavar="JSON", help="optimizer.params of the one --backend")
    plan.add_argument("--experts-rank", type=int, default=0, metavar="R", help="LoRA of this rank on experts too")
    plan.add_argument("--offload", action=argparse.BooleanOptionalAction, help="default: where the GPU is too small")
    plan.add_argument("--checkpointing", action=argparse.BooleanOptionalAction, default=True, help="of activations")
    plan.add_argument("--gpus", type=int, default=1, help="of each machine, data parallel (default: %(default)s)")
    plan.add_argument("--nodes", type=int, default=1, help="machines (default: %(default)s)")
    plan.add_argument("--details", action="store_true", help="bytes by part and the JSON to use, for every backend")
    plan.add_argument("--out", type=Path, metavar="FILE", help="write the JSON of the method to use here")
    plan.add_argument("--json", action="store_true", help="print everything as JSON")
    plan.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    from ds_zo.planner import Rates, plan, render, render_scaling, scale, with_link

    rates = machine_rates(args, dtype=args.dtype) or Rates()
    if args.link_gb_s is not None:
        rates = with_link(rates, args.link_gb_s)
    planned = partial(
        plan,
        device_memory_gb=args.device_memory_gb,
        host_memory_gb=args.host_memory_gb,
        seq=args.seq,
        dtype=args.dtype,
        backends=args.backend,
        stream=json_object(args.stream, "--stream"),
        params=json_object(args.params, "--params"),
        offload=args.offload,
        checkpointing=args.checkpointing,
        rates=rates,
        experts_rank=args.experts_rank,
    )
    found = unprinted(_of_tokens, planned, args, rates)
    scaled = scale(found, gpus=args.gpus, nodes=args.nodes) if (args.gpus, args.nodes) != (1, 1) else []
    if args.out is not None:
        if found.recommended is None:
            raise ValueError(f"a JSON is written for what fits, got no method that does: plan without it ({args.out})")
        args.out.write_text(json.dumps(found.recommended.config, indent=2) + "\n", encoding="utf-8")
    if args.json:
        print(json.dumps(found.to_json() | {"scaled": [s.to_json() for s in scaled]}, indent=2))
        return
    if args.tokens_per_step is not None:
        print(_tokens_text(found, args))
    print(render(found, details=args.details))
    if found.recommended is not None:
        print(f"JSON: {args.out}" if args.out else "JSON: --out FILE writes it")
    if scaled:
        print("\n" + render_scaling(scaled))


def _of_tokens(planned: Callable[..., Plan], args: argparse.Namespace, rates: Rates) -> Plan:
    """The plan for the tokens a step that the options ask for."""
    from ds_zo.planner import load_model, smallest_unbound

    tokens = args.tokens_per_step
    if tokens is None:
        return planned(args.model, batch=args.batch)
    if min(args.gpus, args.nodes, args.seq) < 1:
        raise ValueError(
            f"gpus, nodes and seq must be >= 1, got {args.gpus}, {args.nodes} and {args.seq} (--gpus, --nodes, --seq)"
        )
    of_one = args.gpus * args.nodes * args.seq
    if tokens == "auto":
        if len(args.backend or ()) != 1:
            raise ValueError(f"auto goes with one --backend, got {args.backend or 'all'} (--tokens-per-step)")
        model = load_model(
            args.model, batch=1, seq=args.seq, dtype=args.dtype, rates=rates, experts_rank=args.experts_rank
        )
        return smallest_unbound(lambda batch: planned(model.with_batch(batch)))
    if not tokens.isdecimal() or int(tokens) < 1 or int(tokens) % of_one:
        raise ValueError(
            f"tokens a step must be auto or a multiple of {of_one} (GPUs x --seq), got {tokens} (--tokens-per-step)"
        )
    return planned(args.model, batch=int(tokens) // of_one)


def _tokens_text(found: Plan, args: argparse.Namespace) -> str:
    from ds_zo.planner import SLACK

    ranks = args.gpus * args.nodes
    text = f"{ranks * found.batch * found.seq:,} tokens a step, {found.batch} x {found.seq} on each GPU"
    if args.tokens_per_step != "auto":
        return text
    only = found.estimates[0]
    text = (
        f"{text}: the fewest at which copies lengthen a step of {only.contender} by at most {SLACK:.0%} "
        f"({only.up_nbytes / 1e9:.1f} GB up and {only.down_nbytes / 1e9:.1f} GB down at {found.rates.link_up_gbps:g} "
        f"GB/s, beside {only.compute_s:.2f} s of computation)"
    )
    if only.fits:
        return text
    place, option = ("host", "--host-memory-gb") if only.fits_device else ("GPU", "--device-memory-gb")
    return (
        f"{text}. They do not fit the {place}, and copies bound the step of fewer: name a number that fits "
        f"(--tokens-per-step N), or more memory ({option})"
    )
