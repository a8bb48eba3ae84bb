"""Pictures of LSP's studies, from rows alone.

    python -m benchmarks.lsp_plots bias rows.jsonl --out bias.svg
    python -m benchmarks.lsp_plots rates rows.jsonl --out rates.svg
    python -m benchmarks.lsp_plots breakdown rows.jsonl --out breakdown.svg
    python -m benchmarks.lsp_plots curves rows.jsonl --out curves.svg

`bias` takes rows of `lsp_studies`, `breakdown` those of `lsp_speed run` with the preset `issue` or `breakdown`, `rates`
and `curves` those of launch/sweep.py with the grids lsp-rates and lsp-curves. `curves` also says how far each method is
from AdamW.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks import curves
from benchmarks.lsp_claims import by_batch
from benchmarks.sweep import first_step_s
from ds_zo.records.rows import Row, read_objects, table

Key = tuple[str, int, int]
"""Shape, d, r."""
WITHIN = 0.02
"""Of AdamW's evaluation loss at the same step: as good."""
NEAR = 0.005
"""Of the lowest loss of ZeRO-Offload's run: time to it is compared. Its very lowest loss is one reading's luck."""
_BIASES = (
    ("", "LSP", "C0"),
    ("galore_total_", "GaLore, equal total memory", "C3"),
    ("galore_device_", "GaLore, equal memory on the device", "C4"),
)
_PARTS = (
    ("forward", "forward", "#4c72b0"),
    ("backward", "backward and the GPU's own update", "#55a868"),
    ("copy", "copies that are waited for", "#c44e52"),
    ("cpu", "CPU work that is waited for", "#dd8452"),
)


class NoRowsError(ValueError):
    """The message says what was looked for and which command makes it."""


# Bias


def of_one_study(rows: Sequence[Row]) -> list[Row]:
    """Rows of biases with the last one's model, training, data and fit: others have other gradients."""
    keys = (
        *("model", "tokenizer", "task", "samples", "max_length", "fit_steps_wanted", "fit_lr"),
        *("trained_steps", "trained_lr", "trained_batch"),
    )
    found = [row for row in rows if row.get("study") == "bias"]
    return [row for row in found if all(row.get(key) == found[-1].get(key) for key in keys)]


def bias_by_setting(rows: Sequence[Row]) -> dict[Key, Row]:
    """Medians over the matrices of a shape, for each d (as clamped to it) and r."""
    keys = (
        *("bias_fit", "bias_test", "update_rms", "galore_total_bias_fit", "galore_total_bias_test"),
        *("galore_device_bias_fit", "galore_device_bias_test", "galore_total_rank", "galore_device_rank"),
    )
    groups: dict[Key, list[Row]] = {}
    for row in of_one_study(rows):
        shape = " x ".join(map(str, row["shape"]))
        groups.setdefault((shape, row["d"], row["r"]), []).append(row)
    return {
        key: {"matrices": len(some), **{name: statistics.median(row[name] for row in some) for name in keys}}
        for key, some in sorted(groups.items())
    }


def bias_table(rows: Sequence[Row]) -> str:
    """As Markdown, one line for each shape, d and r."""
    heads = (
        *("shape", "d", "r", "matrices", "LSP: fit", "LSP: test"),
        *("GaLore, equal total: test (rank)", "GaLore, equal device: test (rank)", "update"),
    )
    cells = [
        [
            *map(str, (*setting, row["matrices"])),
            *(f"{row[key]:.3f}" for key in ("bias_fit", "bias_test")),
            *(f"{row[f'{peer}bias_test']:.3f} ({row[f'{peer}rank']:.0f})" for peer, *_ in _BIASES[1:]),
            f"{row['update_rms']:.2f}",
        ]
        for setting, row in bias_by_setting(rows).items()
    ]
    return table(heads, cells)


def draw_bias(rows: Sequence[Row]) -> Any:
    """Bias against d, a panel for each shape and r, whose memory GaLore has; dashed on the gradient of the fit, drawn
    through on the other."""
    found = bias_by_setting(rows)
    if not found:
        raise NoRowsError("no rows of the study of biases: run `python -m benchmarks.lsp_studies` first")
    shapes, all_r = (sorted({key[at] for key in found}, key=_of_numbers) for at in (0, 2))
    figure, panels = _figure(1.0 + 2.5 * len(all_r), 0.9 + 2.4 * len(shapes), len(all_r), num_lines=len(shapes))
    places = [(shape, r) for shape in shapes for r in all_r]
    most = max(1.0, *(row["bias_test"] for row in found.values()))
    for axes, (shape, r) in zip(panels, places, strict=True):
        points = [(dim, row) for (of_shape, dim, of_r), row in found.items() if (of_shape, of_r) == (shape, r)]
        for prefix, name, colour in _BIASES:
            for kind, style in (("fit", "--"), ("test", "-")):
                biases = [row[f"{prefix}bias_{kind}"] for _, row in points]
                named = {"label": name} if kind == "test" else {}
                axes.plot([dim for dim, _ in points], biases, style, marker="o", markersize=3, color=colour, **named)
        dims = sorted({dim for of_shape, dim, _ in found if of_shape == shape})
        axes.set(xscale="log", ylim=(0, 1.05 * most), xlim=(0.85 * dims[0], dims[-1] / 0.85))
        axes.set_xticks(dims, [str(dim) for dim in dims])
        axes.minorticks_off()
        if shape == shapes[0]:
            axes.set_title(f"r = {r}", fontsize=10)
        if shape == shapes[-1]:
            axes.set_xlabel("d")
        if r == all_r[0]:
            axes.set_ylabel(f"{shape}\nrelative bias")
    figure.legend(
        *panels[0].get_legend_handles_labels(), ncols=3, frameon=False, fontsize=9, loc="outside lower center"
    )
    one = of_one_study(rows)[-1]
    trained = f" after {one['trained_steps']} steps of training" if one.get("trained_steps") else ""
    title = f"{one['model']}{trained}, {one['task']}, two batches of {one['samples']}"
    figure.suptitle(f"{title}; dashed: on the gradient of the fit", fontsize=10)
    return figure


