#!/usr/bin/env python
"""Run a grid of training runs (method x task x learning rate x seed) as rows of a JSONL file; call again to continue.

    python launch/sweep.py --grid smoke --results runs/smoke.jsonl --jobs 2
    python launch/sweep.py --grid mezo --model facebook/opt-1.3b --data-root DIR --results runs/mezo.jsonl --dry-run

The accuracy table in pieces of eight minutes, many runs at once on one GPU; the same command again continues. CUDA's
multi-process service (`nvidia-cuda-mps-control -d`) lets their short kernels run side by side:

    python launch/sweep.py --grid accuracy --choose-rates --model DIR --data-root DIR --results rows.jsonl --jobs 14 \\
        --max-seconds 480
    python -m benchmarks.accuracy rows.jsonl

Arguments of launch/train.py after `--` are passed to every run: `-- --num-eval 200 --dtype fp32`.
"""

from __future__ import annotations

import argparse
import dataclasses
import shlex
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # a clone works without being installed

from benchmarks.accuracy import SELECT_SEED, SELECT_TASKS, best_rates, staged_cases, tuning_cases, whole_sweep
from benchmarks.grid import Grid, GridCase, GridError
from benchmarks.grids import GRIDS, read_grid
from benchmarks.sweep import Start, Sweep, nothing_known, read_rows, remaining, rows_of, run
from benchmarks.sweep_cost import expectation, plan_table
from ds_zo.records.rows import Row

SCRIPT = Path(__file__).resolve().parent / "train.py"


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--grid", default="smoke", metavar="NAME|FILE", help=f"{', '.join(GRIDS)}, or a JSON file")
    parser.add_argument(
        "--results", type=Path, required=True, metavar="FILE", help="rows; what has one is not run again"
    )
    parser.add_argument("--model", default="embedded", metavar="NAME_OR_PATH", help="as launch/train.py takes it")
    parser.add_argument("--data-root", type=Path, metavar="DIR", help="holds a folder of JSONL files for each task")

    part = parser.add_argument_group("part of the grid")
    part.add_argument("--methods", metavar="A,B", help="these only")
    part.add_argument("--tasks", metavar="A,B", help="instead of the grid's")
    part.add_argument("--seeds", metavar="0,1", help="instead of the grid's")
    part.add_argument("--lrs", metavar="1e-6,1e-7", help="instead of every method's own")
    stage = part.add_mutually_exclusive_group()
    stage.add_argument(
        "--choose-rates",
        action="store_true",
        help=f"try methods' rates on {', '.join(SELECT_TASKS)} with seed {SELECT_SEED}, then run the grid at the best",
    )
    stage.add_argument("--tune", action="store_true", help="only the first half: try the rates")
    stage.add_argument(
        "--rates-from", type=Path, metavar="FILE", help="rows that say which rate each method did best with"
    )
    part.add_argument("--steps", type=int, metavar="N", help="instead of every method's own")
    part.add_argument("--limit", type=int, metavar="N", help="the first N cases that have no row yet")

    how = parser.add_argument_group("how to run it")
    how.add_argument("--jobs", type=int, default=1, metavar="N", help="processes at once (default: %(default)s)")
    how.add_argument(
        "--device-gb",
        type=float,
        metavar="GB",
        help="the GPU's memory: with --jobs, as many runs at once as fit it, if the grid states their memory",
    )
    how.add_argument(
        "--max-seconds", type=float, metavar="S", help="end within S seconds; running cases save a checkpoint"
    )
    how.add_argument(
        "--grace",
        type=float,
        metavar="S",
        help="seconds of --max-seconds in which running cases save (default: a tenth, 45 at most)",
    )
    how.add_argument(
        "--fill",
        action="store_true",
        help="with --max-seconds: also begin cases that the next call on this machine must resume",
    )
    how.add_argument(
        "--case-seconds", type=float, metavar="S", help="seconds of training per case, for comparisons at equal time"
    )
    how.add_argument("--most-seconds", type=float, metavar="S", help="kill a case that takes longer, as a failure")
    how.add_argument("--folder", type=Path, metavar="DIR", help="logs and checkpoints (default: beside the results)")
    how.add_argument("--retry-failed", action="store_true", help="run cases again that failed, each once more")
    how.add_argument(
        "--start",
        choices=get_args(Start),
        default="forkserver",
        help="how a case's process starts: forkserver saves the imports, spawn is a fresh interpreter",
    )
    shown = how.add_mutually_exclusive_group()
    shown.add_argument("--dry-run", action="store_true", help="show the cases that would be run")
    shown.add_argument(
        "--plan", action="store_true", help="show the seconds that the remaining cases will take, by method"
    )
    parser.add_argument("train_arguments", nargs="*", metavar="-- ...", help="for launch/train.py")

    args = parser.parse_args(argv)
    for name in ("jobs", "device_gb", "max_seconds", "grace", "case_seconds", "most_seconds", "steps", "limit"):
        value = getattr(args, name)
        if value is not None and value <= 0:
            parser.error(f"--{name.replace('_', '-')} must be positive, got {value}")
    if args.results.is_dir():
        parser.error(f"--results must be a file, got the folder {args.results}")
    if args.data_root is not None and not args.data_root.is_dir():
        parser.error(f"--data-root must be a folder, got {args.data_root}")
    if args.folder is None:
        # A checkpoint of one model must not resume a case of another.
        args.folder = args.results.parent / f"{args.results.stem}-runs" / Path(args.model).name
    return args


