"""Draws the pictures of `pictures.yaml` from rows: by file, what is drawn, and of which rows."""

from __future__ import annotations

import io
import statistics
import xml.etree.ElementTree as ET
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks import front_page, timeline
from benchmarks.blocks import Block, read_yaml, rows_in, specs
from benchmarks.views import best_on_dev, grouped
from ds_zo.bench.losses import SMOOTHED_STEPS
from ds_zo.records.rows import Row
from ds_zo.tasks.score import sign_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

REPO = Path(__file__).parents[1]
Rows = Sequence[Row]


def pictures() -> dict[str, dict[str, Any]]:
    """By file: what is drawn, and of which rows."""
    return read_yaml(Path(__file__).with_suffix(".yaml"))


def drawn(file: str) -> bytes:
    """The picture as the bytes of its file. The texts of an SVG stay texts, and the same rows make the same file."""
    from matplotlib import rc_context

    spec = dict(pictures()[file])
    draw, rows = DRAWINGS[spec.pop("draw")], rows_in(spec.pop("file")) if "file" in spec else []
    where = {key: spec.pop(key) for key in ("run_id", "task") if key in spec}
    made = draw([row for row in rows if all(row.get(key) == value for key, value in where.items())], **spec)
    if isinstance(made, str):
        return made.encode()
    out, kind = io.BytesIO(), Path(file).suffix[1:]
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "ds_zo"}):
        made.savefig(out, dpi=110, format=kind, metadata={"Date": None} if kind == "svg" else None)
    return out.getvalue()


def write_all() -> list[str]:
    """Writes the pictures that are missing, or whose texts are not those of the rows, and names them. A version of
    matplotlib may draw the same in other bytes."""
    written = []
    for file in pictures():
        path = REPO / file
        if path.exists() and (path.suffix != ".svg" or words(path.read_bytes()) == words(drawn(file))):
            continue
        path.write_bytes(drawn(file))
        written.append(path.name)
    return written


def words(svg: bytes) -> list[str]:
    """All words of the picture's texts. A version of matplotlib may break lines into elements in its own way."""
    texts = [element for element in ET.fromstring(svg).iter() if element.tag.endswith("}text")]
    return " ".join("".join(f"{part} " for part in element.itertext()) for element in texts).split()


def _panels(width: float, height: float, columns: int, lines: int = 1, **shared: Any) -> tuple[Figure, list[Any]]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    panels = list(figure.subplots(lines, columns, squeeze=False, **shared).flat)
    for axes in panels:
        axes.grid(alpha=0.3)
    return figure, panels


# ZO


_WAYS = {
    "mezo": ("MeZO, whole model on the GPU", "#444444", "s"),
    "resident": ("ZO, all blocks on the GPU", "#d08a3c", "^"),
    "streamed": ("ZO, all blocks streamed, bf16", "#4878a8", "o"),
    "bf12": ("ZO, all blocks streamed, bf12", "#8a6aa0", "v"),
    "fp8": ("ZO, all blocks streamed, fp8", "#6aa06a", "D"),
}
"""By way of running, which ends a case's name: its name, its colour, its marker."""
_SIZES = ("1.3b", "6.7b", "13b")


