"""Tokens/s and GPU memory against model size, ZO beside MeZO, drawn from rows alone."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from benchmarks.zo_report import points_of
from ds_zo.records.rows import Row

_STYLES = {
    "mezo": ("MeZO, whole model on the GPU", "#444444", "s"),
    "resident": ("ZO, all blocks on the GPU", "#d08a3c", "^"),
    "streamed": ("ZO, all blocks streamed, bf16", "#4878a8", "o"),
    "bf12": ("ZO, all blocks streamed, bf12", "#8a6aa0", "v"),
    "fp8": ("ZO, all blocks streamed, fp8", "#6aa06a", "D"),
}
"""By way of running: its name, its colour, its marker."""
_NARROW = ("bf12", "fp8")
"""Storage formats that are lines of their own."""


def plot_sizes(rows: Iterable[Row]) -> Any:
    """Two panels over the number of parameters: rows in bf16 at B=1, T=2048 of whole models, of the newest run that has
    two sizes at least."""
    series = {run: lines for run, lines in group_by_size(rows).items() if max(map(len, lines.values())) > 1}
    if not series:
        raise ValueError(
            "no run has whole models of two sizes in bf16 at batch 1 and length 2048: run `zo_speed preset targets` "
            "first, or name another run (--run-id)"
        )
    return _figure(series[max(series)])


def group_by_size(rows: Iterable[Row]) -> dict[str, dict[str, list[Row]]]:
    """Rows of each run by way of running, smallest model first; one row a size, the fastest."""
    series: dict[str, dict[str, dict[str, Row]]] = {}
    for row in rows:
        way = _way(row)
        if way is None or row["layers"] != row["full_layers"]:
            continue
        for point in points_of(row):
            if (point["batch"], point["length"]) != (1, 2048):
                continue
            sizes = series.setdefault(str(row["run_id"]), {}).setdefault(way, {})
            best = sizes.get(row["shape"])  # which has more position embeddings where a case is longer
            if best is None or best["tokens_per_s"] < point["tokens_per_s"]:
                sizes[row["shape"]] = point
    return {
        key: {way: sorted(sizes.values(), key=lambda row: row["parameters"]) for way, sizes in lines.items()}
        for key, lines in series.items()
    }


def _way(row: Row) -> str | None:
    """How a row's weights were kept, None for what is not compared here."""
    if row.get("tokens_per_s") is None or "full_layers" not in row or row["dtype"] != "bf16":
        return None
    if row["method"] != "zo":
        return "mezo" if row["method"] == "mezo" else None
    params = row.get("optimizer_params", {})
    plain = params.get("compute_dtype", "auto") == "auto" and params.get("num_directions", 1) == 1
    if not plain or row.get("compiled"):
        return None
    if row["resident"]:
        return "resident"
    if row["resident_blocks"]:
        return None
    stream = row["stream"]
    plain = all(stream.get(key, True) for key in ("overlap", "reuse_buffers", "fuse_update"))
    plain = plain and stream.get("device_slots", 2) == 2 and stream.get("master") != "split"
    if not plain or stream.get("wire_dtype", "bf16") not in ("bf16", "auto", *_NARROW):
        return None
    return stream["wire_dtype"] if stream.get("wire_dtype") in _NARROW else "streamed"


def _figure(lines: dict[str, list[Row]]) -> Any:
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter, NullLocator

    figure = Figure(figsize=(8.0, 5.4), layout="constrained")
    sizes = {row["parameters"]: row.get("shape", "") for rows in lines.values() for row in rows}
    family, names = _size_names(sizes)
    mezo = {row["parameters"]: row["tokens_per_s"] for row in lines.get("mezo", ())}
    panels = (("tokens_per_s", "tokens/s"), ("peak_gb", "GPU memory, GB"))
    for axes, (key, title) in zip(figure.subplots(1, 2), panels, strict=True):
        for way, (label, colour, marker) in _STYLES.items():
            points = [(row["parameters"], row[key]) for row in lines.get(way, ()) if row.get(key)]
            if not points:
                continue
            hollow = "white" if way == "streamed" else colour  # lines that coincide in memory stay apart
            style = {"color": colour, "marker": marker, "markerfacecolor": hollow, "label": label}
            axes.plot(*zip(*points, strict=True), **style, zorder=3 if way == "streamed" else 2)
            n, value = points[-1]  # the line ends there: a label beside it crosses nothing
            if key == "tokens_per_s" and way != "mezo" and n in mezo:
                at = {"textcoords": "offset points", "va": "center", "fontsize": 8}
                axes.annotate(f"{value / mezo[n]:.2f} x MeZO", (n, value), (8, 0), color=colour, **at)
        axes.set(xscale="log", yscale="log", xlabel=family, title=title)
        axes.set_xticks(list(sizes), names)
        axes.margins(x=0.12, y=0.1)
        if key == "tokens_per_s":
            axes.set_xlim(right=axes.get_xlim()[1] * (max(sizes) / min(sizes)) ** 0.3)  # room for the labels
        axes.xaxis.set_minor_formatter(NullFormatter())
        axes.xaxis.set_minor_locator(NullLocator())
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 1.5, 2, 3, 5, 7)))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))
        axes.yaxis.set_minor_formatter(NullFormatter())
        axes.grid(alpha=0.3)
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=2, frameon=False, fontsize=9)
    gpu = next((row.get("gpu") for rows in lines.values() for row in rows if row.get("gpu")), None) or "no GPU"
    figure.suptitle(f"{gpu}, bf16, one sequence of 2,048 tokens", fontsize=10)
    return figure


def _size_names(sizes: dict[int, str]) -> tuple[str, list[str]]:
    """(what all models are, what tells them apart)."""
    names = [shape.upper() if shape else f"{numel / 1e9:.3g}B" for numel, shape in sizes.items()]
    families = {name.rpartition("-")[0] for name in names}
    if len(families) > 1 or families == {""}:
        return "model", names
    return families.pop(), [name.rpartition("-")[2] for name in names]
