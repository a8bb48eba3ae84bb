"""Plots of a comparison as inline SVG, from rows alone."""

from __future__ import annotations

import io
import re
import statistics
from collections.abc import Sequence

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from ds_zo.bench.contenders import ALL
from ds_zo.bench.losses import SMOOTHED_STEPS, smoothed
from ds_zo.records.rows import Row

STYLE = {"svg.fonttype": "none", "font.family": "sans-serif", "font.size": 10, "axes.grid": True, "grid.alpha": 0.25}
_COLOURS = (
    *("#4c72b0", "#dd8452", "#55a868", "#c44e52", "#8172b3", "#937860", "#da8bc3", "#5f6b7a", "#b5a642", "#3aa6b9"),
    *("#2f4b7c", "#a05195", "#f0803c", "#487e4c", "#7f1d1d", "#0f766e"),
)
_CUT_AT = 3.0
"""A bar is cut at this multiple of the median bar if the longest is twice that: one slow contender would leave the
others no room."""
_PARTS = (("forward_s", "forward", "#4c72b0"), ("backward_s", "backward", "#55a868"), ("update_s", "update", "#dd8452"))
_DEVICE = (
    ("gpu_compute_s", "GPU computes", "#9aa7b8"),
    ("copy_exposed_s", "only copies", "#c44e52"),
    ("gpu_idle_s", "GPU idle", "#e4e4e4"),
)


def memory_against_speed(rows: Sequence[Row], *, cap_gb: float | None = None) -> str:
    """Plots each contender's device memory against its speed: up and to the left is better."""
    key = memory_key(rows)
    figure, axes = _figure(7.6, 4.8)
    found = [(row[key], row["tokens_per_s"], row) for row in rows if row.get("tokens_per_s") and row.get(key)]
    points = sorted(found, key=lambda point: point[:2])
    for gb, speed, row in points:
        axes.scatter(gb, speed, s=64, color=colour_of(row), marker=marker_of(row), zorder=3)
    caps = [cap_gb] if cap_gb is not None and key == "peak_gb" else []
    log_axes(axes, [*(gb for gb, _, _ in points), *caps], [speed for _, speed, _ in points])
    draw_caps(axes, caps)
    label_points(axes, [(gb, speed, row["contender"], colour_of(row)) for gb, speed, row in points])
    axes.set_xlabel("peak GPU memory, GB" if key == "peak_gb" else "peak host memory, GB")
    axes.set_ylabel("tokens/s (median step)")
    return as_svg(figure, "memory against speed")


def breakdown(rows: Sequence[Row]) -> str:
    """Plots the parts of a step, each waited for, and below them the GPU's activity in a step that nothing waits
    for."""
    shown = [row for row in rows if row.get("forward_s") is not None]
    profiled = any(row.get("gpu_compute_s") is not None for row in shown)
    figure, axes = _figure(7.6, 0.9 + (0.55 if profiled else 0.36) * max(1, len(shown)))
    offset = 0.2 if profiled else 0.0
    ends = [0.0] * len(shown)
    for kind, height, places in ((_PARTS, 0.36 if profiled else 0.6, -offset), (_DEVICE, 0.3, offset)):
        left = [0.0] * len(shown)
        for key, label, colour in kind:
            widths = [1e3 * (row.get(key) or 0.0) for row in shown]
            if any(widths):
                at = [i + places for i in range(len(shown))]
                axes.barh(at, widths, height=height, left=left, color=colour, label=label, zorder=3)
            left = [start + width for start, width in zip(left, widths, strict=True)]
            ends = [max(end, reached) for end, reached in zip(ends, left, strict=True)]
    _cut(axes, ends)
    axes.set_yticks(range(len(shown)), [row["contender"] for row in shown])
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    axes.set_xlabel("ms a step")
    axes.legend(ncols=3 if profiled else 1, fontsize=9, frameon=False, loc="lower center", bbox_to_anchor=(0.5, 1.0))
    return as_svg(figure, "breakdown of a step")


def learning_curves(rows: Sequence[Row], *, against: str) -> str:
    """Plots loss against `steps`, or against `seconds` at each contender's mean speed."""
    figure, axes = _figure(7.6, 4.2)
    for row in rows:
        losses = smoothed(row.get("losses") or [])
        if not losses:
            continue
        unit = 1.0 if against == "steps" else row["step_wall_s"]
        at = [unit * (i + 1) for i in range(len(losses))]
        line = "-" if _is_ours(row) else "--"
        axes.plot(at, losses, line, color=colour_of(row), label=row["contender"], linewidth=1.6)
    if against == "seconds":
        axes.set_xscale("log")
        _plain_ticks(axes.xaxis)
    axes.set_xlabel("steps" if against == "steps" else "seconds of training")
    axes.set_ylabel(f"loss (mean of {SMOOTHED_STEPS} steps)")
    axes.legend(fontsize=8, frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))
    return as_svg(figure, f"loss against {against}")


