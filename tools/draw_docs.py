"""Draws the pictures of the pages in docs/ that explain the methods, as SVG files in docs/pictures.

    python tools/draw_docs.py

A picture is 5 inches wide with text of 11 points or more, which a phone shows at a legible size. Its background is
white, so that it is legible on a dark page too.
"""

from __future__ import annotations

import io
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

REPO = Path(__file__).parents[1]
sys.path.insert(0, str(REPO))

from matplotlib import rc_context  # noqa: E402
from matplotlib.axes import Axes  # noqa: E402
from matplotlib.figure import Figure  # noqa: E402
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch, Rectangle  # noqa: E402

from ds_zo.streaming.schedule import NUM_CHUNKS, Kind, sweep  # noqa: E402

PICTURES = REPO / "docs" / "pictures"
WIDTH_IN = 5.0
INK, BLUE, ORANGE, GREY, GREEN, PALE = "#1c2530", "#9cc3ec", "#f5b971", "#dde3ea", "#9fd4b3", "#f4f6f9"
STYLE = {
    "svg.fonttype": "none",
    "svg.hashsalt": "ds_zo",
    "font.family": "sans-serif",
    "font.size": 11,
    "text.color": INK,
}
UPLOAD_S, COMPUTE_S, DOWNLOAD_S = 1.0, 0.85, 1.0
"""Lengths of the boxes in the picture of streaming, in widths of an upload. They are not measured."""


def draw(name: str) -> str:
    """The picture as SVG."""
    height_in, paint = PAINTERS[name]
    with rc_context(STYLE):
        figure = Figure(figsize=(WIDTH_IN, height_in), facecolor="white")
        axes = figure.add_axes((0.0, 0.0, 1.0, 1.0))
        axes.set_xlim(0, WIDTH_IN)
        axes.set_ylim(0, height_in)
        axes.axis("off")
        paint(axes)
        text = io.StringIO()
        figure.savefig(text, format="svg", metadata={"Date": None})
    return text.getvalue()


def _box(axes: Axes, x: float, y: float, width: float, height: float, text: str, colour: str, **font: Any) -> None:
    """A box with its lower left corner at (x, y) and text in its middle."""
    shape = "round,pad=0,rounding_size=0.06"
    axes.add_patch(
        FancyBboxPatch((x, y), width, height, boxstyle=shape, facecolor=colour, edgecolor=INK, linewidth=0.8)
    )
    axes.text(x + width / 2, y + height / 2, text, ha="center", va="center", **font)


def _panel(axes: Axes, y: float, height: float, title: str) -> None:
    """A pale area over the whole width, with a title in its upper left corner."""
    axes.add_patch(Rectangle((0.08, y), WIDTH_IN - 0.16, height, facecolor=PALE, edgecolor="#b6c0cc", linewidth=0.8))
    axes.text(0.18, y + height - 0.08, title, ha="left", va="top", weight="bold")


def _arrow(axes: Axes, begin: tuple[float, float], end: tuple[float, float]) -> None:
    line = FancyArrowPatch(
        begin, end, arrowstyle="-|>", mutation_scale=14, color=INK, linewidth=1.2, shrinkA=0, shrinkB=0
    )
    axes.add_patch(line)


def _zo(axes: Axes) -> None:
    _box(axes, 1.25, 4.75, 2.5, 0.6, "stored weights θ\nnever perturbed in place", GREY)
    _box(axes, 0.15, 3.55, 2.2, 0.6, "copy  θ + ε z", BLUE)
    _box(axes, 2.65, 3.55, 2.2, 0.6, "copy  θ − ε z", BLUE)
    _arrow(axes, (2.0, 4.75), (1.25, 4.15))
    _arrow(axes, (3.0, 4.75), (3.75, 4.15))
    axes.text(2.5, 4.4, "z from\n(seed, step)", ha="center", va="center")
    _box(axes, 0.15, 2.5, 2.2, 0.6, "forward  →  loss ℓ₊", GREEN)
    _box(axes, 2.65, 2.5, 2.2, 0.6, "forward  →  loss ℓ₋", GREEN)
    _arrow(axes, (1.25, 3.55), (1.25, 3.1))
    _arrow(axes, (3.75, 3.55), (3.75, 3.1))
    _box(axes, 0.9, 1.45, 3.2, 0.6, "g = (ℓ₊ − ℓ₋) / 2ε\none number", ORANGE)
    _arrow(axes, (1.25, 2.5), (1.9, 2.05))
    _arrow(axes, (3.75, 2.5), (3.1, 2.05))
    _box(axes, 0.9, 0.4, 3.2, 0.6, "log  (step, lr · g)\na few bytes a step", GREY)
    _arrow(axes, (2.5, 1.45), (2.5, 1.0))
    axes.text(2.5, 0.2, "Next step: θ ← θ − lr · g · z, z drawn again", ha="center", va="center")


