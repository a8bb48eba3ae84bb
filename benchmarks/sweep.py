"""Run a grid of training runs (method x task x learning rate x seed) as rows of a JSONL file; call again to continue.

    python launch/sweep.py --grid smoke --results runs/smoke.jsonl --jobs 2
    python launch/sweep.py --grid mezo --model facebook/opt-1.3b --data-root DIR --results runs/mezo.jsonl --dry-run

The accuracy table in calls of eight minutes, many runs at once on one GPU; the same command again continues. CUDA's
multi-process service (`nvidia-cuda-mps-control -d`) lets their short kernels run side by side:

    python launch/sweep.py --grid accuracy --choose-rates --model DIR --data-root DIR --results rows.jsonl --jobs 14 \\
        --max-seconds 480
    python -m benchmarks.accuracy rows.jsonl

A case that has a row is not run again. A call begins no case that rows of like cases expect to end too late. Cases that
are cut off run again in the next call. Arguments of launch/train.py after `--` are passed to every run:
`-- --num-eval 200 --dtype fp32`.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import statistics
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.accuracy import SELECT_SEED, SELECT_TASKS, best_rates, staged_cases, tuning_cases
from benchmarks.grid import Grid, GridCase, GridError, read_rows, remaining, rows_of
from benchmarks.grids import GRIDS, read_grid
from benchmarks.humaneval import task as _humaneval  # noqa: F401  (registers the task)
from ds_zo.bench.runner import HARNESS_KEYS, NOT_RUN, WARM, Case, prepare_to_fork, run_cases
from ds_zo.records.rows import Row

MODEL, DATA_ROOT = "DS_ZO_SWEEP_MODEL", "DS_ZO_SWEEP_DATA_ROOT"
"""Variables that carry the paths to a case's process. Parameters of a row have no paths of the machine in them."""
MOST_POINTS = 40
"""Most losses in a row's curve. They are means over equal spans if a run read more."""
SAFETY = 1.15
"""Factor on the seconds of like cases: other processes on the device change."""
_WARM = (*WARM, "ds_zo.training.job", "transformers.models.auto.tokenization_auto")


# One case


def train(*, config: Row, options: Sequence[str], threads: int) -> Row:
    """Trains as launch/train.py does, and returns the run's summary. Runs in the case's own process."""
    import torch

    from benchmarks import references
    from ds_zo.training.arguments import parse_args
    from ds_zo.training.job import run_or_exit

    references.register()
    torch.set_num_threads(threads)
    with TemporaryDirectory() as folder:
        path = Path(folder) / "config.json"
        path.write_text(json.dumps(config, indent=2), encoding="utf-8")
        command = ["--deepspeed", str(path), "--model", os.environ[MODEL], "--output-dir", folder, "--no-save"]
        data = Path(os.environ.get(DATA_ROOT, folder)) / options[options.index("--task") + 1]
        command += ["--data-dir", str(data)] if data.is_dir() else []
        run_or_exit(parse_args([*command, *options]))
        summary = json.loads((Path(folder) / "summary.json").read_text(encoding="utf-8"))
    curve = summary.get("curve") or []
    left_out = {*HARNESS_KEYS, "config", "lr", "model", "model_folder", "checkpoint_folder"}
    row = {key: value for key, value in summary.items() if key not in left_out}
    return {**row, "curve": thinned(curve, MOST_POINTS), "first_step_s": first_step_s(curve)}


def first_step_s(curve: Sequence[Row]) -> float | None:
    """Seconds of the first step, in which a method builds, records or fits once. A thinned curve does not show them."""
    return next((float(point["train_s"]) for point in curve if point["step"] == 1), None)


