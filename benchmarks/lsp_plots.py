"""Pictures of LSP's step and of its projectors, from rows alone.

    python -m benchmarks.lsp_plots breakdown rows.jsonl --run-id RUN --out parts.svg
    python -m benchmarks.lsp_plots bias rows.jsonl --nonzeros 4,16 --out bias.svg

`breakdown` takes rows of `lsp_speed run` with the preset `issue` or `breakdown`, `bias` those of h200_lsp_bias.jsonl.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.lsp_claims import by_batch
from benchmarks.pictures import save
from ds_zo.records.rows import Row, read_objects, table

Key = tuple[str, int, int]
"""Shape, d, r."""
_BIASES = (
    ("", "LSP, learned projectors", "C0"),
    ("galore_total_", "GaLore in LSP's memory on GPU and host", "C3"),
    ("galore_device_", "GaLore in LSP's memory on the GPU", "C4"),
)
_NAMES = {
    "ceiling": "forward and backward only",
    "lsp-512": "LSP, d = 512",
    "zero2-offload": "ZeRO-Offload",
    "lsp-none": "layer-wise, no projection",
}
"""Contenders of a breakdown, in words."""
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


def draw_bias(rows: Sequence[Row], *, nonzeros: Sequence[int] | None = None) -> Any:
    """Bias against d, a panel for each shape and r, whose memory GaLore has; dashed on the gradient of the fit, drawn
    through on the other. `nonzeros`: the values of r that are drawn; None: all that the rows have."""
    found = {key: row for key, row in bias_by_setting(rows).items() if nonzeros is None or key[2] in nonzeros}
    if not found:
        wanted = "" if nonzeros is None else f" with --nonzeros {','.join(map(str, nonzeros))}"
        raise NoRowsError(f"no rows of the study of biases{wanted}: see benchmarks/results/README.md")
    shapes, all_r = (sorted({key[at] for key in found}, key=_of_numbers) for at in (0, 2))
    figure, panels = _figure(1.0 + 3.4 * len(all_r), 1.1 + 2.1 * len(shapes), len(all_r), num_lines=len(shapes))
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
        axes.set_title(f"weights {shape}, r = {r}", fontsize=10)
        if shape == shapes[-1]:
            axes.set_xlabel("d")
        if r == all_r[0]:
            axes.set_ylabel("relative bias")
    batches = [_line("k--", "on the batch of the fit"), _line("k-", "on another batch")]
    handles, _ = panels[0].get_legend_handles_labels()
    figure.legend(handles=[*handles, *batches], ncols=2, frameon=False, fontsize=9, loc="outside lower center")
    one = of_one_study(rows)[-1]
    trained = f" after {one['trained_steps']} steps of training" if one.get("trained_steps") else ""
    model = str(one["model"]).removeprefix("random:")
    figure.suptitle(f"{model}{trained}, {one['task']}, batches of {one['samples']}", fontsize=10)
    return figure


def _line(style: str, label: str) -> Any:
    """An entry of a legend."""
    from matplotlib.lines import Line2D

    return Line2D([], [], color=style[0], linestyle=style[1:], label=label)


def _of_numbers(key: str | int) -> list[int]:
    """Shapes by their sizes, not by their letters."""
    return [int(word) for word in str(key).split() if word.isdecimal()]


# Breakdown


_WAITS = {"copy": "exposed_copy_s", "cpu": "exposed_cpu_s"}


def negative_waits(rows: Sequence[Row]) -> list[str]:
    """Of a breakdown: differences that came out below zero, in words. A picture that draws them as zero says so."""
    kinds = {"copy": "copies", "cpu": "CPU work"}
    return [
        f"{kinds[kind]} of {_name(row)} ({1e3 * row[key]:.1f} ms)"
        for row in rows
        for kind, key in _WAITS.items()
        if (row.get(key) or 0.0) < 0
    ]


def _name(row: Row) -> str:
    name = row["case"].rpartition("/")[2]
    return _NAMES.get(name, name)


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
    by_name = {_name(row): row for row in _breakdown_rows(rows)}
    ceiling = by_name.get(_NAMES["ceiling"])
    if ceiling is None:
        raise NoRowsError("no breakdown with its ceiling: run `python -m benchmarks.lsp_speed run --preset breakdown`")
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


def draw_breakdown(rows: Sequence[Row], *, run_id: str | None = None) -> Any:
    """A bar for each contender's step, by kind of time. `run_id`: the run that is drawn; None: the last one."""
    rows = [row for row in rows if run_id in (None, row.get("run_id"))]
    parts = breakdown_parts(rows)
    found = _breakdown_rows(rows)
    figure, (axes,) = _figure(8.0, 1.5 + 0.45 * len(parts), 1)
    left = [0.0] * len(parts)
    for key, label, colour in _PARTS:
        widths = [1e3 * part[key] for part in parts.values()]
        axes.barh(list(parts), widths, left=left, color=colour, label=label, height=0.6, zorder=3)
        left = [start + width for start, width in zip(left, widths, strict=True)]
    for i, step_ms in enumerate(left):
        axes.annotate(f"{step_ms:,.0f}", (step_ms, i), (4, 0), textcoords="offset points", va="center", fontsize=9)
    axes.margins(x=0.08)
    axes.invert_yaxis()
    below = negative_waits(found)
    noise = f"\nbelow zero by noise, drawn as zero: {', '.join(below)}" if below else ""
    about = ", ".join(str(found[0][key]) for key in ("shape", "gpu") if found[0].get(key))
    axes.set_xlabel(f"ms a step{f' of {about}' if about else ''}{noise}")
    axes.legend(ncols=2, frameon=False, fontsize=9, loc="lower center", bbox_to_anchor=(0.5, 1.0))
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


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="what", required=True)
    bias = commands.add_parser("bias", help="what projectors lose of a gradient, against d; also a table")
    breakdown = commands.add_parser("breakdown", help="a step by what is waited for")
    for command in (bias, breakdown):
        command.add_argument("rows", type=Path)
        command.add_argument("--out", type=Path, required=True, help="picture; its suffix says which kind")
    numbers = lambda text: [int(word) for word in text.split(",")]  # noqa: E731
    bias.add_argument("--nonzeros", type=numbers, help="values of r, separated by commas (default: all)")
    breakdown.add_argument("--run-id", help="only rows of this run (default: the last)")
    args = parser.parse_args(arguments)
    rows = read_objects(args.rows)
    try:
        if args.what == "bias":
            figure = draw_bias(rows, nonzeros=args.nonzeros)
        else:
            figure = draw_breakdown(rows, run_id=args.run_id)
    except NoRowsError as error:
        sys.exit(str(error))
    save(figure, args.out)
    if args.what == "bias":
        print(bias_table(rows))


if __name__ == "__main__":
    main()