def chosen_grid(args: argparse.Namespace) -> Grid:
    """Reads the grid and keeps the methods, tasks, seeds and rates that the command line names."""
    grid = read_grid(args.grid)
    methods = dict(grid.methods)
    if args.methods:
        wanted = args.methods.split(",")
        unknown = [name for name in wanted if name not in methods]
        if unknown:
            raise GridError(
                f"grid {args.grid} has the methods {', '.join(methods)}; got {', '.join(unknown)} (--methods)"
            )
        methods = {name: methods[name] for name in wanted}
    if args.lrs:
        lrs = tuple(float(lr) for lr in args.lrs.split(","))
        methods = {name: dataclasses.replace(m, lrs=lrs if m.lrs else ()) for name, m in methods.items()}
    return Grid(
        methods,
        tuple(args.tasks.split(",")) if args.tasks else grid.tasks,
        tuple(int(seed) for seed in args.seeds.split(",")) if args.seeds else grid.seeds,
        grid.arguments,
    )


def chosen_rates(path: Path, grid: Grid) -> dict[str, float]:
    """Returns the best rate of each method in another sweep's rows. A method without one runs at the grid's rates; a
    line on stdout names it."""
    rows = rows_of([path])
    tried = sorted({row["task"] for row in rows if row["status"] == "ok"})
    rates = best_rates(rows, tasks=[task for task in SELECT_TASKS if task in tried] or tried)
    wanted = {name: method.lr_of or name for name, method in grid.methods.items() if method.lrs}
    untold = [name for name, source in wanted.items() if source not in rates]
    if untold and len(untold) == len(wanted):
        told = ", ".join(rates) or "no method"
        raise GridError(f"{path} tells the rates of {told}, not of {', '.join(wanted)} (--rates-from)")
    if untold:
        print(f"{path} tells no rate of {', '.join(untold)}: run at the grid's own")
    return rates


class Listing:
    """The cases that a command line selects. `run` asks for them again as rows come in. Rows of another model decide
    nothing.

    `--retry-failed` and `--limit` refer to the rows and cases at the start of the command.
    """

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.grid = chosen_grid(args)
        self.rates = chosen_rates(args.rates_from, self.grid) if args.rates_from else None
        before = self.own(read_rows(args.results))
        failures = Counter(row["key"] for row in before if row["status"] != "ok") if args.retry_failed else Counter()
        self.retried = {key for key, count in failures.items() if count == 1}
        self.num_before = len(before)
        first = self.left(before)[: args.limit]
        self.only = None if args.limit is None else {case.key for case in first}

    def own(self, rows: Sequence[Row]) -> list[Row]:
        """The rows of this command's model. Its folder may be in another place on another machine."""
        name = Path(self.args.model).name
        return [row for row in rows if Path(row.get("model", name)).name == name]

    def cases(self, rows: Sequence[Row]) -> list[GridCase]:
        if self.args.tune:
            return tuning_cases(self.grid, steps=self.args.steps)
        if self.args.choose_rates:
            return staged_cases(self.grid, self.own(rows), steps=self.args.steps)
        return list(self.grid.cases(lrs=self.rates, steps=self.args.steps))

    def made_otherwise(self, rows: Sequence[Row]) -> list[str]:
        """Keys of cases whose last row was made with other arguments than this command has."""
        wanted = {case.key: [*case.arguments, *self.args.train_arguments] for case in self.cases(rows)}
        last = {row["key"]: row for row in self.own(rows) if row["key"] in wanted and "arguments" in row}
        return [key for key, row in last.items() if row["arguments"] != wanted[key]]

    def whole(self, rows: Sequence[Row]) -> list[GridCase]:
        """The remaining cases, with those whose learning rate is not chosen yet."""
        rows = self.own(rows)
        if self.args.choose_rates:
            return remaining(whole_sweep(self.grid, rows, steps=self.args.steps), rows)
        return self(rows)

    def left(self, rows: Sequence[Row]) -> list[GridCase]:
        rows = self.own(rows)
        before = [row for row in rows[: self.num_before] if row["status"] == "ok" or row["key"] not in self.retried]
        settling = [*before, *rows[self.num_before :]]
        return remaining(self.cases(settling), settling)

    def __call__(self, rows: Sequence[Row]) -> list[GridCase]:
        return [case for case in self.left(rows) if self.only is None or case.key in self.only]