def _of_numbers(key: str | int) -> list[int]:
    """Shapes by their sizes, not by their letters."""
    return [int(word) for word in str(key).split() if word.isdecimal()]


# Learning rates


def draw_rates(rows: Sequence[Row]) -> Any:
    """Loss on dev at the last step against the learning rate, one line a method."""
    good = [row for row in rows if row.get("status") == "ok" and last_dev(row) is not None and row.get("lr")]
    if not good:
        raise NoRowsError("no rows with a rate and a curve: run launch/sweep.py --grid lsp-rates first")
    figure, (axes,) = _figure(6.4, 4.2, 1)
    for name in dict.fromkeys(row["method"] for row in good):
        points = sorted((row["lr"], last_dev(row)) for row in good if row["method"] == name)
        axes.plot(*zip(*points, strict=True), marker="o", markersize=4, label=name)
    axes.set(xscale="log", xlabel="learning rate", ylabel=f"loss on dev after {good[0]['steps']} steps")
    axes.legend(frameon=False, fontsize=8)
    return figure


def dev_losses(row: Row, *, x: curves.Axis) -> curves.Points:
    """Loss on dev along a run: its perplexity's logarithm, so that 2% means 2% of a loss."""
    if not row.get("curve") or row.get("metric") != "perplexity":
        return []
    return [(at, math.log(perplexity)) for at, perplexity in curves.series(row, x=x)[1]]


def last_dev(row: Row) -> float | None:
    """After the last step, whether or not it was the best."""
    losses = dev_losses(row, x="step")
    return losses[-1][1] if losses else None


# Learning curves


def curves_table(rows: Sequence[Row]) -> str:
    """Every run's losses on dev beside AdamW's at the same steps and at its best, its memory, and its time to within
    0.5% of ZeRO-Offload's lowest; the first step, in which LSP fits and kernels are compiled, is told apart."""
    good = [row for row in rows if row.get("status") == "ok" and last_dev(row) is not None]
    base, target = _best_of("adamw", good), _best_of("zero-offload", good)
    titles = (
        *("method", "lr", "steps", "last dev loss", "lowest (step)", "of AdamW's lowest", "largest ratio at one step"),
        *("within 2%", "train s", "first step s", "s to ZeRO-Offload's lowest + 0.5%", "less first step"),
        *("GPU GB", "host GB"),
    )
    lines: list[Sequence[str]] = []
    for row in good:
        losses = dev_losses(row, x="step")
        step, lowest = min(losses, key=lambda point: point[1])
        most = None if base is None else _most_above(losses, dev_losses(base, x="step"))
        first_s = first_step_s(row["curve"])
        reached = None if target is None else _seconds_to(row, (1 + NEAR) * _lowest(target))
        later = None if reached is None or first_s is None else reached - first_s
        cells = (
            *(row["method"], f"{row['lr']:g}", str(row["steps"]), f"{losses[-1][1]:.4f}", f"{lowest:.4f} ({step:g})"),
            *(_number(None if base is None else lowest / _lowest(base), ".4f"), _number(most, ".4f")),
            *("" if most is None else "yes" if most <= 1 + WITHIN else "no", f"{row['train_s']:.1f}"),
            *(_number(seconds, ".1f") for seconds in (first_s, reached, later)),
            *(f"{row['peak_device_gb']:.2f}", f"{row['peak_host_gb']:.1f}"),
        )
        lines.append(cells)
    failed = [row for row in rows if row.get("status") != "ok"]
    return table(titles, [*lines, *([row["method"], f"failed: {row.get('last_words', '')[-80:]!r}"] for row in failed)])


def _lowest(row: Row) -> float:
    return min(loss for _, loss in dev_losses(row, x="step"))


def _best_of(method: str, rows: Sequence[Row]) -> Row | None:
    """None where it is not among the rows."""
    return min((row for row in rows if row["method"] == method), key=_lowest, default=None)


def _most_above(losses: curves.Points, base: curves.Points) -> float | None:
    """The largest ratio at one step. (At the last alone, a run that overfits less than AdamW would look better.)"""
    at = dict(base)
    return max((loss / at[step] for step, loss in losses if step in at), default=None)