def thinned(curve: Sequence[Row], num_points: int) -> list[Row]:
    """Shortens a curve: losses as means over at most `num_points` spans, all scores, no nulls."""
    losses = [point for point in curve if point.get("loss") is not None]
    width = -(-len(losses) // num_points) if losses else 1
    spans = [losses[i : i + width] for i in range(0, len(losses), width)]
    means = [{**span[-1], "loss": round(sum(p["loss"] for p in span) / len(span), 5)} for span in spans]
    kept = sorted([*means, *(p for p in curve if p.get("loss") is None)], key=lambda point: point["step"])
    return [{name: value for name, value in point.items() if value is not None} for point in kept]


def options_of(case: GridCase, *, case_seconds: float | None, arguments: Sequence[str]) -> list[str]:
    """The arguments of launch/train.py for a case, without paths."""
    options = ["--task", case.task, "--steps", str(case.steps), "--seed", str(case.seed)]
    options += ["--eval-every", str(case.eval_every), "--skip-zero-shot"] if case.steps else []
    options += ["--lora-rank", str(case.lora_rank)] if case.lora_rank is not None else []
    options += ["--max-seconds", f"{case_seconds:g}"] if case_seconds is not None else []
    return [*options, *case.arguments, *arguments]


def expected_s(case: GridCase, rows: Sequence[Row], *, jobs: int) -> float:
    """Seconds that a case will take beside `jobs` - 1 others, from rows of like cases; 0: unknown."""
    like = [case.method, case.task, case.steps, jobs]
    walls = [row["wall_s"] for row in rows if [row.get(key) for key in ("method", "task", "steps", "jobs")] == like]
    return SAFETY * statistics.median(walls) if walls else 0.0


# Command


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
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
    how.add_argument("--max-seconds", type=float, metavar="S", help="end within S seconds; the next call goes on")
    how.add_argument(
        "--case-seconds", type=float, metavar="S", help="seconds of training per case, for comparisons at equal time"
    )
    how.add_argument("--most-seconds", type=float, metavar="S", help="kill a case that takes longer, as a failure")
    how.add_argument("--retry-failed", action="store_true", help="run cases again that failed, each once more")
    how.add_argument("--spawn", action="store_true", help="start each case in a fresh interpreter instead of a fork")
    how.add_argument("--dry-run", action="store_true", help="show the cases that would be run")
    parser.add_argument("train_arguments", nargs="*", metavar="-- ...", help="for launch/train.py")

    args = parser.parse_args(argv)
    for name in ("jobs", "device_gb", "max_seconds", "case_seconds", "most_seconds", "steps", "limit"):
        value = getattr(args, name)
        if value is not None and value <= 0:
            parser.error(f"--{name.replace('_', '-')} must be positive, got {value}")
    if args.results.is_dir():
        parser.error(f"--results must be a file, got the folder {args.results}")
    if args.data_root is not None and not args.data_root.is_dir():
        parser.error(f"--data-root must be a folder, got {args.data_root}")
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
    """The cases that a command line selects. Rows bring new cases where they decide rates. Rows of another model decide
    nothing.

    `--retry-failed` and `--limit` refer to the rows and cases at the start of the command.
    """

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.grid = chosen_grid(args)
        self.rates = chosen_rates(args.rates_from, self.grid) if args.rates_from else None
        before = self._own()
        failures = Counter(row["key"] for row in before if row["status"] != "ok") if args.retry_failed else Counter()
        self._retried = {key for key, count in failures.items() if count == 1}
        self._num_before = len(before)
        self._only: set[str] | None = None
        self._only = None if args.limit is None else {case.key for case in self.left()[: args.limit]}

    def _own(self) -> list[Row]:
        """The rows of this command's model. Its folder may be in another place on another machine."""
        name = Path(self.args.model).name
        return [row for row in read_rows(self.args.results) if Path(row.get("model", name)).name == name]

    def cases(self, rows: Sequence[Row]) -> list[GridCase]:
        if self.args.tune:
            return tuning_cases(self.grid, steps=self.args.steps)
        if self.args.choose_rates:
            return staged_cases(self.grid, rows, steps=self.args.steps)
        return list(self.grid.cases(lrs=self.rates, steps=self.args.steps))

    def left(self) -> list[GridCase]:
        """The cases that have no row."""
        rows = self._own()
        before = [row for row in rows[: self._num_before] if row["status"] == "ok" or row["key"] not in self._retried]
        settling = [*before, *rows[self._num_before :]]
        left = remaining(self.cases(settling), settling)
        return [case for case in left if self._only is None or case.key in self._only]

    def made_otherwise(self) -> list[str]:
        """Keys of cases whose last row was made with other arguments than this command has."""
        wanted = {case.key: [*case.arguments, *self.args.train_arguments] for case in self.cases(self._own())}
        last = {row["key"]: row for row in self._own() if row["key"] in wanted and "arguments" in row}
        return [key for key, row in last.items() if row["arguments"] != wanted[key]]

    def to_run(self) -> list[Case]:
        rows = self._own()
        return [to_run(case, self.args, rows) for case in self.left()]


def to_run(case: GridCase, args: argparse.Namespace, rows: Sequence[Row]) -> Case:
    """The harness's case. `rows` tell how long it may take."""
    options = options_of(case, case_seconds=args.case_seconds, arguments=args.train_arguments)
    about = {key: value for key, value in asdict(case).items() if key != "config"}
    about["arguments"] = [*case.arguments, *args.train_arguments]
    threads = max(1, (os.cpu_count() or 1) // args.jobs)
    return Case(
        case.key,
        "benchmarks.sweep:train",
        {"config": case.config, "options": options, "threads": threads},
        timeout_s=args.most_seconds or math.inf,
        # With equal seconds of training, scoring comes on top.
        expected_s=expected_s(case, rows, jobs=args.jobs) if args.case_seconds is None else 0.0,
        device_gb=case.device_gb,
        labels={"key": case.key, **about, "jobs": args.jobs, "model": args.model},
    )


def check_memory(cases: Sequence[Case], args: argparse.Namespace) -> None:
    """Ends the command if cases of several jobs state their memory and the GPU's is not known."""
    largest = max((case.device_gb or 0.0 for case in cases), default=0.0)
    if largest and args.jobs > 1 and args.device_gb is None:
        raise GridError(
            f"runs of this grid take up to {largest:g} GB each, so that several at once need the GPU's memory: got "
            "none (--device-gb)"
        )


def run(args: argparse.Namespace, cases: Sequence[Case], *, ends: float = math.inf) -> list[Row]:
    """Runs the cases and returns their rows. `ends` is the `time.monotonic()` at which the call ends."""
    os.environ[MODEL] = args.model
    if args.data_root is not None:
        os.environ[DATA_ROOT] = str(args.data_root)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    total_s = None if math.isinf(ends) else ends - time.monotonic()
    given = {"spawn": args.spawn, "jobs": args.jobs, "device_gb": args.device_gb}
    return run_cases(cases, out=args.results, warm=_WARM, total_s=total_s, **given)


def main(argv: Sequence[str] | None = None) -> None:
    args = parse_args(argv)
    ends = time.monotonic() + (args.max_seconds or math.inf)
    if argv is None and not args.dry_run:
        prepare_to_fork()
    try:
        listing = Listing(args)
        cases = listing.to_run()
        check_memory(cases, args)
    except ValueError as error:
        sys.exit(f"error: {error}")
    num_cases = len({case.key for case in listing.cases(read_rows(args.results))})
    known = sum(case.expected_s for case in cases) / args.jobs
    about = f", about {known:.0f} s" if known else ""
    if args.case_seconds is not None:
        about = f", {args.case_seconds:g} s of training each"
    print(f"{num_cases} cases, {len(cases)} to run now{about}", flush=True)
    if others := listing.made_otherwise():
        print(
            f"cases with rows of other arguments in {args.results}: {len(others)}, such as {others[0]}. They are not "
            "run again: name another file to run them (--results)",
            flush=True,
        )
    if args.dry_run:
        for case in cases:
            seconds = f" ({case.expected_s:.0f} s)" if case.expected_s else ""
            print(f"{case.name}{seconds}: launch/train.py {' '.join(case.params['options'])}")
        return
    rows: list[Row] = []
    while cases and all(row["status"] != NOT_RUN for row in rows):
        rows += run(args, cases, ends=ends)
        cases = listing.to_run()  # rows of the first cases may decide the rates of more
    rows = [row for row in rows if row["status"] != NOT_RUN]
    failed = sum(row["status"] != "ok" for row in rows)
    print(f"{len(rows)} rows written to {args.results}, {failed} of them failures; {len(cases)} cases left")


if __name__ == "__main__":
    main()