def sizes(rows: Rows) -> Figure:
    """Tokens/s and GPU memory against the size of OPT, ZO beside MeZO."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter, NullLocator

    figure, panels = _panels(8.0, 5.4, 2)
    of = {row["case"]: row for row in rows}
    parameters = [of[f"{size}.mezo"]["parameters"] for size in _SIZES]
    for axes, (key, title) in zip(panels, (("tokens_per_s", "tokens/s"), ("peak_gb", "GPU memory, GB")), strict=True):
        for way, (label, colour, marker) in _WAYS.items():
            found = [of[f"{size}.{way}"] for size in _SIZES if f"{size}.{way}" in of]
            hollow = "white" if way == "streamed" else colour  # lines that coincide in memory stay apart
            style = {"color": colour, "marker": marker, "markerfacecolor": hollow, "label": label}
            at = [row["parameters"] for row in found]
            axes.plot(at, [row[key] for row in found], **style, zorder=3 if way == "streamed" else 2)
            if key == "tokens_per_s" and way != "mezo":  # the line ends there: a label beside it crosses nothing
                times = found[-1][key] / of[f"{_SIZES[-1]}.mezo"][key]
                beside = {"textcoords": "offset points", "va": "center", "fontsize": 8, "color": colour}
                axes.annotate(f"{times:.2f} x MeZO", (at[-1], found[-1][key]), (8, 0), **beside)
        axes.set(xscale="log", yscale="log", xlabel="OPT", title=title)
        axes.set_xticks(parameters, [size.upper() for size in _SIZES])
        axes.margins(x=0.12, y=0.1)
        if key == "tokens_per_s":
            axes.set_xlim(right=axes.get_xlim()[1] * (parameters[-1] / parameters[0]) ** 0.3)  # room for the labels
        axes.xaxis.set_minor_formatter(NullFormatter())
        axes.xaxis.set_minor_locator(NullLocator())
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 1.5, 2, 3, 5, 7)))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))
        axes.yaxis.set_minor_formatter(NullFormatter())
    figure.legend(
        *panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=2, frameon=False, fontsize=9
    )
    figure.suptitle(f"{rows[0]['gpu']}, bf16, one sequence of 2,048 tokens", fontsize=10)
    return figure


def step(rows: Rows) -> Figure:
    """What the streams did in one streamed step."""
    return timeline.draw(next(row for row in reversed(rows) if "spans" in row))


# Tokens a step


LINK_COLOURS = {55.2: "#4878a8", 25.0: "#d08a3c", 12.0: "#6aa06a"}
"""By the link's GB/s."""
_MODELS = {"lomo-7b": "LOMO, LLaMA-7B", "adapter-70b": "LoRA over NF4, LLaMA-70B"}


def many_tokens(rows: Rows) -> Figure:
    """Planned tokens/s against the tokens of a step, on three links. A dot is the number that the plan chooses."""
    figure, panels = _panels(8.0, 4.2, 2)
    for axes, (case, title) in zip(panels, _MODELS.items(), strict=True):
        for gbps, colour in LINK_COLOURS.items():
            of_link = [row for row in rows if (row["case"], row["link_gbps"]) == (case, gbps)]
            found = sorted((row["batch"] * row["length"], row["tokens_per_s"], row["is_chosen"]) for row in of_link)
            chosen = [i for i, (*_, is_chosen) in enumerate(found) if is_chosen]
            line = [tokens for tokens, *_ in found], [speed for _, speed, _ in found]
            axes.plot(*line, color=colour, marker="o", markevery=chosen, label=f"{gbps:g} GB/s")
        axes.set(xscale="log", xlabel="tokens a step", ylabel="tokens/s", title=title)
        axes.set_ylim(bottom=0)
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=3, frameon=False)
    figure.suptitle("Planned for an H200, not measured; all blocks streamed, bf16", fontsize=10)
    return figure


# LSP


_CONTENDERS = {
    "ceiling": "forward and backward only",
    "lsp-512": "LSP, d = 512",
    "zero2-offload": "ZeRO-Offload",
    "lsp-none": "layer-wise, no projection",
}
_PARTS = {
    "forward": ("forward", "#4c72b0"),
    "backward": ("backward and the GPU's own update", "#55a868"),
    "copy": ("copies that are waited for", "#c44e52"),
    "cpu": ("CPU work that is waited for", "#dd8452"),
}


def parts_of_steps(rows: Rows) -> dict[str, dict[str, float]]:
    """Seconds of a step by contender and kind; they add up to it. The forward pass is the ceiling's, since one that
    waits for updates would count them twice. A wait that noise made negative counts as none.

    ZeRO-Offload's gradients leave during the backward pass and its weights come back after Adam. So its copies are
    those that the rest of its step takes beyond the ceiling's.
    """
    of = _taken_apart(rows)
    ceiling, found = of["ceiling"], {}
    for name, row in of.items():
        copy = row.get("exposed_copy_s", row["rest_s"] - ceiling["step_s"] if "exposed_cpu_s" in row else 0.0)
        waits = {"copy": max(0.0, copy), "cpu": max(0.0, row.get("exposed_cpu_s", 0.0))}
        rest = (row.get("apart_step_s") or row["step_s"]) - sum(waits.values())
        forward = min(ceiling["forward_s"], rest)
        found[_CONTENDERS[name]] = {"forward": forward, "backward": rest - forward, **waits}
    return found