def check_memory(cases: Sequence[GridCase], sweep: Sweep) -> None:
    """Ends the command if cases state their memory and the GPU's is not known, or too small for one of them."""
    stated = [case for case in cases if case.device_gb is not None]
    if not stated or sweep.jobs == 1:
        return
    largest = max(stated, key=lambda case: case.device_gb or 0.0)
    if sweep.device_gb is None:
        sys.exit(
            f"error: runs of this grid take up to {largest.device_gb:g} GB each, so that several at once need the "
            "GPU's memory: got none (--device-gb)"
        )
    if largest.device_gb is not None and largest.device_gb > sweep.shared_gb:
        sys.exit(
            f"error: {largest.key} takes {largest.device_gb:g} GB; runs side by side may take {sweep.shared_gb:.0f} "
            f"of the GPU's {sweep.device_gb:g}: leave it out, or run one at a time (--methods, --jobs 1)"
        )


def main(argv: list[str] | None = None) -> None:
    args = parse_args(argv)
    try:
        listing = Listing(args)
    except (GridError, ValueError) as error:
        sys.exit(f"error: {error}")
    sweep = Sweep(
        script=SCRIPT,
        results=args.results,
        folder=args.folder,
        model=args.model,
        data_root=args.data_root,
        jobs=args.jobs,
        max_seconds=args.max_seconds,
        grace_s=args.grace,
        case_seconds=args.case_seconds,
        most_seconds=args.most_seconds,
        device_gb=args.device_gb,
        arguments=tuple(args.train_arguments),
        start=args.start,
    )
    rows = read_rows(args.results)
    check_memory(listing.whole(rows), sweep)
    if args.plan:
        try:
            data_root = args.data_root or Path()
            plan = plan_table(
                listing.whole(rows),
                model=args.model,
                data_root=data_root,
                jobs=args.jobs,
                arguments=sweep.arguments,
                shared_gb=sweep.shared_gb,
            )
            print(plan)
        except ValueError as error:
            sys.exit(f"error: {error} (--model, --data-root)")
        return
    left, num_cases = listing(rows), len({case.key for case in listing.cases(rows)})
    if args.case_seconds is None:
        seconds = expectation(model=args.model, data_root=args.data_root, jobs=args.jobs, arguments=sweep.arguments)
    else:
        seconds = nothing_known  # evaluation comes on top
    expected = [seconds(case, rows) for case in left]
    known = [s for s in expected if s is not None]
    about = f", about {sum(known) / args.jobs:.0f} s" if known else ""
    if args.case_seconds is not None:
        about = f", {args.case_seconds:g} s of training each"
    print(f"{num_cases} cases, {len(left)} to run now{about}", flush=True)
    if others := listing.made_otherwise(rows):
        print(
            f"cases with rows of other arguments in {args.results}: {len(others)}, such as {others[0]}. They are not "
            "run again: name another file to run them (--results)",
            flush=True,
        )
    if args.dry_run:
        for case, s in zip(left, expected, strict=True):
            print(f"{case.key}{f' ({s:.0f} s)' if s else ''}: launch/train.py {shlex.join(sweep.command(case))}")
        return
    num_rows = run(sweep, listing, expectation=nothing_known if args.fill else seconds)
    rows = read_rows(args.results)
    failed = sum(row["status"] == "failed" for row in rows[-num_rows:]) if num_rows else 0
    num_left = len(listing(rows))
    print(f"{num_rows} rows written to {args.results}, {failed} of them failures; {num_left} cases left")


if __name__ == "__main__":
    main()
