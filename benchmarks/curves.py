"""Draws the learning curves of a sweep's rows (launch/sweep.py).

python -m benchmarks.curves rows.jsonl --task alpaca --out curves.svg
python -m benchmarks.curves rows.jsonl --task boolq --methods zo,lomo --best --out curves.png
python -m benchmarks.curves rows.jsonl --task boolq --ranks --out ranks.png
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from ds_zo.bench.losses import SMOOTHED_STEPS
from ds_zo.records.rows import Row
from ds_zo.tasks.score import sign_of

Points = list[tuple[float, float]]
Axis = Literal["step", "train_s"]

_PANELS: tuple[tuple[Axis, str], ...] = (("step", "steps"), ("train_s", "seconds of training"))


def series(row: Row, *, x: Axis) -> tuple[Points, Points]:
    """(training losses, the row's metric on dev) of a run against steps or seconds."""
    metric = row.get("metric")
    losses = [(point[x], point["loss"]) for point in row["curve"] if point.get("loss") is not None]
    dev = [(point[x], point["dev"][metric]) for point in row["curve"] if metric in (point.get("dev") or {})]
    return losses, dev


def smooth(points: Points, *, window: int) -> Points:
    """Each value the mean of the last `window`."""
    parts = (points[max(0, i + 1 - window) : i + 1] for i in range(len(points)))
    return [(part[-1][0], sum(y for _, y in part) / len(part)) for part in parts]


def with_curves(rows: Sequence[Row], *, task: str, methods: Sequence[str] = ()) -> list[Row]:
    """Good rows of a task; a ValueError that says what there is where none is left."""
    good = [row for row in rows if row["status"] == "ok" and row.get("curve")]
    found = [row for row in good if row["task"] == task and (not methods or row["method"] in methods)]
    if not found:
        wanted = ", ".join(methods) or "any method"
        there = ", ".join(sorted({f"{row['task']} by {row['method']}" for row in good})) or "none"
        raise ValueError(f"no curves of {task} by {wanted}; the rows have {there}")
    return found


def best_of_each(rows: Sequence[Row], *, apart: Sequence[str] = ()) -> list[Row]:
    """One run a method (and value of what is kept `apart`): the best by dev, whatever its rate."""
    found: dict[tuple[Any, ...], Row] = {}
    for row in rows:
        if row.get("dev") is not None:
            key = (row["method"], *(row.get(name) for name in apart))
            sign = sign_of(row["metric"])
            if key not in found or sign * row["dev"] > sign * found[key]["dev"]:
                found[key] = row
    return list(found.values())


def scored(rows: Sequence[Row]) -> list[Row]:
    """`best_of_each`; a ValueError where there is none."""
    found = best_of_each(rows)
    if not found:
        names = ", ".join(sorted({row["method"] for row in rows}))
        raise ValueError(f"no run of {names} was scored on dev, by which to tell the best (--eval-every)")
    return found


def by_rank(rows: Sequence[Row]) -> dict[str, list[tuple[int, float]]]:
    """(LoRA rank, mean test score over seeds) of each method that has ranks; a seed's best run by dev counts."""
    scores: dict[tuple[str, int], list[float]] = {}
    for row in best_of_each([row for row in rows if row.get("lora_rank")], apart=("lora_rank", "seed")):
        scores.setdefault((row["method"], row["lora_rank"]), []).append(row["after"])
    found: dict[str, list[tuple[int, float]]] = {}
    for (method, rank), values in sorted(scores.items()):
        found.setdefault(method, []).append((rank, sum(values) / len(values)))
    return found


def label(row: Row, rows: Sequence[Row]) -> str:
    """The method, and its rate and seed where the rows have several."""
    mates = [other for other in rows if other["method"] == row["method"]]
    parts = [row["method"]]
    for key, prefix in (("lr", "lr "), ("seed", "seed ")):
        if len({mate.get(key) for mate in mates}) > 1:
            parts.append(f"{prefix}{row.get(key)}")
    return ", ".join(parts)


def draw(rows: Sequence[Row], out: Path, *, window: int = SMOOTHED_STEPS) -> None:
    """Training loss above, the metric on dev below; against steps on the left, seconds on the right."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 7), layout="constrained")
    panels = figure.subplots(2, 2, squeeze=False)
    for column, (x, title) in enumerate(_PANELS):
        for i, row in enumerate(rows):
            losses, dev = series(row, x=x)
            style = {"color": f"C{i % 10}", "linestyle": ("-", "--", ":")[i // 10 % 3], "label": label(row, rows)}
            for axes, points in ((panels[0][column], smooth(losses, window=window)), (panels[1][column], dev)):
                if points:
                    axes.plot(*zip(*points, strict=True), **style)
        panels[0][column].set(xlabel=title, ylabel=f"training loss (mean of {window} readings)")
        panels[1][column].set(xlabel=title, ylabel=f"dev {rows[0].get('metric') or 'metric'}")
        for axes in panels[:, column]:
            axes.grid(alpha=0.3)
    panels[0][1].legend(frameon=False, fontsize=8)
    figure.suptitle(_title(rows[0]))
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, dpi=110)


def draw_ranks(rows: Sequence[Row], out: Path) -> None:
    """Test score against the rank of LoRA; a method without adapters is a level line."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 4.2), layout="constrained")
    axes = figure.subplots()
    for method, points in by_rank(rows).items():
        axes.plot(*zip(*points, strict=True), marker="o", label=method)
    for i, row in enumerate(best_of_each([row for row in rows if not row.get("lora_rank")])):
        axes.axhline(row["after"], linestyle="--", linewidth=1, color=f"C{i + 5}", label=row["method"])
    ranks = sorted({row["lora_rank"] for row in rows if row.get("lora_rank")})
    axes.set(xscale="log", xlabel="rank of LoRA", ylabel=f"test {rows[0].get('metric') or 'metric'}")
    axes.set_xticks(ranks, [str(rank) for rank in ranks])
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    axes.legend(frameon=False, fontsize=8)
    figure.suptitle(_title(rows[0]), fontsize=10)
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, dpi=110)


def _title(row: Row) -> str:
    return f"{Path(str(row.get('model', ''))).name}, {row['task']}, {row.get('device', '')}"


def main(arguments: list[str] | None = None) -> None:
    from benchmarks.grid import rows_of

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", type=Path)
    parser.add_argument("--task", required=True)
    parser.add_argument("--methods", help="these only, with commas")
    parser.add_argument("--best", action="store_true", help="one run a method: the best by dev")
    parser.add_argument("--ranks", action="store_true", help="test score against LoRA's rank instead of curves")
    parser.add_argument("--window", type=int, default=SMOOTHED_STEPS, help="readings of the loss in a mean")
    parser.add_argument("--out", type=Path, required=True, help="picture; its suffix says which kind")
    args = parser.parse_args(arguments)
    methods = args.methods.split(",") if args.methods else ()
    try:
        rows = with_curves(rows_of([args.rows]), task=args.task, methods=methods)
        if args.best:
            rows = scored(rows)
    except ValueError as error:
        sys.exit(str(error))
    if args.ranks:
        draw_ranks(rows, args.out)
    else:
        draw(rows, args.out, window=args.window)


if __name__ == "__main__":
    main()
