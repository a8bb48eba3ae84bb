"""The cases of one table: the machine, then its contenders; and which of them need not run.

[Note: one case, two cards] Several caps make one run with a table each, the largest card first. A row of a larger card
also holds for a smaller one if the contender has the same set-up there, and its allocator never held more than the
smaller card has. Both tables then show the row, and the smaller card's says so. The row of a contender that failed with
more memory holds too. ds_zo is told the card's size (`device_memory_gb`), which decides how many blocks stay on it.
That size may differ if the number of blocks is given, or if all blocks stayed and leave the margin that the engine
keeps.
"""

from __future__ import annotations

import argparse
import copy
import math
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from ds_zo.bench.runner import Case, read_rows
from ds_zo.records.rows import Row, append_row

MACHINE = "machine"
"""The case that measures the bandwidth of the link and of the CPU's Adam."""
_BUILD_S = 300.0
"""Seconds that the first use of CPU Adam may compile for. A build that is stopped leaves a lock file."""
_IMPORTS_GB = 1.5
"""Host memory in GB of a child before it has a model: Python, torch, CUDA."""
_MOST_OF_HOST = 0.9
"""Share of the host's memory. If PyTorch's rounding up would take more, stock DeepSpeed pins in exact sizes."""
_FAILED = ("oom", "crash", "timeout")
_MACHINE_S = 60.0
"""Expected seconds of the machine's case, with imports and with compiling, on a machine that has done neither."""


def make_cases(args: argparse.Namespace, *, device: str, device_memory_gb: float | None = None) -> list[Case]:
    """Makes the cases in the order of `contenders.TIERS`, so that the most important contenders have rows if time runs
    out."""
    from ds_zo.bench.case_costs import expected_s
    from ds_zo.bench.contenders import EXACT_PINNING, config_of, in_order_of_runs, shared_config
    from ds_zo.bench.entrant import EntrantSpec
    from ds_zo.records.environment import gpu_memory_gb

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
    num_parameters = count_parameters(spec.model, layers=spec.layers, length=spec.length)
    cases: list[Case] = []
    for contender in in_order_of_runs(names):
        lacking = contender.missing(args.dtype)
        if lacking is not None:
            print(f"{contender.name} left out: {lacking}", file=sys.stderr)
            continue
        accumulation = micro_batches.get(contender.name, 1)
        shared = shared_config(
            batch=args.batch,
            dtype=args.dtype,
            gradient_clipping=args.gradient_clipping,
            accumulation=accumulation,
        )
        own = replace(
            spec, accumulation=accumulation, starts_uncapped=args.start_uncapped and contender.backend is None
        )
        exact = device == "cuda" and _pins_exactly(contender, num_parameters)
        host_gb = contender.host_bytes(num_parameters, exact=exact) / 1e9
        config = config_of(contender, shared, lr=rates.get(contender.name), device_memory_gb=device_memory_gb)
        cases.append(
            Case(
                contender.name,
                "ds_zo.bench.entrant:run_contender",
                {"contender": contender.name, "config": config, "spec": asdict(own)},
                timeout_s=args.timeout_s,
                env=EXACT_PINNING if exact else {},
                planned_host_gb=host_gb + _IMPORTS_GB if device == "cuda" else None,
                expected_s=expected_s(
                    contender,
                    num_parameters,
                    own,
                    host_gb=host_gb,
                    card_gb=(None if own.starts_uncapped else device_memory_gb) or gpu_memory_gb(),
                )
                if device == "cuda"
                else 0.0,
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


def _pins_exactly(contender: Any, num_parameters: int) -> bool:
    """Whether DeepSpeed pins in exact sizes. The machine's total memory decides, not its free memory, so that a resumed
    run decides alike."""
    from ds_zo.records.environment import host_total_bytes, may_lock_memory

    rounded, exact = (contender.host_bytes(num_parameters, exact=exact) for exact in (False, True))
    return bool(exact < rounded > _MOST_OF_HOST * host_total_bytes() > 0 and may_lock_memory())


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


def likely_carried_over(case: Case) -> bool:
    """Whether a larger card's row will probably hold for this case of a smaller one."""
    from ds_zo.bench.case_costs import likely_holds
    from ds_zo.bench.contenders import ALL

    spec = case.params["spec"]
    num_parameters = count_parameters(spec["model"], layers=spec["layers"], length=spec["length"])
    return likely_holds(ALL[case.name], num_parameters, spec["device_memory_gb"])


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


def carry_over(done: Sequence[Row], cases: Sequence[Case], out: Path) -> None:
    """Appends the rows that also hold for these cases to their file, unless it has them: [Note: one case, two
    cards]."""
    known = {(row["run_id"], row["case"], row["config_hash"]) for row in (read_rows(out) if out.exists() else ())}
    for case in cases:
        row = next((row for row in done if row["case"] == case.name and holds_for(row, case)), None)
        if row is not None and (row["run_id"], case.name, case.config_hash) not in known:
            moved = {"params": case.params, "config_hash": case.config_hash}
            if case.name != MACHINE:
                moved["ran_with_gb"] = row.get("ran_with_gb") or row["params"]["spec"]["device_memory_gb"] or "all"
            append_row(out, row | moved)


def holds_for(row: Row, case: Case) -> bool:
    """Whether the row of a larger card is the row that this case would have on its own card."""
    if row["target"] != case.target or row.get("env", {}) != dict(case.env):
        return False
    if case.name == MACHINE:
        return bool(row["status"] in ("ok", *_FAILED) and row["params"] == case.params)
    there, here = row["params"], case.params
    alike = {**there["spec"], "device_memory_gb": None} == {**here["spec"], "device_memory_gb": None}
    if not alike or _untold(there["config"]) != _untold(here["config"]):
        return False
    if row["status"] in _FAILED:
        return bool(there["config"] == here["config"])
    if row["status"] != "ok":
        return False
    held_gb = max(row["reserved_before_gb"], row["peak_reserved_gb"])
    return bool(held_gb <= _room_gb(here))


def _room_gb(params: Row) -> float:
    """GB of device memory with which a contender behaves as it does with more."""
    from ds_zo.streaming.budget import MARGIN_NBYTES

    stream = params["config"].get("ds_zo", {}).get("stream", {})
    if "device_memory_gb" not in stream or "resident_blocks" in stream:
        return float(params["spec"]["device_memory_gb"])
    return float(stream["device_memory_gb"]) - MARGIN_NBYTES / 1e9


def _untold(config: Row) -> Row:
    """The JSON without the card's size, which only ds_zo is told."""
    config = copy.deepcopy(config)
    config.get("ds_zo", {}).get("stream", {}).pop("device_memory_gb", None)
    return config
