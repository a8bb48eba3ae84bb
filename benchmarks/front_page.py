"""The README's picture: GPU memory to fine-tune models of four sizes, by ds_zo, ZeRO-Offload and QLoRA.

    python -m benchmarks.front_page --plan benchmarks/results/cpu_front_page.jsonl

The command writes a row for each case that no measured row has. `benchmarks.pages` draws the picture. A bar is of a
measured row. Where there is none it is of a planned row, drawn pale and marked by "≈".
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from benchmarks.blocks import rows_in
from ds_zo.records.rows import Row, append_row

PLANNED = "cpu_front_page.jsonl"
SIZES = ("7B", "30B", "70B", "175B")
CARD_GB = 24
_STREAMED = {"resident_blocks": 0}
_INPUTS = _STREAMED | {"frozen_dtype": "nf4", "offload_activations": True}
PLANS = {
    "30B/zero-offload": ("random:llama-30b", 4, 1024, "zero-offload", None),
    "70B/zero-offload": ("random:llama-70b", 2, 1024, "zero-offload", None),
    "175B/zero-offload": ("random:opt-175b", 1, 2048, "zero-offload", None),
    "70B/all": ("random:llama-70b", 2, 1024, "lomo", _STREAMED),
    "175B/all": ("random:opt-175b", 1, 2048, "lomo", _STREAMED),
    "30B/qlora": ("random:llama-30b", 1, 1024, "qlora", None),
    "70B/qlora": ("random:llama-70b", 2, 1024, "qlora", None),
    "175B/qlora": ("random:opt-175b", 1, 2048, "qlora", None),
    "30B/lora": ("random:llama-30b", 1, 1024, "adapter", _INPUTS),
}
"""By case: model, sequences, tokens of a sequence, backend, section `ds_zo.stream`."""
MEASURED = {
    "7B/zero-offload": ("lean/held-7b-24gb/rows.jsonl", "zero2-offload-bf16"),
    "7B/all": ("h200_lomo.jsonl", "streamed/7b-6gb"),
    "30B/all": ("h200_lomo.jsonl", "streamed/30b-24gb"),
    "7B/qlora": ("h200_adapter.jsonl", "7b/nf4-bitsandbytes"),
    "7B/lora": ("h200_adapter.jsonl", "7b/nf4-streamed-inputs"),
    "70B/lora": ("h200_adapter.jsonl", "70b/nf4-8gb-inputs"),
    "175B/lora": ("h200_adapter.jsonl", "175b/nf4-12gb-inputs"),
}
"""By case: file and case of its row."""
NAMES = {"zero-offload": "ZeRO-Offload", "all": "ds_zo, all weights", "qlora": "QLoRA", "lora": "ds_zo, LoRA"}
TOO_LARGE_AT_START = ("compare/zero_offload_24gb.jsonl", "zero2-offload")
"""The rows of ZeRO-Offload of 7B that ran out of CARD_GB while it started."""


class Bar(NamedTuple):
    gb: float
    is_planned: bool
    starts_larger: bool = False


def bars() -> dict[str, Bar]:
    """By case: its memory."""
    found = {row["case"]: Bar(row["peak_gb"], is_planned=True) for row in rows_in(PLANNED)}
    for case, (file, name) in MEASURED.items():
        row = next(row for row in rows_in(file) if row["case"] == name and row["status"] == "ok")
        found[case] = Bar(row["peak_gb"], is_planned=False)
    file, name = TOO_LARGE_AT_START
    failed = [row for row in rows_in(file) if row["case"] == name]
    stock = found["7B/zero-offload"]
    found["7B/zero-offload"] = stock._replace(starts_larger=all(row["status"] == "oom" for row in failed))
    return found


def planned_row(case: str) -> Row:
    from ds_zo.planner import plan

    model, batch, seq, backend, stream = PLANS[case]
    offload = None if stream is None else True
    found = plan(model, batch=batch, seq=seq, backends=[backend], stream=stream, offload=offload)[backend]
    return {
        "case": case,
        "status": "planned",
        "model": model,
        "batch": batch,
        "length": seq,
        "backend": backend,
        "stream": stream,
        "peak_gb": found.device_nbytes / 1e9,
        "host_peak_gb": found.host_nbytes / 1e9,
    }


WIDTH, ROW, LEFT, CARD_X = 760, 33, 284, 564
"""Pixels: the picture's width, the height of a line, and where bars begin and the card ends."""
COLOURS = {"zero-offload": "#8a8a8a", "all": "#3949ab", "qlora": "#8a8a8a", "lora": "#00796b"}


