"""Finds the micro-batch with which a contender makes the most tokens a second, at equal tokens a step for all.

A step has `--batch` sequences for every contender. They are divided into micro-batches of 2**n equal parts. The planner
estimates the GPU memory of each size, and the search begins with the largest that it expects to fit, so that few sizes
run. If that runs out of memory, the size is halved until one runs. If it runs, it is doubled as long as the next is
faster, and is planned to need hardly more than the card has. Every trial is a row of `trials.jsonl`, and the best of
them is the contender's row in `rows.jsonl`, with `tried` in it.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from ds_zo.bench.contenders import ALL
from ds_zo.bench.runner import NOT_RUN, Case, read_rows, run_cases
from ds_zo.bench.table_cases import MACHINE, make_cases, planned
from ds_zo.records.rows import Row, append_row

_CLOSE = 1.2
"""A size that is planned to need up to so many times the card's memory is tried after the size below it has run."""


def sizes_of(batch: int, *, accumulates: bool) -> list[int]:
    """Micro-batches to choose from, the largest first: the batch, halved while it is even."""
    sizes = [batch]
    while accumulates and sizes[-1] % 2 == 0:
        sizes.append(sizes[-1] // 2)
    return sizes


def search(
    sizes: Sequence[int], *, planned_gb: Callable[[int], float], room_gb: float, run: Callable[[int], Row]
) -> tuple[Row, list[Row]]:
    """Runs some sizes, and returns the best row and all rows. `sizes` begin with the largest. A call that has no time
    left ends the search."""
    start = next((i for i, size in enumerate(sizes) if planned_gb(size) <= room_gb), len(sizes) - 1)
    rows: list[Row] = [run(sizes[start])]
    at = start
    while rows[-1]["status"] == "oom" and at + 1 < len(sizes):
        at += 1
        rows.append(run(sizes[at]))
    if rows[0]["status"] == "ok":
        for size in reversed(sizes[:start]):
            if planned_gb(size) > _CLOSE * room_gb:
                break
            rows.append(run(size))
            if _speed(rows[-1]) <= _speed(rows[-2]):
                break
    return max(rows, key=_speed) if any(row["status"] == "ok" for row in rows) else rows[-1], rows


def _speed(row: Row) -> float:
    return float(row["tokens_per_s_mean"]) if row["status"] == "ok" else -math.inf


def run_best(args: argparse.Namespace, *, folder: Path, run_id: str, device: str, ends: float) -> None:
    """Searches for every contender of a table, and writes `trials.jsonl` and `rows.jsonl` into the folder."""
    from ds_zo.records.environment import gpu_memory_gb

    (cap_gb,) = args.device_memory_gb
    out = folder / "rows.jsonl"
    room_gb = cap_gb or (gpu_memory_gb() if device == "cuda" else None) or math.inf

    def ran(case: Case, path: Path) -> Row:
        (row,) = run_cases(
            [case],
            out=path,
            run_id=run_id,
            resume=True,
            min_free_host_gib=args.min_free_host_gib,
            device=device,
            spawn=args.spawn,
            total_s=None if math.isinf(ends) else max(0.0, ends - time.monotonic()),
        )
        return row

    for whole in make_cases(args, device=device, device_memory_gb=cap_gb):
        if whole.name == MACHINE:
            ran(whole, out)
            continue
        known = read_rows(out) if out.exists() else []
        if any(row["run_id"] == run_id and row["case"] == whole.name and row["status"] != NOT_RUN for row in known):
            continue

        def run(size: int, name: str = whole.name) -> Row:
            print(f"{name}: micro-batches of {size}", file=sys.stderr)
            return ran(_case_of(args, name, size, device=device, cap_gb=cap_gb), folder / "trials.jsonl")

        sizes = sizes_of(args.batch, accumulates=ALL[whole.name].accumulates)
        plans = planned(args, [(whole.name, size) for size in sizes], cap_gb=None if math.isinf(room_gb) else room_gb)
        planned_gb = {size: plan.device_gb if plan else 0.0 for size, plan in zip(sizes, plans, strict=True)}
        best, rows = search(sizes, planned_gb=planned_gb.__getitem__, room_gb=room_gb, run=run)
        append_row(out, best | {"tried": [_brief(row) for row in rows]})


def _case_of(args: argparse.Namespace, name: str, size: int, *, device: str, cap_gb: float | None) -> Case:
    divided = [f"{name}={args.batch // size}"] if size < args.batch else []
    own = argparse.Namespace(**{**vars(args), "contenders": name, "accumulate": divided})
    return make_cases(own, device=device, device_memory_gb=cap_gb)[1]


def _brief(row: Row) -> Row:
    spec = row["params"]["spec"]
    brief = {"micro_batch": spec["batch"] // spec["accumulation"], "status": row["status"]}
    return brief | {key: row[key] for key in ("tokens_per_s_mean", "peak_gb") if key in row}
