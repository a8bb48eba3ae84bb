"""From a sweep's rows to the accuracy table: rates chosen by dev, means and spreads over seeds, as Markdown.

    python -m benchmarks.accuracy rows.jsonl
    python -m benchmarks.accuracy rows.jsonl --rates
    python -m benchmarks.accuracy rows.jsonl --dev

Rates are chosen with one seed on a few tasks (`SELECT_TASKS`, `SELECT_SEED`), by the mean over those tasks of the score
on dev; a method with `lr_of` takes another's. The table is of test scores, each of the state that was best on dev. It
can be made of a sweep that is not done: what is missing is marked, and a rate that is not settled has a question mark.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path

from benchmarks.grid import Grid, GridCase, remaining, rows_of
from benchmarks.grids import read_grid
from ds_zo.records.rows import Row, table_lines
from ds_zo.tasks.score import LOWER_IS_BETTER, sign_of

SELECT_TASKS = ("sst2", "rte")
SELECT_SEED = 0
MISSING = "–"


def select_tasks(grid: Grid) -> tuple[str, ...]:
    """What rates are chosen on: all tasks of a grid that has none of the usual ones."""
    return tuple(task for task in SELECT_TASKS if task in grid.tasks) or grid.tasks


def best_rates(rows: Sequence[Row], *, tasks: Sequence[str] = SELECT_TASKS) -> dict[str, float]:
    """Each method's best rate, among those that were run on all of `tasks` that the method was run on at all; of equals
    the lowest, whichever ended first. One at which a loss was not finite scores by chance, and is none."""
    scores: dict[str, dict[float, dict[str, float]]] = defaultdict(lambda: defaultdict(dict))
    for row in rows:
        chosen = row["status"] == "ok" and row["task"] in tasks and row["seed"] == SELECT_SEED
        if chosen and row["lr"] is not None and row["dev"] is not None and _is_finite(row):
            known = scores[row["method"]][row["lr"]]
            known[row["task"]] = max(_dev_sign(row) * row["dev"], known.get(row["task"], float("-inf")))
    found = {}
    for method, by_rate in scores.items():
        wanted = {task for by_task in by_rate.values() for task in by_task}
        means = {lr: statistics.mean(by_task.values()) for lr, by_task in by_rate.items() if set(by_task) == wanted}
        if means:
            found[method] = max(means, key=lambda lr: (means[lr], -lr))
    return found


def tuning_cases(grid: Grid, *, steps: int | None = None) -> list[GridCase]:
    """What chooses rates: the methods that have several of their own."""
    methods = {name: m for name, m in grid.methods.items() if len(m.lrs) > 1 and m.lr_of is None}
    return list(Grid(methods, select_tasks(grid), (SELECT_SEED,), grid.arguments).cases(steps=steps))


def unsettled(grid: Grid, rows: Sequence[Row], *, steps: int | None = None) -> set[str]:
    """Methods some of whose rates are still to be tried."""
    return {case.method for case in remaining(tuning_cases(grid, steps=steps), rows)}


def staged_cases(grid: Grid, rows: Sequence[Row], *, steps: int | None = None) -> list[GridCase]:
    """What needs no rate, all rates where they are chosen, then the grid at the best, as far as rows have decided."""
    tuning = tuning_cases(grid, steps=steps)
    open_methods = unsettled(grid, rows, steps=steps)
    rates = {name: lr for name, lr in best_rates(rows, tasks=select_tasks(grid)).items() if name not in open_methods}
    undecided = {case.method for case in tuning} - set(rates)
    rest = list(grid.cases(lrs=rates, steps=steps))
    known = [case for case in rest if (grid.methods[case.method].lr_of or case.method) not in undecided]
    return [*(c for c in known if c.lr is None), *tuning, *(c for c in known if c.lr is not None)]


def whole_sweep(grid: Grid, rows: Sequence[Row], *, steps: int | None = None) -> list[GridCase]:
    """All that `staged_cases` will come to; where a rate is still open, any stands for it. For estimates."""
    rates = {name: method.lrs[0] for name, method in grid.methods.items() if method.lrs}
    rates |= best_rates(rows, tasks=select_tasks(grid))
    cases = [*tuning_cases(grid, steps=steps), *grid.cases(lrs=rates, steps=steps)]
    return list({case.key: case for case in cases}.values())


def at_chosen_rates(rows: Sequence[Row], grid: Grid | None) -> dict[str, list[Row]]:
    """Good rows by method, those at the rate that was chosen for it."""
    good = [row for row in rows if row["status"] == "ok"]
    rates = best_rates(good, tasks=select_tasks(grid) if grid is not None else SELECT_TASKS)
    found: dict[str, list[Row]] = {}
    for method in _order([row["method"] for row in good], list(grid.methods) if grid is not None else []):
        source = grid.methods[method].lr_of if grid is not None and method in grid.methods else None
        rate = rates.get(source or method)
        mine = [row for row in good if row["method"] == method and (rate is None or row["lr"] in (rate, None))]
        if mine:
            found[method] = mine
    return found


def table(rows: Sequence[Row], *, grid: Grid | None = None) -> str:
    """Markdown: a row a method, a column a task; with a grid also what it has and the rows have not."""
    by_method = at_chosen_rates(rows, grid)
    good = [row for mine in by_method.values() for row in mine]
    tasks = [*(grid.tasks if grid is not None else ())]
    tasks += sorted({row["task"] for row in good} - set(tasks))
    metrics = {row["task"]: f" ({row['metric']})" for row in good}
    open_methods = unsettled(grid, rows) if grid is not None else set()
    body = []
    for method in dict.fromkeys([*(grid.methods if grid is not None else ()), *by_method]):
        mine = by_method.get(method, [])
        known = grid.methods.get(method) if grid is not None else None
        wanted = len((grid.seeds if known.seeds is None else known.seeds) if grid is not None and known else ())
        cells = [_cell([row for row in mine if row["task"] == task], num_seeds=wanted) for task in tasks]
        rate = next((f"{row['lr']:g}" for row in mine if row["lr"] is not None), "")
        unsure = "?" if (known.lr_of if known and known.lr_of else method) in open_methods else ""
        most = max((row["steps"] for row in mine), default=0)
        body.append([method, f"{rate}{unsure}", str(most or ""), *cells])
    lines = table_lines(["method", "lr", "steps", *(task + metrics.get(task, "") for task in tasks)], body)
    done = {row["key"] for row in rows if row["status"] == "ok"}
    failed = sorted({row["key"] for row in rows if row["status"] != "ok"} - done)
    if failed:
        lines += ["", f"Failed: {', '.join(failed)}"]
    if grid is not None and (left := remaining(whole_sweep(grid, rows), rows)):
        counts = Counter(case.method for case in left)
        lines += ["", f"Not run yet, {len(left)}: {', '.join(f'{name} {count}' for name, count in counts.items())}."]
    return "\n".join(lines)


def _dev_sign(row: Row) -> float:
    """1 or -1, by which dev scores are multiplied so that larger is better. Older rows have one metric."""
    return sign_of(row.get("dev_metric") or row["metric"])


def _is_finite(row: Row) -> bool:
    return math.isfinite(row["dev"]) and math.isfinite(row.get("loss_last") or 0.0)


def by_seed(rows: Sequence[Row]) -> dict[int, Row]:
    """Of several runs of a seed, the one that is best on dev; none without a test score."""
    found: dict[int, Row] = {}
    for row in rows:
        other, sign = found.get(row["seed"]), _dev_sign(row)
        better = other is None or sign * (row["dev"] or 0.0) > sign * (other["dev"] or 0.0)
        if better and row["after"] is not None:
            found[row["seed"]] = row
    return found


def _cell(rows: Sequence[Row], *, num_seeds: int) -> str:
    """Mean and standard deviation over seeds."""
    values = [row["after"] for row in by_seed(rows).values()]
    if not values:
        return MISSING
    scale, digits = (1.0, 2) if rows[0]["metric"] in LOWER_IS_BETTER else (100.0, 1)
    mean = f"{scale * statistics.mean(values):.{digits}f}"
    spread = f" ± {scale * statistics.stdev(values):.{digits}f}" if len(values) > 1 else ""
    of = f" of {num_seeds}" if len(values) < num_seeds else ""
    return mean + spread + (f" ({len(values)}{of})" if len(values) > 1 or of else "")


def _order(found: Sequence[str], known: Sequence[str]) -> list[str]:
    return [name for name in known if name in found] + sorted(set(found) - set(known))


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", type=Path, nargs="+", help="files of rows that launch/sweep.py wrote")
    parser.add_argument("--grid", default="accuracy", metavar="NAME|FILE", help="for order, rates and what is missing")
    parser.add_argument("--dev", action="store_true", help="scores on dev, where the state was chosen, instead of test")
    parser.add_argument("--rates", action="store_true", help="show the chosen learning rates instead")
    args = parser.parse_args(arguments)
    try:
        rows = rows_of(args.rows)
        grid = read_grid(args.grid)
    except ValueError as error:
        sys.exit(f"error: {error}")
    if args.dev:
        rows = [{**row, "after": row.get("dev")} for row in rows]
    if args.rates:
        for method, lr in best_rates(rows, tasks=select_tasks(grid)).items():
            print(f"{method}: {lr:g}")
    else:
        print(table(rows, grid=grid))


if __name__ == "__main__":
    main()