def memory_key(rows: Sequence[Row]) -> str:
    """Returns the row key of device memory; without a GPU, that of host memory."""
    return "peak_gb" if any(row.get("peak_gb") for row in rows) else "host_peak_gb"


def _is_ours(row: Row) -> bool:
    return row["contender"] in ALL and ALL[row["contender"]].backend is not None


def marker_of(row: Row) -> str:
    return "o" if _is_ours(row) else "X"


def colour_of(row: Row) -> str:
    """Returns a contender's colour, which is the same in every plot."""
    names = list(ALL)
    return _COLOURS[(names.index(row["contender"]) if row["contender"] in ALL else len(names)) % len(_COLOURS)]


def draw_caps(axes: Axes, caps_gb: Sequence[float]) -> None:
    for cap in caps_gb:
        axes.axvline(cap, color="#888", linestyle=":", linewidth=1, zorder=1)
        axes.annotate(
            f"{cap:g} GB",
            (cap, 0.0),
            xycoords=("data", "axes fraction"),
            xytext=(-3, 3),
            textcoords="offset points",
            ha="right",
            fontsize=8,
            color="#666",
        )


def _cut(axes: Axes, ends: Sequence[float]) -> None:
    """Cuts bars that would make the others too short to read, and writes their length on them."""
    edge = _CUT_AT * statistics.median(ends) if ends else 0.0
    if not ends or max(ends) < 2 * edge:
        return
    axes.set_xlim(0, edge)
    for place, end in enumerate(ends):
        if end > edge:
            axes.text(
                0.99 * edge,
                place,
                f"{end:,.0f} ms \N{RIGHTWARDS ARROW}",
                ha="right",
                va="center",
                fontsize=9,
                zorder=4,
                bbox={"facecolor": "white", "edgecolor": "none", "pad": 1.5},
            )


def label_points(axes: Axes, points: Sequence[tuple[float, float, str, str]]) -> None:
    """Writes names beside their points in their colours, and moves them apart if they would cover one another or a
    point."""
    axes.figure.canvas.draw()
    places = [axes.transData.transform((gb, speed)) for gb, speed, *_ in points]
    taken: list[tuple[float, float, float]] = [(x - 7, y, 14) for x, y in places]
    for gb, speed, name, colour in sorted(points, key=lambda point: -point[1]):
        x, y = axes.transData.transform((gb, speed))
        width = 6.8 * len(name)
        on_right = x + width + 10 < axes.bbox.x1
        start = x + 9 if on_right else x - 9 - width
        shift = next(
            shift
            for step in range(40)
            for shift in (6.5 * step, -6.5 * step)
            if all(
                abs(y + shift - other_y) >= 14 or start > other_x + other_width or other_x > start + width
                for other_x, other_y, other_width in taken
            )
        )
        taken.append((start, y + shift, width))
        scale = 72.0 / axes.figure.dpi
        axes.annotate(
            name,
            (gb, speed),
            xytext=((9 if on_right else -9) * scale, shift * scale),
            textcoords="offset points",
            ha="left" if on_right else "right",
            va="center",
            fontsize=9,
            color=colour,
        )


def log_axes(axes: Axes, across: Sequence[float], up: Sequence[float]) -> None:
    axes.set_xscale("log")
    axes.set_yscale("log")
    for axis, limits, values in ((axes.xaxis, axes.set_xlim, across), (axes.yaxis, axes.set_ylim, up)):
        _plain_ticks(axis)
        if min(values, default=0) > 0:
            limits(min(values) / 1.35, max(values) * 1.35)


def _plain_ticks(axis: Axis) -> None:
    """Labels an axis with numbers instead of powers of ten."""
    axis.set_major_locator(LogLocator(subs=(1.0, 1.5, 2.0, 3.0, 5.0, 7.0)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))
    axis.set_minor_formatter(NullFormatter())


def _figure(width: float, height: float) -> tuple[Figure, Axes]:
    with rc_context(STYLE):
        figure = Figure(figsize=(width, height), layout="constrained")
        axes = figure.add_subplot()
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    return figure, axes


def as_svg(figure: Figure, name: str) -> str:
    """Returns the figure as SVG without the XML prologue, with a text for readers who cannot see it. Ids carry the
    figure's name, because one page holds several figures."""
    text = io.StringIO()
    with rc_context(STYLE | {"svg.hashsalt": name}):
        figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None})
    svg = text.getvalue()
    prefix = name.replace(" ", "-")
    svg = re.sub(r'( id="|href="#|url\(#)', rf"\g<1>{prefix}-", svg[svg.index("<svg") :])
    return svg.replace("<svg ", f'<svg role="img" aria-label="{name}" ', 1)
