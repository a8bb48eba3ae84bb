"""From a sweep's rows to the accuracy table: rates chosen by dev, means and spreads over seeds, as Markdown.

    python -m ds_zo.bench.accuracy rows.jsonl
    python -m ds_zo.bench.accuracy rows.jsonl --rates

Rates are chosen with one seed on a few tasks (`SELECT_TASKS`, `SELECT_SEED`), by the mean over those tasks of the score
on dev; a method with `lr_of` takes another's. The table is of test scores, each of the state that was best on dev.
"""

from __future__ import annotations

import argparse
import statistics
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from ds_zo.bench.grids import GRIDS, Grid
from ds_zo.bench.sweep import Row, read_rows
from ds_zo.tasks.score import LOWER_IS_BETTER

SELECT_TASKS = ("sst2", "rte")
SELECT_SEED = 0


def best_rates(
    rows: Sequence[Row], *, tasks: Sequence[str] = SELECT_TASKS, seed: int = SELECT_SEED
) -> dict[str, float]:
    """Each method's best rate, among those that were run on all of `tasks` that the method was run on at all."""
    scores: dict[str, dict[float, dict[str, float]]] = defaultdict(lambda: defaultdict(dict))
    for row in rows:
        chosen = row["status"] == "ok" and row["task"] in tasks and row["seed"] == seed
        if chosen and row["lr"] is not None and row["dev"] is not None:
            sign = -1.0 if row["metric"] in LOWER_IS_BETTER else 1.0
            known = scores[row["method"]][row["lr"]]
            known[row["task"]] = max(sign * row["dev"], known.get(row["task"], float("-inf")))
    found = {}
    for method, by_rate in scores.items():
        wanted = {task for by_task in by_rate.values() for task in by_task}
        means = {lr: statistics.mean(by_task.values()) for lr, by_task in by_rate.items() if set(by_task) == wanted}
        if means:
            found[method] = max(means, key=lambda lr: means[lr])
    return found


def table(rows: Sequence[Row], *, grid: Grid | None = None) -> str:
    """Markdown: a row a method, a column a task."""
    good = [row for row in rows if row["status"] == "ok"]
    methods = _order([row["method"] for row in good], list(grid.methods) if grid else [])
    tasks = _order([row["task"] for row in good], list(grid.tasks) if grid else [])
    rates = best_rates(good)
    metrics = {row["task"]: row["metric"] for row in good}
    lines = [
        "| method | lr | steps | " + " | ".join(f"{task} ({metrics[task]})" for task in tasks) + " |",
        "| --- | --- | --- | " + " | ".join("---" for _ in tasks) + " |",
    ]
    for method in methods:
        source = grid.methods[method].lr_of if grid is not None and method in grid.methods else None
        rate = rates.get(source or method)
        mine = [row for row in good if row["method"] == method and (rate is None or row["lr"] in (rate, None))]
        if not mine:
            continue
        most = max(row["steps"] for row in mine)
        cells = [_cell([row for row in mine if row["task"] == task]) for task in tasks]
        shown = f"{rate:g}" if rate is not None and mine[0]["lr"] is not None else ""
        lines.append(f"| {method} | {shown} | {most or ''} | " + " | ".join(cells) + " |")
    failed = sorted({row["key"] for row in rows if row["status"] != "ok"} - {row["key"] for row in good})
    if failed:
        lines += ["", f"Failed: {', '.join(failed)}"]
    return "\n".join(lines)


def _cell(rows: Sequence[Row]) -> str:
    """Mean and standard deviation over seeds; of several runs of a seed, the one that is best on dev."""
    by_seed: dict[int, Row] = {}
    for row in rows:
        sign = -1.0 if row["metric"] in LOWER_IS_BETTER else 1.0
        other = by_seed.get(row["seed"])
        if other is None or (row["dev"] or 0.0) * sign > (other["dev"] or 0.0) * sign:
            by_seed[row["seed"]] = row
    values = [row["after"] for row in by_seed.values() if row["after"] is not None]
    if not values:
        return ""
    scale, digits = (1.0, 2) if rows[0]["metric"] in LOWER_IS_BETTER else (100.0, 1)
    mean = f"{scale * statistics.mean(values):.{digits}f}"
    return mean if len(values) == 1 else f"{mean} ± {scale * statistics.stdev(values):.{digits}f} ({len(values)})"


def _order(found: Sequence[str], known: Sequence[str]) -> list[str]:
    return [name for name in known if name in found] + sorted(set(found) - set(known))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", type=Path, nargs="+", help="files of rows that launch/sweep.py wrote")
    parser.add_argument("--grid", default="accuracy", choices=list(GRIDS), help="for order and shared rates")
    parser.add_argument("--rates", action="store_true", help="show the chosen learning rates instead")
    args = parser.parse_args()
    rows = [row for path in args.rows for row in read_rows(path)]
    if args.rates:
        for method, lr in best_rates(rows).items():
            print(f"{method}: {lr:g}")
    else:
        print(table(rows, grid=GRIDS[args.grid]))


if __name__ == "__main__":
    main()
