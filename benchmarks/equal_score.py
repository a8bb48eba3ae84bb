"""How long runs of a sweep took to an equal score on dev, as Markdown; what their first step took is shown apart.

    python -m benchmarks.equal_score rows.jsonl --task alpaca --beside zero-offload

The first step of LSP holds its first fit, that of any method what is built or recorded once. On a small model, or where
training is short, it may be most of the time: seconds are given with it and without. They are of training alone, to the
first look at dev that is as good as the target: by default the worst of the methods' best, which all of them reach.
Beside that, the best score within an equal time: that of the run that ended first.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.curves import Points, scored, series, with_curves
from benchmarks.grid import rows_of
from benchmarks.sweep import first_step_s
from ds_zo.records.rows import Row, table
from ds_zo.tasks.score import sign_of


def begun_s(row: Row) -> float:
    """Seconds of the first step; 0 where a row does not tell."""
    return row.get("first_step_s") or first_step_s(row["curve"]) or 0.0


def seconds_to(row: Row, target: float) -> float | None:
    """Training seconds to the first look at dev that is as good; None where there is none."""
    return next((x for x, y in _dev(row) if _signed(row, y) >= _signed(row, target)), None)


def best_within(row: Row, seconds: float) -> float | None:
    """The best look at dev in so many seconds of training."""
    return max((y for x, y in _dev(row) if x <= seconds), key=lambda y: _signed(row, y), default=None)


def common_target(rows: Sequence[Row]) -> float:
    """What all runs reach: the worst of their best."""
    worst = min(rows, key=lambda row: _signed(row, row["dev"]))
    return float(worst["dev"])


def times_table(rows: Sequence[Row], *, target: float | None = None, beside: str | None = None) -> str:
    """A row a method (its best run by dev), and the ratio of its seconds to those of the method `beside`."""
    best = scored(rows)
    goal = common_target(best) if target is None else target
    other = next((row for row in best if row["method"] == beside), None)
    metric, shortest = best[0]["metric"], min(row["train_s"] for row in best)
    head = ["method", "lr", f"best dev {metric}", "at step", "test", "device, GB", "first step, s", "a later step, s"]
    head += [f"best in {shortest:.0f} s", f"s to {goal:.4g}", "less the first step"]
    head += [f"of {beside}'s", "less the first steps"] if other is not None else []
    lines = []
    for row in best:
        first, later = begun_s(row), max(1, row["steps"] - 1)
        took = _times(row, goal)
        cells = [row["method"], f"{row['lr']:g}" if row["lr"] is not None else "", f"{row['dev']:.4g}"]
        cells += [str(row["best_step"]), f"{row['after']:.4g}", f"{row['peak_device_gb']:.2f}", f"{first:.2f}"]
        within = best_within(row, shortest + 1e-2)  # rows round
        cells += [f"{(row['train_s'] - first) / later:.3f}", "–" if within is None else f"{within:.4g}"]
        cells += [_shown(s, 1) for s in took]
        if other is not None:
            pairs = zip(took, _times(other, goal), strict=True)
            cells += [_shown(a / b if a is not None and b else None, 2) for a, b in pairs]
        lines.append(cells)
    return table(head, lines)


def _times(row: Row, target: float) -> tuple[float | None, float | None]:
    """With the first step and without."""
    found = seconds_to(row, target)
    return found, None if found is None else found - begun_s(row)


def _dev(row: Row) -> Points:
    return series(row, x="train_s")[1]


def _signed(row: Row, value: float) -> float:
    return sign_of(row["metric"]) * value


def _shown(value: float | None, digits: int) -> str:
    return "–" if value is None else f"{value:.{digits}f}"


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", type=Path, nargs="+", help="files of rows that launch/sweep.py wrote")
    parser.add_argument("--task", required=True)
    parser.add_argument("--methods", help="these only, with commas")
    parser.add_argument("--target", type=float, metavar="SCORE", help="instead of what all methods reach")
    parser.add_argument("--beside", metavar="METHOD", help="ratios to this one's seconds")
    args = parser.parse_args(arguments)
    try:
        methods = args.methods.split(",") if args.methods else ()
        rows = with_curves(rows_of(args.rows), task=args.task, methods=methods)
        print(times_table(rows, target=args.target, beside=args.beside))
    except ValueError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
