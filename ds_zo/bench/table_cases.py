"""The cases of one table: the machine, then its contenders, each with the memory and the seconds that it may take."""

from __future__ import annotations

import argparse
import math
import multiprocessing
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache, partial
from typing import TYPE_CHECKING

from ds_zo.bench.runner import Case

if TYPE_CHECKING:
    from ds_zo.bench.contenders import Contender
    from ds_zo.bench.entrant import EntrantSpec

MACHINE = "machine"
"""The case that measures the bandwidth of the link and of the CPU's Adam."""
_BUILD_S = 300.0
"""Seconds that the first use of CPU Adam may compile for. A build that is stopped leaves a lock file."""
_MOST_OF_HOST = 0.9
"""Share of the host's memory. If PyTorch's rounding up would take more, stock DeepSpeed pins in exact sizes."""
_MACHINE_S = 60.0
"""Expected seconds of the machine's case, with imports and with compiling, on a machine that has done neither."""
_START_S, _FAILS_S = 8.0, 9.0
"""Seconds from the fork to the first step and after the last one, without memory; and until a model that is too large
for the card runs out of memory."""
_PINNED_S_PER_GB, _REGISTERED_S_PER_GB = 0.5, 0.08
"""Seconds per GB to allocate, fill and free host memory: stock DeepSpeed, and ds_zo."""


@dataclass(frozen=True)
class Planned:
    """What the planner expects of a contender."""

    device_gb: float
    """GPU memory at the peak, of the start too where the start counts."""
    host_gb: float
    exact_host_gb: float
    """Host memory if stock DeepSpeed pins in exact sizes."""
    step_s: float


