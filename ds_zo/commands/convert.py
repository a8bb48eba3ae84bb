"""`ds-zo convert`: a ZeRO JSON becomes one of ours, or a JSON is checked."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from ds_zo.commands.arguments import DEFAULT_SEQ, add_command, add_machine, machine_rates, unprinted
from ds_zo.config import BACKENDS, backend_of, resolve_for_evaluation, with_section_on_top
from ds_zo.config.convert import (
    Conversion,
    autos_of,
    check,
    check_stock,
    convert,
    rate_warning_of,
    refused_autos,
    without_auto,
)
from ds_zo.config.errors import ConfigError, Errors, shown
from ds_zo.config.json_text import read_object
from ds_zo.config.marks import Trait
from ds_zo.config.rules import check_removed_features
from ds_zo.config.stock import DTYPE_NAMES

_EXAMPLES = (
    "ds-zo convert ds_config.json --to adalomo --out adalomo.json",
    "ds-zo convert ds_config.json --to zo --model facebook/opt-13b --device-memory-gb 24 --host-memory-gb 64 > zo.json",
    "ds-zo convert --check zo.json",
)
_OF_PLANS = ("device_memory_gb", "host_memory_gb", "seq", "rates", "gpu", "batch")
"""Options that have an effect only beside --model."""


def add(commands: Any) -> None:
    parser = add_command(
        commands,
        "convert",
        help="make a JSON of ds_zo from your ZeRO JSON, or check a JSON",
        about="Prints the new JSON, and on standard error a line for each change: key, old -> new, reason. A GPU's "
        "memory decides whether blocks stream from the host.",
        examples=_EXAMPLES,
    )
    parser.add_argument("config", type=Path, metavar="FILE", help="a DeepSpeed JSON, stock or of ds_zo")
    job = parser.add_mutually_exclusive_group(required=True)
    job.add_argument("--to", choices=BACKENDS, help="backend to convert to")
    job.add_argument("--check", action="store_true", help="only say whether FILE is valid, and for which backend")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the JSON here (default: standard output)")
    parser.add_argument("--model", help="plan memory and speed: a folder, a name on the Hub, or random:opt-6.7b")
    add_machine(parser)
    parser.add_argument("--batch", type=int, help="sequences per GPU in the plan (default: FILE's, or 1)")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    ds_config = _read(args.config)
    planned = [f"--{key.replace('_', '-')}" for key in _OF_PLANS if getattr(args, key) not in (None, DEFAULT_SEQ)]
    if args.check:
        others = [*(["--out"] if args.out else []), *(["--model"] if args.model else []), *planned]
        if others:
            raise ValueError(f"--check only reads FILE, got {', '.join(others)} too: leave that out (--check)")
        try:
            _check(ds_config)
        except ConfigError as error:
            raise ValueError("\nerror: ".join(each.alone() for each in (error, *error.also))) from None
        return
    if args.model is None and planned:
        raise ValueError(f"only the plan of a model reads {', '.join(planned)}, got no model: name it (--model)")
    if args.out is not None and args.out.exists() and args.out.samefile(args.config):
        raise ValueError(f"the JSON must go to another file, got {args.out}, which is the input: name another (--out)")
    found = convert(ds_config, to=args.to)
    plan_lines: list[str] = []
    if args.model is not None:
        found, plan_lines = unprinted(_planned, args, ds_config, found)
    lines = [f"{args.config} -> {args.to}", *map(str, found.changes), *(f"note: {note}" for note in found.notes)]
    by_size = "" if args.model else "; --model M chooses by the model's size"
    lines.append(f"learning rate to start from: {found.lr:g} ({found.lr_source}{by_size})")
    text = json.dumps(found.config, indent=2)
    if args.out is not None:
        args.out.write_text(text + "\n", encoding="utf-8")  # first: if it fails, its error is the only line
    for line in (*lines, *plan_lines):
        print(line, file=sys.stderr)
    if args.out is None:
        print(text)


def _read(path: Path) -> dict[str, Any]:
    try:
        return read_object(path)
    except ValueError as error:
        raise ValueError(f"the file must be JSON, without repeated keys: {error}; correct it ({path})") from None


def _check(ds_config: dict[str, Any]) -> None:
    """Prints the backend and "valid", or raises. Further lines name what has no effect and what is probably wrong."""
    backend, errors = backend_of(ds_config), Errors()
    if backend is None:
        if with_section_on_top(ds_config).get("ds_zo"):
            if ds_config.get("optimizer"):
                check(ds_config)  # raises: DeepSpeed's own engine would ignore the section
            resolve_for_evaluation(without_auto(ds_config))
            print("evaluation only: the JSON has a ds_zo section and no backend, so its engine refuses to train")
            return
        with errors:
            check_removed_features(ds_config)
        with errors:
            check_stock(ds_config)
        errors.raise_all()
        optimizer = without_auto(ds_config).get("optimizer")
        named = shown(optimizer.get("type")) if optimizer else "none"
        print(f"stock: DeepSpeed's own engine takes this JSON, and ds_zo does nothing (optimizer.type {named})")
        return
    refused = refused_autos(ds_config)
    if refused:
        text = f'Trainer and Accelerate replace "auto" in their own keys only, got it in {", ".join(refused)}'
        errors.add(ConfigError(f"{text}; leave the key out, which means the same", at=refused[0]))
    with errors:
        resolved = check(ds_config)
    errors.raise_all()
    print(f"backend: {backend}, {'streamed' if resolved.stream else 'resident'}")
    print("valid")
    for key in resolved.ignored:
        print(f"no effect: {key}")
    rate = rate_warning_of(ds_config, resolved)
    for warning in (*([rate] if rate else []), *resolved.warnings):
        print(f"warning: {warning}")
    if not ds_config.get("optimizer"):
        print("note: the script must pass an optimizer to deepspeed.initialize; without one the engine only evaluates")
    autos = autos_of(ds_config)
    if autos:
        print(f'note: Trainer or Accelerate must replace "auto" in {", ".join(autos)}; plain DeepSpeed does not')


def _planned(args: argparse.Namespace, ds_config: dict[str, Any], first: Conversion) -> tuple[Conversion, list[str]]:
    """The conversion for a model on a GPU, and lines on its memory and speed."""
    from ds_zo.planner import IN_4_BITS_FORMS, load_model, plan

    dtype, batch = _dtype(first), args.batch if args.batch is not None else _micro_batch(first.config)
    if batch < 1 or args.seq < 2:
        raise ValueError(f"batch must be >= 1 and seq >= 2, got {batch} and {args.seq} (--batch, --seq)")
    rates = machine_rates(args, dtype=dtype)
    decides = args.device_memory_gb is not None
    stream = first.resolved.section.stream.model_dump(exclude_unset=True)
    model = load_model(args.model, batch=batch, seq=args.seq, dtype=dtype, rates=rates)
    form: dict[str, Any] = {}
    for form in ({}, *(IN_4_BITS_FORMS if args.to == "adapter" and "frozen_dtype" not in stream else ())):
        found = plan(
            model,
            device_memory_gb=args.device_memory_gb,
            host_memory_gb=args.host_memory_gb,
            backends=[args.to],
            stream=stream | form,
            params=first.resolved.optimizer.model_dump(exclude_unset=True),
            offload=None if decides else first.resolved.stream,
        )
        estimate = found[args.to]
        if estimate.fits:
            break
    streams = "offload_param" in estimate.config.get("zero_optimization", {})
    converted = convert(
        ds_config,
        to=args.to,
        stream=streams if decides else None,
        form=form if estimate.fits else {},
        device_memory_gb=args.device_memory_gb,
        num_parameters=found.num_parameters,
    )
    limit = f"a GPU of {args.device_memory_gb:g} GB" if decides else "a GPU of any size"
    lines = [
        f"plan: {found.model}, {found.num_parameters:,} parameters, {found.batch} x {found.seq} tokens, {found.dtype}, "
        f"one process, {limit}; rates of {found.rates.name}",
        f"plan: {'streamed' if streams else 'resident'}: {estimate.setting}",
        f"plan: {estimate.device_peak_nbytes / 1e9:.1f} GB of GPU memory, {estimate.host_peak_nbytes / 1e9:.1f} GB of "
        f"host memory, {estimate.step_s * 1e3:.0f} ms a step, {found.tokens_per_s(estimate):,.0f} tokens/s",
        *(f"plan: {note}" for note in estimate.notes),
    ]
    resolved = converted.resolved
    one_pass = getattr(resolved.optimizer, "norm_scope", None) == "group"
    if resolved.entry.has(Trait.UPDATES_IN_BACKWARD) and resolved.gradient_clipping and not one_pass:
        lines.append("plan: the time is that of one backward pass; gradient_clipping adds another")
    if not estimate.fits:
        what = "host" if estimate.fits_device else "GPU"
        remedy = "ds-zo plan compares all methods; a smaller batch or length takes less"
        lines.append(f"plan: it does NOT fit the {what}'s memory: {remedy}")
    return converted, lines


def _micro_batch(config: dict[str, Any]) -> int:
    """Sequences of a micro-batch in one process, as DeepSpeed computes them; 1 if the JSON does not say."""
    names = ("train_micro_batch_size_per_gpu", "train_batch_size", "gradient_accumulation_steps")
    micro, total, steps = (value if isinstance(value := config.get(name), int) else None for name in names)
    return micro or max(1, (total or 1) // (steps or 1))


def _dtype(found: Conversion) -> Any:
    """The dtype of the JSON. Where a client chooses it, that is bf16."""
    autos = {"fp16.enabled", "bf16.enabled"} & {*autos_of(found.config)}
    written = DTYPE_NAMES[found.resolved.dtype]
    return "bf16" if autos and written == "fp32" else written