def _taken_apart(rows: Rows) -> dict[str, Row]:
    named = [(row["case"].rpartition("/")[2], row) for row in rows if row["case"].startswith("issue/1.3b/")]
    return {name: row for name, row in named if name in _CONTENDERS}


def parts(rows: Rows) -> Figure:
    """A bar for each contender's step, by kind of time."""
    found = parts_of_steps(rows)
    figure, (axes,) = _panels(8.0, 1.5 + 0.45 * len(found), 1)
    left = [0.0] * len(found)
    for key, (label, colour) in _PARTS.items():
        widths = [1e3 * part[key] for part in found.values()]
        axes.barh(list(found), widths, left=left, color=colour, label=label, height=0.6, zorder=3)
        left = [start + width for start, width in zip(left, widths, strict=True)]
    for i, step_ms in enumerate(left):
        axes.annotate(f"{step_ms:,.0f}", (step_ms, i), (4, 0), textcoords="offset points", va="center", fontsize=9)
    axes.margins(x=0.08)
    axes.invert_yaxis()
    of = _taken_apart(rows)
    kinds = {"exposed_copy_s": "copies", "exposed_cpu_s": "CPU work"}
    below = [
        f"{words} of {_CONTENDERS[name]} ({1e3 * row[key]:.1f} ms)"
        for name, row in of.items()
        for key, words in kinds.items()
        if row.get(key, 0.0) < 0
    ]
    noise = f"\nbelow zero by noise, drawn as zero: {', '.join(below)}" if below else ""
    axes.set_xlabel(f"ms a step of {of['ceiling']['shape']}, {of['ceiling']['gpu']}{noise}")
    axes.legend(ncols=2, frameon=False, fontsize=9, loc="lower center", bbox_to_anchor=(0.5, 1.0))
    return figure


_BIASES = (
    ("", "LSP, learned projectors", "C0"),
    ("galore_total_", "GaLore in LSP's memory on GPU and host", "C3"),
    ("galore_device_", "GaLore in LSP's memory on the GPU", "C4"),
)


def medians(rows: Rows) -> dict[tuple[str, int, int], dict[str, float]]:
    """Medians of the biases over the matrices of a shape, for each d (as clamped to it) and r."""
    named = [{**row, "name": " x ".join(map(str, row["shape"]))} for row in rows if row["study"] == "bias"]
    keys = [f"{prefix}bias_{kind}" for prefix, *_ in _BIASES for kind in ("fit", "test")]
    return {
        (name, d, r): {key: statistics.median(row[key] for row in found) for key in keys}
        for (name, d, r), found in sorted(grouped(named, ["name", "d", "r"]).items(), key=str)
    }


def bias(rows: Rows, nonzeros: Sequence[int] = (4, 16)) -> Figure:
    """Bias against d, a panel for each shape and r, whose memory GaLore has; dashed on the gradient of the fit, drawn
    through on the other."""
    from matplotlib.lines import Line2D

    found = medians(rows)
    shapes = sorted({shape for shape, *_ in found}, key=lambda shape: [int(n) for n in shape.split(" x ")])
    figure, panels = _panels(
        1.0 + 3.4 * len(nonzeros), 1.1 + 2.1 * len(shapes), len(nonzeros), len(shapes), sharey=True
    )
    most = max(1.0, *(row["bias_test"] for (_, _, r), row in found.items() if r in nonzeros))
    for axes, (shape, r) in zip(panels, [(shape, r) for shape in shapes for r in nonzeros], strict=True):
        points = sorted((dim, row) for (name, dim, of_r), row in found.items() if (name, of_r) == (shape, r))
        dims = [dim for dim, _ in points]
        for prefix, name, colour in _BIASES:
            for kind, style in (("fit", "--"), ("test", "-")):
                biases = [row[f"{prefix}bias_{kind}"] for _, row in points]
                named = {"label": name} if kind == "test" else {}
                axes.plot(dims, biases, style, marker="o", markersize=3, color=colour, **named)
        axes.set(xscale="log", ylim=(0, 1.05 * most), xlim=(0.85 * dims[0], dims[-1] / 0.85))
        axes.set_xticks(dims, [str(dim) for dim in dims])
        axes.minorticks_off()
        axes.set_title(f"weights {shape}, r = {r}", fontsize=10)
        axes.set_xlabel("d" if shape == shapes[-1] else "")
        axes.set_ylabel("relative bias" if r == nonzeros[0] else "")
    lines = {"on the batch of the fit": "--", "on another batch": "-"}
    handles = [*panels[0].get_legend_handles_labels()[0]]
    handles += [Line2D([], [], color="k", linestyle=style, label=label) for label, style in lines.items()]
    figure.legend(handles=handles, ncols=2, frameon=False, fontsize=9, loc="outside lower center")
    one = rows[-1]
    trained = f" after {one['trained_steps']} steps of training" if one.get("trained_steps") else ""
    model = str(one["model"]).removeprefix("random:")
    figure.suptitle(f"{model}{trained}, {one['task']}, batches of {one['samples']}", fontsize=10)
    return figure