def draw() -> str:
    """The picture as SVG. Its letters are 11 pixels high on a phone."""
    found, lines, y = bars(), list[str](), 88

    def text(x: float, at: float, words: str, *, fill: str = "#222222", more: str = "") -> None:
        lines.append(f'<text x="{x:g}" y="{at:g}" fill="{fill}"{more}>{words}</text>')

    def value(x: float, at: float, words: str, *, fill: str = "#222222") -> None:
        text(x, at, words, fill=fill, more=' paint-order="stroke" stroke="#ffffff" stroke-width="6"')

    text(0, 26, "GPU memory to fine-tune a model, in GB", more=' font-weight="bold"')
    dashed = 'stroke="#222222" stroke-width="2" stroke-dasharray="3 5"'
    bottom = y + len(SIZES) * (len(NAMES) * ROW + 18) - 12
    lines.append(f'<line x1="{CARD_X}" y1="74" x2="{CARD_X}" y2="{bottom}" {dashed}/>')
    text(CARD_X, 66, f"a {CARD_GB} GB card", more=' text-anchor="middle"')
    for size in SIZES:
        text(0, y + 25, size, more=' font-weight="bold"')
        for method, name in NAMES.items():
            bar = found[f"{size}/{method}"]
            text(72, y + 25, name)
            end = LEFT + (CARD_X - LEFT) * min(bar.gb / CARD_GB, 1)
            shown = f"{'≈ ' if bar.is_planned else ''}{bar.gb:.{0 if bar.gb > CARD_GB else 1}f}"
            pale = ' opacity="0.55"' if bar.is_planned else ""
            if bar.gb > CARD_GB:
                colour = f'fill="#fbe3e0" stroke="#c62828" stroke-dasharray="{"7 4" if bar.is_planned else "none"}"'
                lines.append(f'<rect x="{LEFT}" y="{y + 3}" width="{WIDTH - LEFT - 4}" height="{ROW - 7}" {colour}/>')
                text(LEFT + 12, y + 25, f"does not fit: {shown}", fill="#b71c1c")
            else:
                area = f'x="{LEFT}" y="{y + 3}" width="{end - LEFT:.1f}" height="{ROW - 7}"'
                lines.append(f'<rect {area} fill="{COLOURS[method]}"{pale}/>')
                if bar.starts_larger:
                    text(LEFT + 12, y + 25, shown, fill="#ffffff")
                    value(end + 8, y + 25, f"over {CARD_GB} to start", fill="#b71c1c")
                else:
                    value(end + 8, y + 25, shown)
            y += ROW
        y += 18
    hosts = {row["case"]: row["host_peak_gb"] for row in rows_in(PLANNED)}
    text(0, y + 20, "≈ computed by ds-zo plan; other bars are measured on an H200.")
    text(0, y + 50, f"Host memory for all weights: 70B ≈ {hosts['70B/all']:.0f}, 175B ≈ {hosts['175B/all']:.0f} GB.")
    height = y + 62
    style = "font: 24px Helvetica, Arial, sans-serif"
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" style="{style}">'
    sheet = f'<rect width="{WIDTH}" height="{height}" style="fill: #ffffff"/>'
    return "\n".join([head, sheet, *lines, "</svg>", ""])


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plan", type=Path, metavar="FILE", required=True, help="a file that is written anew")
    out = parser.parse_args(arguments).plan
    out.unlink(missing_ok=True)
    for case in PLANS:
        append_row(out, planned_row(case))


if __name__ == "__main__":
    main()