def _lomo(axes: Axes) -> None:
    colours = {"old": GREY, "new": BLUE, "grad": ORANGE}
    for left, title, keeps in ((1.0, "SGD, AdamW", True), (3.1, "LOMO", False)):
        axes.text(left + 0.85, 3.95, title, ha="center", va="center", weight="bold")
        for row in range(5):
            y = 3.2 - 0.55 * row
            for layer in range(4):
                # Row 0 to 3 is the backward pass of layer 4 to 1, row 4 the end of the step.
                done = row == 4 or layer > 3 - row
                now = row < 4 and layer == 3 - row
                weight = "new" if (row == 4 if keeps else done) else "old"
                has_gradient = now or (keeps and done and row < 4)
                x = left + 0.44 * layer
                axes.add_patch(Rectangle((x, y), 0.38, 0.42, facecolor=colours[weight], edgecolor=INK, linewidth=0.7))
                if has_gradient:
                    spot = Rectangle((x + 0.1, y + 0.1), 0.18, 0.22, facecolor=ORANGE, edgecolor=INK, linewidth=0.7)
                    axes.add_patch(spot)
        for layer in range(4):
            axes.text(left + 0.44 * layer + 0.19, 3.72, str(layer + 1), ha="center", va="center")
    for row, text in enumerate(("layer 4", "layer 3", "layer 2", "layer 1", "after")):
        axes.text(0.9, 3.41 - 0.55 * row, text, ha="right", va="center")
    axes.text(0.9, 3.72, "layer", ha="right", va="center")
    for x, colour, text in ((0.2, GREY, "old weights"), (1.85, BLUE, "new weights"), (3.5, ORANGE, "gradient")):
        axes.add_patch(Rectangle((x, 0.32), 0.22, 0.22, facecolor=colour, edgecolor=INK, linewidth=0.7))
        axes.text(x + 0.3, 0.43, text, ha="left", va="center")
    axes.text(2.5, 0.12, "Time runs down: one line for each layer's backward", ha="center", va="center")


def _lsp(axes: Axes) -> None:
    _panel(axes, 2.4, 2.95, "GPU")
    _panel(axes, 0.1, 1.35, "CPU")
    _box(axes, 0.25, 3.35, 1.25, 1.5, "gradient\nG\nm × n", ORANGE)
    _arrow(axes, (1.5, 4.1), (2.05, 4.1))
    _box(axes, 2.05, 3.75, 0.85, 0.75, "PᵀGQ\nd × d", ORANGE)
    axes.text(1.85, 4.9, "P, Q: sparse,\nr values a row", ha="left", va="center")
    _box(axes, 3.5, 3.35, 1.25, 1.5, "weights\nW\nm × n", BLUE)
    axes.text(4.12, 3.15, "W − lr · P D Qᵀ", ha="center", va="center")
    axes.text(0.87, 3.15, "then freed", ha="center", va="center")
    _box(
        axes,
        0.6,
        0.3,
        3.8,
        0.7,
        "Adam on d × d matrices, in a thread beside\nthe backward pass:  S  →  direction D",
        GREEN,
    )
    _arrow(axes, (2.3, 3.75), (1.6, 1.0))
    _arrow(axes, (3.4, 1.0), (4.1, 3.02))
    axes.text(1.7, 1.93, "S = PᵀGQ", ha="right", va="center")
    axes.text(3.9, 1.93, "D", ha="left", va="center")
    axes.text(2.78, 1.93, "d² numbers\neach way,\nnot m · n", ha="center", va="center")


def _streaming(axes: Axes) -> None:
    """The timeline of a real schedule: `sweep` makes it, and each action begins when its stream and its slot allow."""
    lanes = {Kind.UPLOAD: (2.45, BLUE), Kind.COMPUTE: (1.6, GREEN), Kind.DOWNLOAD: (0.75, ORANGE)}
    seconds = {Kind.UPLOAD: UPLOAD_S, Kind.COMPUTE: COMPUTE_S, Kind.DOWNLOAD: DOWNLOAD_S}
    stream_free = dict.fromkeys(lanes, 0.0)
    slot_free: dict[int, float] = {}
    ready: dict[int, float] = {}
    scale, left = 0.62, 0.12
    for kind, (y, _) in lanes.items():
        axes.text(left, y + 0.53, kind.name.lower(), ha="left", va="center", weight="bold")
        axes.plot([left, WIDTH_IN - 0.1], [y - 0.04, y - 0.04], color="#b6c0cc", linewidth=0.8)
    for action in sweep(range(6), streamed=range(6), num_slots=2, downloads={1, 4}):
        waits_for = slot_free.get(action.slot, 0.0) if action.kind is Kind.UPLOAD else ready[action.block]
        begin = max(stream_free[action.kind], waits_for)
        end = begin + seconds[action.kind]
        stream_free[action.kind] = ready[action.block] = end
        if action.kind is Kind.COMPUTE:
            slot_free[action.slot] = end
        elif action.kind is Kind.DOWNLOAD:
            slot_free[action.slot] = begin + DOWNLOAD_S / NUM_CHUNKS
        y, colour = lanes[action.kind]
        _box(axes, left + scale * begin, y, scale * (end - begin) - 0.04, 0.38, str(action.block), colour)
    axes.text(2.5, 3.3, "Six blocks, two slots on the GPU", ha="center", va="center", weight="bold")
    axes.text(2.5, 0.4, "While block 1 computes, block 2 arrives.", ha="center", va="center")
    axes.text(2.5, 0.18, "Only blocks 1 and 4 are written back in this step.", ha="center", va="center")


PAINTERS: dict[str, tuple[float, Callable[[Axes], None]]] = {
    "zo": (5.5, _zo),
    "lomo": (4.2, _lomo),
    "lsp": (5.45, _lsp),
    "streaming": (3.5, _streaming),
}
"""By name: the height in inches, and the function that draws the picture."""


def main() -> None:
    for name in PAINTERS:
        (PICTURES / f"{name}.svg").write_text(draw(name), encoding="utf-8")


if __name__ == "__main__":
    main()
