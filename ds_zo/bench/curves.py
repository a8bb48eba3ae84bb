"""What a curve of losses says; and, as a command, the learning curves of a sweep's rows (launch/sweep.py) as a picture.

python -m ds_zo.bench.curves rows.jsonl --task alpaca --out curves.svg
python -m ds_zo.bench.curves rows.jsonl --task boolq --methods zo,lomo --out curves.png
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

Row = dict[str, Any]
Points = list[tuple[float, float]]
Axis = Literal["step", "train_s"]

SMOOTHED_STEPS = 4
"""Losses are means over this many steps: one batch's says little."""
_PANELS: tuple[tuple[Axis, str], ...] = (("step", "steps"), ("train_s", "seconds of training"))


def smoothed(losses: Sequence[float]) -> list[float]:
    windows = (losses[max(0, i + 1 - SMOOTHED_STEPS) : i + 1] for i in range(len(losses)))
    return [sum(window) / len(window) for window in windows]


def time_to_loss(row: dict[str, Any], target: float) -> float | None:
    """Seconds of training until the smoothed loss is at `target`, at the mean speed of the timed steps."""
    for i, loss in enumerate(smoothed(row.get("losses") or [])):
        if loss <= target:
            return float((i + 1) * row["step_wall_s"])
    return None


# A sweep's rows


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
    figure.suptitle(f"{Path(str(rows[0].get('model', ''))).name}, {rows[0]['task']}, {rows[0].get('device', '')}")
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, dpi=110)


def main(arguments: list[str] | None = None) -> None:
    from ds_zo.bench.sweep import read_rows

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", type=Path)
    parser.add_argument("--task", required=True)
    parser.add_argument("--methods", help="these only, with commas")
    parser.add_argument("--window", type=int, default=SMOOTHED_STEPS, help="readings of the loss in a mean")
    parser.add_argument("--out", type=Path, required=True, help="picture; its suffix says which kind")
    args = parser.parse_args(arguments)
    methods = args.methods.split(",") if args.methods else ()
    try:
        rows = with_curves(read_rows(args.rows), task=args.task, methods=methods)
    except ValueError as error:
        sys.exit(str(error))
    draw(rows, args.out, window=args.window)


if __name__ == "__main__":
    main()