# Training runs


def curves(rows: Rows, methods: Sequence[str] = ()) -> Figure:
    """Training loss above, the metric on dev below; against steps on the left, seconds on the right. Of named methods
    the best run by dev."""
    shown = [row for row in rows if row["status"] == "ok" and row.get("curve")]
    if methods:
        named = [row for row in shown if row["method"] in methods and row.get("dev") is not None]
        shown = best_on_dev([{**row, "run": i} for i, row in enumerate(named)], "run", "method")
    figure, panels = _panels(11, 7, 2, 2)
    for column, (x, title) in enumerate((("step", "steps"), ("train_s", "seconds of training"))):
        above, below = panels[column], panels[column + 2]
        for i, row in enumerate(shown):
            metric = row["metric"]
            losses = [(point[x], point["loss"]) for point in row["curve"] if point.get("loss") is not None]
            dev = [(point[x], point["dev"][metric]) for point in row["curve"] if metric in (point.get("dev") or {})]
            style = {"color": f"C{i % 10}", "linestyle": ("-", "--", ":")[i // 10 % 3], "label": _label(row, shown)}
            for axes, points in ((above, _smooth(losses)), (below, dev)):
                if points:
                    axes.plot(*zip(*points, strict=True), **style)
        above.set(xlabel=title, ylabel=f"training loss (mean of {SMOOTHED_STEPS} readings)")
        below.set(xlabel=title, ylabel=f"dev {shown[0]['metric']}")
    panels[1].legend(frameon=False, fontsize=8)
    figure.suptitle(_title(shown[0]))
    return figure


def _smooth(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    parts = (points[max(0, i + 1 - SMOOTHED_STEPS) : i + 1] for i in range(len(points)))
    return [(part[-1][0], statistics.mean(y for _, y in part)) for part in parts]


def _label(row: Row, rows: Rows) -> str:
    """The method, and its rate and seed where the rows have several."""
    mates = [other for other in rows if other["method"] == row["method"]]
    named = {"lr": "lr ", "seed": "seed "}
    several = [f"{words}{row[key]}" for key, words in named.items() if len({mate.get(key) for mate in mates}) > 1]
    return ", ".join([row["method"], *several])


def ranks(rows: Rows) -> Figure:
    """Test score against the rank of LoRA: of each seed the best run by dev. Other methods are level lines."""
    good = [row for row in rows if row["status"] == "ok" and row.get("dev") is not None]
    figure, (axes,) = _panels(6.4, 4.2, 1)
    best: dict[tuple[Any, ...], Row] = {}
    for key, found in grouped(
        [{**row, "rank": row.get("lora_rank")} for row in good], ["method", "rank", "seed"]
    ).items():
        best[key] = max(found, key=lambda row: sign_of(row["metric"]) * row["dev"])
    for (method,), found in sorted(grouped([row for row in best.values() if row["rank"]], ["method"]).items(), key=str):
        means = {rank: statistics.mean(row["after"] for row in of) for (rank,), of in grouped(found, ["rank"]).items()}
        axes.plot(*zip(*sorted(means.items(), key=lambda point: point[0]), strict=True), marker="o", label=method)
    for i, ((method,), found) in enumerate(
        grouped([row for row in good if not row.get("lora_rank")], ["method"]).items()
    ):
        row = max(found, key=lambda row: sign_of(row["metric"]) * row["dev"])
        axes.axhline(row["after"], linestyle="--", linewidth=1, color=f"C{i + 5}", label=method)
    all_ranks = sorted({row["lora_rank"] for row in good if row.get("lora_rank")})
    axes.set(xscale="log", xlabel="rank of LoRA", ylabel=f"test {good[0]['metric']}")
    axes.set_xticks(all_ranks, [str(rank) for rank in all_ranks])
    axes.minorticks_off()
    axes.legend(frameon=False, fontsize=8)
    figure.suptitle(_title(good[0]), fontsize=10)
    return figure


def _title(row: Row) -> str:
    return f"{Path(str(row.get('model', ''))).name}, {row['task']}, {row.get('device', '')}"


# Comparisons


def headline(rows: Rows, block: str) -> str:
    """Memory against speed, a panel for each model of a block. Cases are CAP/MODEL/CONTENDER."""
    spec = specs()[block]
    models: dict[str, list[Row]] = {column[0]: [] for column in spec["parts"][0]["columns"]}
    for row in Block(spec).rows:
        cap, model, contender = row["case"].split("/")
        if contender != "machine" and row["status"] == "ok" and not row.get("ran_with_gb"):
            head = next(head for head in models if head.startswith(f"{model},"))
            cap_gb = None if cap == "uncapped" else float(cap.removesuffix("gb"))
            models[head].append({**row, "contender": contender, "cap_gb": cap_gb})
    caps = sorted({row["cap_gb"] for found in models.values() for row in found if row["cap_gb"] is not None})
    return _by_model(models, caps_gb=caps)


def _by_model(rows_of: Mapping[str, Rows], *, caps_gb: Sequence[float]) -> str:
    """Plots memory against speed with a panel per model, as a file of its own. Rows that ran under a cap are hollow."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    from ds_zo.bench import plots

    num_columns = min(2, len(rows_of))
    num_rows = -(-len(rows_of) // num_columns)
    with rc_context(plots.STYLE):
        figure = Figure(figsize=(6.2 * num_columns, 4.4 * num_rows), layout="constrained", facecolor="white")
        grid = figure.subplots(num_rows, num_columns, squeeze=False)
    for axes in list(grid.flat)[len(rows_of) :]:
        axes.remove()
    key = plots.memory_key([row for rows in rows_of.values() for row in rows])
    for axes, (model, rows) in zip(grid.flat, rows_of.items(), strict=False):
        points = [(row[key], row["tokens_per_s_mean"], row) for row in rows if row.get(key)]
        for gb, speed, row in points:
            colour = plots.colour_of(row)
            face = colour if row.get("cap_gb") is None else "none"
            axes.scatter(gb, speed, s=44, marker=plots.marker_of(row), facecolors=face, edgecolors=colour, zorder=3)
        plots.log_axes(axes, [gb for gb, _, _ in points], [speed for _, speed, _ in points])
        plots.draw_caps(axes, caps_gb)
        axes.set_title(model, fontsize=11)
        axes.set_xlabel("peak GPU memory, GB" if key == "peak_gb" else "peak host memory, GB")
        axes.set_ylabel("tokens/s")
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
    figure.canvas.draw()  # places the axes, which labels are fitted to
    for axes, rows in zip(grid.flat, rows_of.values(), strict=False):
        named = [row for row in rows if row.get(key)]
        plots.label_points(
            axes, [(row[key], row["tokens_per_s_mean"], _cap_label(row), plots.colour_of(row)) for row in named]
        )
    return plots.as_svg(figure, "memory against speed by model")


def _cap_label(row: Row) -> str:
    cap = row.get("cap_gb")
    return str(row["contender"]) if cap is None else f"{row['contender']} within {cap:g} GB"


DRAWINGS: Mapping[str, Callable[..., Any]] = {
    "front_page": lambda rows: front_page.draw(),
    "headline": headline,
    "sizes": sizes,
    "step": step,
    "many_tokens": many_tokens,
    "parts": parts,
    "bias": bias,
    "curves": curves,
    "ranks": ranks,
}
"""By name in `pictures.yaml`: makes a figure, or the text of an SVG."""
