"""Tokens/s and GPU memory against model size, ZO beside MeZO, drawn from rows alone."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from benchmarks.zo_report import points_of
from ds_zo.records.rows import Row

_STYLES = {
    "mezo": ("#444444", "s"),
    "resident": ("#d08a3c", "^"),
    "streamed": ("#4878a8", "o"),
    "bf12": ("#8a6aa0", "v"),
    "fp8": ("#6aa06a", "D"),
}
_NARROW = ("bf12", "fp8")
"""Wires that are lines of their own."""


def plot_sizes(rows: Iterable[Row], folder: Path) -> list[Path]:
    """A picture a run and dtype of the model: two panels over the number of parameters; rows at B=1, T=2048 of whole
    models, of runs with two sizes at least."""
    series = {key: lines for key, lines in group_by_size(rows).items() if max(map(len, lines.values())) > 1}
    if not series:
        raise ValueError(
            "no run has whole models of two sizes at batch 1 and length 2048: run `zo_speed preset targets` first"
        )
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for (run_id, dtype), lines in sorted(series.items()):
        figure = _figure(run_id, dtype, lines)
        for suffix in ("png", "svg"):
            written.append(folder / f"zo_sizes_{run_id}_{dtype}.{suffix}".replace("/", "-"))
            figure.savefig(written[-1], dpi=150)
    return written


def group_by_size(rows: Iterable[Row]) -> dict[tuple[str, str], dict[str, list[Row]]]:
    """Rows of each (run, dtype) by way of running, smallest model first; one row a size, the fastest."""
    series: dict[tuple[str, str], dict[str, dict[str, Row]]] = {}
    for row in rows:
        way = _way(row)
        if way is None or row["layers"] != row["full_layers"]:
            continue
        for point in points_of(row):
            if (point["batch"], point["length"]) != (1, 2048):
                continue
            sizes = series.setdefault((str(row["run_id"]), row["dtype"]), {}).setdefault(way, {})
            best = sizes.get(row["shape"])  # which has more position embeddings where a case is longer
            if best is None or best["tokens_per_s"] < point["tokens_per_s"]:
                sizes[row["shape"]] = point
    return {
        key: {way: sorted(sizes.values(), key=lambda row: row["parameters"]) for way, sizes in lines.items()}
        for key, lines in series.items()
    }


def _way(row: Row) -> str | None:
    """How a row's weights were kept, None for what is not compared here."""
    if row.get("tokens_per_s") is None or "full_layers" not in row:
        return None
    if row["method"] != "zo":
        return "mezo" if row["method"] == "mezo" else None
    params = row.get("optimizer_params", {})
    plain = params.get("compute_dtype", "auto") == "auto" and params.get("num_directions", 1) == 1
    if not plain or row.get("compiled"):  # a case that is no longer run
        return None
    if row["resident"]:
        return "resident"
    if row["resident_blocks"]:
        return None
    stream = row["stream"]
    plain = all(stream.get(key, True) for key in ("overlap", "reuse_buffers", "fuse_update"))
    plain = plain and stream.get("device_slots", 2) == 2 and stream.get("master") != "split"
    if not plain or stream.get("wire_dtype", row["dtype"]) not in (row["dtype"], "auto", *_NARROW):
        return None
    return stream["wire_dtype"] if stream.get("wire_dtype") in _NARROW else "streamed"


def _figure(run_id: str, dtype: str, lines: dict[str, list[Row]]) -> Any:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter, NullLocator

    figure = Figure(figsize=(10, 4.6), layout="constrained")
    FigureCanvasAgg(figure)
    labels = {
        "mezo": "MeZO, in memory",
        "resident": "ZO, all resident",
        "streamed": f"ZO, all streamed ({dtype} wire)",
        **{wire: f"ZO, all streamed ({wire} wire)" for wire in _NARROW},
    }
    sizes = {row["parameters"]: row.get("shape", "") for rows in lines.values() for row in rows}
    mezo = {row["parameters"]: row["tokens_per_s"] for row in lines.get("mezo", ())}
    panels = (("tokens_per_s", "tokens/s"), ("peak_gb", "peak GPU memory, GB"))
    for axes, (key, title) in zip(figure.subplots(1, 2), panels, strict=True):
        for way, (colour, marker) in _STYLES.items():
            points = [(row["parameters"], row[key]) for row in lines.get(way, ()) if row.get(key)]
            if not points:
                continue
            hollow = "white" if way == "streamed" else colour  # lines that coincide in memory stay apart
            style = {"color": colour, "marker": marker, "markerfacecolor": hollow, "label": labels[way]}
            axes.plot(*zip(*points, strict=True), **style, zorder=3 if way == "streamed" else 2)
            for n, value in points if key == "tokens_per_s" and way != "mezo" else ():
                if n in mezo:
                    ratio = f"{value / mezo[n]:.2f}x"
                    at, side = ((6, 3), "left") if value >= mezo[n] else ((-5, -11), "right")  # of lines that fall
                    axes.annotate(ratio, (n, value), at, textcoords="offset points", fontsize=8, color=colour, ha=side)
        family, names = _size_names(sizes)
        axes.set(xscale="log", yscale="log", xlabel=family, title=title)
        axes.set_xticks(list(sizes), names)
        axes.margins(x=0.12, y=0.1)
        axes.xaxis.set_minor_formatter(NullFormatter())
        axes.xaxis.set_minor_locator(NullLocator())
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 1.5, 2, 3, 5, 7)))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))
        axes.yaxis.set_minor_formatter(NullFormatter())
        axes.grid(alpha=0.3)
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=3, frameon=False)
    gpu = next((row.get("gpu") for rows in lines.values() for row in rows if row.get("gpu")), "")
    title = f"{dtype}, B=1, T=2048, random weights; {gpu or 'no GPU'}, run {run_id}; numbers: times MeZO's speed"
    figure.suptitle(title, fontsize=10)
    return figure


def _size_names(sizes: dict[int, str]) -> tuple[str, list[str]]:
    """(what all models are, what tells them apart)."""
    names = [shape.upper() if shape else f"{numel / 1e9:.3g}B" for numel, shape in sizes.items()]
    families = {name.rpartition("-")[0] for name in names}
    if len(families) > 1 or families == {""}:
        return "model", names
    return families.pop(), [name.rpartition("-")[2] for name in names]