def make_cases(args: argparse.Namespace, *, device: str, device_memory_gb: float | None = None) -> list[Case]:
    """Makes the cases in the order of `contenders.ORDER`, so that the most important contenders have rows if time runs
    out."""
    from ds_zo.bench.contenders import EXACT_PINNING, config_of, in_order_of_runs, shared_config
    from ds_zo.bench.entrant import EntrantSpec

    names = [name for word in args.contenders.split(",") if (name := word.strip())] if args.contenders else None
    rates = _named_numbers(args.lr, option="--lr", what="a learning rate", example="zo=1e-6")
    micro_batches = _micro_batches(args)
    spec = EntrantSpec(
        model=args.model,
        batch=args.batch,
        length=args.seq,
        steps=args.steps,
        warmup=args.warmup,
        dtype=args.dtype,
        device=device,
        layers=args.layers,
        device_memory_gb=device_memory_gb,
        checkpointing=not args.no_checkpointing,
        data=None if args.data is None else str(args.data),
        seed=args.seed,
        profile=not args.no_profile,
        max_s=args.max_s,
    )
    count_parameters(spec.model, layers=spec.layers, length=spec.length)  # refuses what no contender can train
    running = []
    for contender in in_order_of_runs(names):
        lacking = contender.missing(args.dtype)
        if lacking is None:
            running.append((contender, micro_batches.get(contender.name, 1)))
        else:
            print(f"{contender.name} left out: {lacking}", file=sys.stderr)
    sizes = [(contender.name, args.batch // accumulation) for contender, accumulation in running]
    plans = planned(args, sizes, cap_gb=device_memory_gb) if device == "cuda" else [None] * len(sizes)
    cases = []
    for (contender, accumulation), plan in zip(running, plans, strict=True):
        shared = shared_config(
            batch=args.batch,
            dtype=args.dtype,
            gradient_clipping=args.gradient_clipping,
            accumulation=accumulation,
        )
        starts_uncapped = args.start_uncapped and contender.backend is None
        own = replace(spec, accumulation=accumulation, starts_uncapped=starts_uncapped)
        exact = plan is not None and _pins_exactly(plan)
        host_gb = None if plan is None else plan.exact_host_gb if exact else plan.host_gb
        config = config_of(contender, shared, lr=rates.get(contender.name), device_memory_gb=device_memory_gb)
        cases.append(
            Case(
                contender.name,
                "ds_zo.bench.entrant:run_contender",
                {"contender": contender.name, "config": config, "spec": asdict(own)},
                timeout_s=args.timeout_s,
                env=EXACT_PINNING if exact else {},
                planned_host_gb=host_gb,
                expected_s=0.0 if plan is None else _expected_s(contender, plan, own, host_gb=host_gb or 0.0),
            )
        )
    machine = Case(
        MACHINE,
        "ds_zo.bench.entrant:measure_machine",
        {"device": device},
        timeout_s=max(args.timeout_s, _BUILD_S),
        expected_s=_MACHINE_S if device == "cuda" else 0.0,
    )
    return [machine, *cases]


def planned(
    args: argparse.Namespace, sizes: Sequence[tuple[str, int]], *, cap_gb: float | None
) -> list[Planned | None]:
    """What the planner expects of each (contender, micro-batch); None for a model that is cut in depth. In a process of
    its own: a plan may initialise CUDA, and then no case could be forked from this process."""
    if args.layers is not None:
        return [None] * len(sizes)
    with multiprocessing.get_context("fork").Pool(1) as pool:
        return pool.apply(_planned, (args, sizes, cap_gb))


def _planned(args: argparse.Namespace, sizes: Sequence[tuple[str, int]], cap_gb: float | None) -> list[Planned | None]:
    from ds_zo.bench.contenders import ALL
    from ds_zo.planner import load_model, plan

    models = {
        size: load_model(args.model, batch=size, seq=args.seq, dtype=args.dtype) for size in {size for _, size in sizes}
    }
    found: list[Planned | None] = []
    for name, size in sizes:
        contender, model = ALL[name], models[size]
        of_planner = partial(
            plan,
            model,
            device_memory_gb=cap_gb,
            backends=[contender.planned_as],
            stream=(contender.ds_zo or {}).get("stream"),
            offload="offload_param" in contender.zero_optimization and contender.backend is not None,
            checkpointing=not args.no_checkpointing,
        )
        rounded = of_planner()[contender.planned_as]
        exact = of_planner(native_pins=True)[contender.planned_as] if contender.backend is None else rounded
        starts_whole = args.start_uncapped and contender.backend is None
        more = contender.more_host_bytes_each * model.numel
        found.append(
            Planned(
                device_gb=(rounded.device_nbytes if starts_whole else rounded.device_peak_nbytes) / 1e9,
                host_gb=(rounded.host_peak_nbytes + more) / 1e9,
                exact_host_gb=(exact.host_peak_nbytes + more) / 1e9,
                step_s=rounded.step_s * args.batch / size,
            )
        )
    return found


def _pins_exactly(plan: Planned) -> bool:
    """Whether DeepSpeed pins in exact sizes. The machine's total memory decides, not its free memory, so that a resumed
    run decides alike."""
    from ds_zo.records.environment import host_total_bytes, may_lock_memory

    most_gb = _MOST_OF_HOST * host_total_bytes() / 1e9
    return plan.exact_host_gb < plan.host_gb and plan.host_gb > most_gb > 0 and may_lock_memory()


def _expected_s(contender: Contender, plan: Planned, spec: EntrantSpec, *, host_gb: float) -> float:
    """Seconds of a case, on the planner's machine."""
    from ds_zo.bench.entrant import EXTRA_STEPS
    from ds_zo.records.environment import gpu_memory_gb

    card_gb = (None if spec.starts_uncapped else spec.device_memory_gb) or gpu_memory_gb()
    if card_gb is not None and contender.ds_zo is None and plan.device_gb > card_gb:
        return _FAILS_S
    timed = spec.steps if spec.max_s is None else min(spec.steps, max(2, int(spec.max_s / plan.step_s)))
    warmup = spec.warmup if spec.max_s is None or plan.step_s < spec.max_s / 2 else 2
    extra = next(number for longest_s, number in EXTRA_STEPS if plan.step_s < longest_s)
    num_steps = 1 + warmup + max(contender.period, timed) + 2 * max(contender.period, extra)
    pinning_s = _PINNED_S_PER_GB if contender.backend is None else _REGISTERED_S_PER_GB
    return _START_S + pinning_s * host_gb + num_steps * plan.step_s


@lru_cache(maxsize=8)
def count_parameters(model: str, *, layers: int | None, length: int) -> int:
    """Counts a model's parameters from its config alone, on the meta device."""
    from accelerate import init_empty_weights
    from transformers import AutoModelForCausalLM

    from ds_zo.bench.shapes import config_of_model
    from ds_zo.planner.models import check_positions

    config = config_of_model(model, num_layers=layers, max_length=length)
    with init_empty_weights(include_buffers=False):
        made = AutoModelForCausalLM.from_config(config)
    made.tie_weights()
    check_positions(made, model, seq=length)
    return sum(p.numel() for p in made.parameters())


def _named_numbers(given: Sequence[str], *, option: str, what: str, example: str) -> dict[str, float]:
    """Reads a number for each of some contenders."""
    from ds_zo.bench.contenders import ALL

    numbers = {}
    for text in given:
        name, _, number = text.partition("=")
        try:
            numbers[name] = float(number)
        except ValueError:
            raise ValueError(f"{what} is NAME=NUMBER, got {text!r}, say {example} ({option})") from None
        if name not in ALL or not 0 <= numbers[name] < math.inf:
            raise ValueError(f"{what} is one of {', '.join(ALL)}, and >= 0, got {text!r} ({option})")
    return numbers


def _micro_batches(args: argparse.Namespace) -> dict[str, int]:
    """Number of micro-batches into which a contender's batch is divided."""
    from ds_zo.bench.contenders import ALL

    example = "zero2-offload=4"
    given = _named_numbers(args.accumulate, option="--accumulate", what="a number of micro-batches", example=example)
    for name, number in given.items():
        if number < 1 or args.batch % number:
            raise ValueError(
                f"micro-batches must divide the batch, got {number:g} for {name} and a batch of {args.batch}: "
                "change one of them (--accumulate, --batch)"
            )
        if number > 1 and not ALL[name].accumulates:
            raise ValueError(f"{name} does not accumulate gradients here, got {number:g}: leave it out (--accumulate)")
    return {name: int(number) for name, number in given.items()}