def _seconds_to(row: Row, target: float) -> float | None:
    return next((seconds for seconds, loss in dev_losses(row, x="train_s") if loss <= target), None)


# Breakdown


_WAITS = {"copy": "exposed_copy_s", "cpu": "exposed_cpu_s"}


def negative_waits(rows: Sequence[Row]) -> list[str]:
    """Of a breakdown: differences that came out below zero, in words. A picture that draws them as zero says so."""
    return [
        f"{row['case'].rpartition('/')[2]}: {name} {1e3 * row[key]:.1f} ms"
        for row in rows
        for name, key in _WAITS.items()
        if (row.get(key) or 0.0) < 0
    ]


def parts_of(row: Row, *, forward_s: float) -> dict[str, float]:
    """Seconds of a step by kind; they add up to it. `forward_s` is the ceiling's: a forward pass that waits for updates
    would count them twice. What of a step remains when copies and CPU are left out is GPU time. A wait that noise made
    negative (`negative_waits`) counts as none."""
    waited = {name: max(0.0, row.get(key) or 0.0) for name, key in _WAITS.items()}
    step_s: float = row.get("apart_step_s") or row["step_s"]
    rest = step_s - sum(waited.values())
    forward = min(forward_s, rest)
    return {"forward": forward, "backward": rest - forward, **waited}


def breakdown_parts(rows: Sequence[Row]) -> dict[str, dict[str, float]]:
    """The last run's breakdown by contender.

    ZeRO-Offload's gradients leave during the backward pass and its weights come back after Adam: what its backward
    takes above the ceiling's, and what its update takes without Adam, is copying that is waited for.
    """
    found = _breakdown_rows(rows)
    by_name = {row["case"].rpartition("/")[2]: row for row in found}
    if "ceiling" not in by_name:
        raise NoRowsError("no breakdown with its ceiling: run `python -m benchmarks.lsp_speed run --preset breakdown`")
    ceiling = by_name["ceiling"]
    parts = {}
    for name, row in by_name.items():
        if "exposed_cpu_s" in row and "exposed_copy_s" not in row:
            row = {**row, "exposed_copy_s": max(0.0, row["rest_s"] - ceiling["step_s"])}
        parts[name] = parts_of(row, forward_s=ceiling["forward_s"])
    return parts


def _breakdown_rows(rows: Sequence[Row]) -> list[Row]:
    found = [row for row in by_batch(rows) if str(row.get("case", "")).startswith("breakdown/")]
    found = [row for row in found if row.get("status") == "ok"]
    return [row for row in found if row["run_id"] == found[-1]["run_id"]]  # nothing is indexed where nothing was found


def draw_breakdown(rows: Sequence[Row]) -> Any:
    parts = breakdown_parts(rows)
    figure, (axes,) = _figure(8.0, 1.4 + 0.5 * len(parts), 1)
    left = [0.0] * len(parts)
    for key, label, colour in _PARTS:
        widths = [1e3 * found[key] for found in parts.values()]
        axes.barh(list(parts), widths, left=left, color=colour, label=label, height=0.6, zorder=3)
        left = [start + width for start, width in zip(left, widths, strict=True)]
    axes.invert_yaxis()
    below = negative_waits(_breakdown_rows(rows))
    noise = f"\nmeasured below zero, drawn as zero: {', '.join(below)}" if below else ""
    axes.set_xlabel(f"ms a step{noise}")
    axes.legend(ncols=2, frameon=False, fontsize=8, loc="lower center", bbox_to_anchor=(0.5, 1.0))
    return figure


# Command


def _figure(width: float, height: float, num_panels: int, *, num_lines: int = 1) -> tuple[Any, list[Any]]:
    """Panels line by line, `num_panels` in each."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    panels = list(figure.subplots(num_lines, num_panels, squeeze=False, sharey=True).flat)
    for axes in panels:
        axes.grid(alpha=0.3)
    return figure, panels


def _number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


_DRAW: dict[str, Callable[[Sequence[Row]], Any]] = {
    "bias": draw_bias,
    "rates": draw_rates,
    "breakdown": draw_breakdown,
}
_TABLES: dict[str, Callable[[Sequence[Row]], str]] = {"bias": bias_table, "curves": curves_table, "rates": curves_table}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=[*_DRAW, "curves"])
    parser.add_argument("rows", type=Path)
    parser.add_argument("--out", type=Path, required=True, help="picture; its suffix says which kind")
    args = parser.parse_args(arguments)
    rows = read_objects(args.rows)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    try:
        if args.what == "curves":
            good = [row for row in rows if row.get("status") == "ok"]
            curves.draw(curves.with_curves(rows, task=good[-1]["task"] if good else "alpaca"), args.out)
        else:
            _DRAW[args.what](rows).savefig(args.out, dpi=110)
    except ValueError as error:
        sys.exit(str(error))
    if args.what in _TABLES:
        print(_TABLES[args.what](rows))


if __name__ == "__main__":
    main()
