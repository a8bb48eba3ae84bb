"""Figures of the README and of docs/choose.md are those of rows in benchmarks/results."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from statistics import mean
from typing import Any

import pytest

from benchmarks import front_page
from ds_zo.bench.report import host_gb

REPO = Path(__file__).parents[1]
RESULTS = REPO / "benchmarks" / "results"
CHOOSE, README = ((REPO / name).read_text(encoding="utf-8") for name in ("docs/choose.md", "README.md"))
LLAMA, OPT = "4 x 1,024", "1 x 2,048"


def rows_of(file: str) -> Iterator[dict[str, Any]]:
    with (RESULTS / file).open(encoding="utf-8") as lines:
        yield from map(json.loads, lines)


def row_of(file: str, case: str, run: str) -> dict[str, Any]:
    """The one row of a case in a run. An empty `run` accepts any."""
    found = [row for row in rows_of(file) if row.get("case") == case and row["run_id"].startswith(run)]
    assert len(found) == 1, (file, case, run, len(found))
    return found[0]


def tables_of(text: str) -> list[list[str]]:
    """The cells of all lines of tables."""
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def speeds_of(page: str) -> list[list[str]]:
    """The lines of the page's table of memory and speed."""
    (section,) = re.findall(r"^## Memory and speed$(.*?)^## ", page, re.MULTILINE | re.DOTALL)
    return [row for row in tables_of(section) if row[4][:1].isdigit()]


OFFLOADED = "`AdamW` on LoRA, base streamed as NF4, `offload_activations`"
SPEED = [
    # method, model, tokens a step, file, case, run
    ("stock ZeRO-Offload", "LLaMA-7B", LLAMA, "compare/llama-7b/uncapped/rows.jsonl", "zero2-offload", ""),
    (
        "stock ZeRO-Offload, bf16 states",
        "LLaMA-7B",
        LLAMA,
        "lean/held-7b-24gb/rows.jsonl",
        "zero2-offload-bf16",
        "",
    ),
    ("`LOMO`", "LLaMA-7B", LLAMA, "compare/llama-7b/24gb/rows.jsonl", "lomo", ""),
    ("`AdaLOMO`", "LLaMA-7B", LLAMA, "h200_lomo.jsonl", "speed/adalomo", "20261115T093417Z"),
    ("`LSP`, d = 512", "LLaMA-7B", LLAMA, "lean/held-7b-24gb/rows.jsonl", "lsp", ""),
    ("`LSP`, d = 512, random projectors, `edge` lsp", "LLaMA-7B", LLAMA, "h200_lsp.jsonl", "capped/7b/4/lsp-512", ""),
    ("`ZO`", "LLaMA-7B", LLAMA, "compare/llama-7b/24gb/rows.jsonl", "zo", ""),
    ("`AdaLOMO`, streamed", "LLaMA-8B", LLAMA, "h200_recipes.jsonl", "adalomo_7b_24gb", ""),
    ("`LOMO`, streamed", "LLaMA-7B", LLAMA, "h200_lomo.jsonl", "streamed/7b-6gb", ""),
    ("`LSP`, streamed", "LLaMA-7B", LLAMA, "h200_lsp.jsonl", "capped/7b/4/lsp-512-streamed", ""),
    ("`ZO`, streamed, `master: wire`", "OPT-6.7B", OPT, "h200_zo_targets.jsonl", "6.7b.streamed", "20261115T180412Z"),
    ("`LOMO`, streamed", "LLaMA-13B", LLAMA, "h200_lomo.jsonl", "streamed/13b-24gb", ""),
    ("`LOMO`, streamed", "LLaMA-30B", LLAMA, "h200_lomo.jsonl", "streamed/30b-24gb", ""),
    ("`ZO`, streamed, `master: wire`", "OPT-30B", OPT, "h200_zo_targets.jsonl", "30b.capped", ""),
    (
        "`ZO`, streamed as fp8, `master: wire`",
        "OPT-66B",
        OPT,
        "h200_zo_targets.jsonl",
        "66b.capped.fp8",
        "20261115T145440Z",
    ),
    (
        "`ZO`, streamed as bf12, `master: wire`",
        "LLaMA-70B",
        "16 x 128",
        "h200_recipes.jsonl",
        "zo_70b_24gb_bf12",
        "",
    ),
    ("`AdamW` on LoRA, base streamed as NF4", "LLaMA-70B", LLAMA, "h200_adapter.jsonl", "70b/nf4-16gb", ""),
    (OFFLOADED, "LLaMA-70B", "2 x 1,024", "h200_adapter.jsonl", "70b/nf4-8gb-inputs", ""),
    (OFFLOADED, "OPT-175B", OPT, "h200_adapter.jsonl", "175b/nf4-12gb-inputs", ""),
    ("`ZO` on LoRA, base streamed as NF4", "OPT-175B", OPT, "h200_adapter.jsonl", "175b/nf4-zo-12gb", ""),
]


def figures_of(row: dict[str, Any]) -> tuple[str, str, str]:
    """GPU memory, host memory and speed as pages write them."""
    host = host_gb(row) or 0.0
    speed = row.get("tokens_per_s_mean") or row["tokens_per_s"]
    return f"{row['peak_gb']:.1f} GB", f"{host:.0f} GB" if host >= 100 else f"{host:.1f} GB", f"{speed:,.0f}"


@pytest.mark.parametrize("line", SPEED, ids=lambda line: f"{line[0]} {line[1]}")
def test_memory_and_speed_are_of_a_row(line: tuple[str, ...]) -> None:
    method, model, tokens, file, case, run = line
    gpu, host, speed = figures_of(row_of(file, case, run))
    cells = next(row for row in speeds_of(CHOOSE) if row[:2] == [method, f"{model}, {tokens}"])
    assert cells[2].split(",")[0] == gpu
    assert cells[3] in (host, "")
    assert cells[4] == speed


def test_every_line_of_the_table_of_speeds_is_compared() -> None:
    shown = [row[:2] for row in speeds_of(CHOOSE)]
    assert shown == [[method, f"{model}, {tokens}"] for method, model, tokens, *_ in SPEED]


SCORES = {
    # method in the README: file, method, learning rate
    "untrained": ("h200_accuracy.jsonl", "zero-shot", None),
    "AdamW": ("h200_accuracy.jsonl", "adamw", 1e-4),
    "LoRA": ("h200_accuracy.jsonl", "lora", 2e-3),
    "AdaLOMO": ("h200_accuracy.jsonl", "adalomo", 5e-4),
    "LSP": ("h200_lsp_learned.jsonl", "lsp-512-dense", 1e-4),
    "LOMO": ("h200_accuracy.jsonl", "lomo", 1e-1),
    "ZO": ("h200_accuracy.jsonl", "zo-bf16", 1e-5),
}


def scores_of(file: str, method: str, lr: float | None) -> list[str]:
    """Mean scores over seeds, a cell for each task."""
    cells = []
    for task in ("sst2", "rte", "boolq"):
        wanted = (method, task, lr, "SmolLM2-135M")
        found = [r["after"] for r in rows_of(file) if (r["method"], r["task"], r["lr"], r["model"]) == wanted]
        cells.append(f"{100 * mean(found):.1f}")
    return cells


def test_figures_of_the_readme_are_those_of_rows() -> None:
    """The table is a selection of that of docs/choose.md, which the tests above compare with rows."""
    speeds = {row[4]: row for row in speeds_of(CHOOSE)}
    shown = [row for row in tables_of(README) if row[1].endswith(" GB")]
    assert [row[0].partition(":")[0] for row in shown] == ["8B", "30B", "70B", "175B"]
    for _, gpu, host, speed, _ in shown:
        assert [gpu, host] == speeds[speed][2:4]
    head = README.partition("\n![")[0]
    near = [(round(float(gpu.split()[0])), round(float(host.split()[0]))) for _, gpu, host, *_ in shown]
    assert near[1:] == [(21, 66), (7, 44), (11, 107)]
    assert "7 GB of GPU and 44 GB" in " ".join(head.split()) and "21 and 66" in head and "12 and 107" in head


def test_speeds_that_the_readme_compares_are_of_rows() -> None:
    text = " ".join(README.split())
    run = "20261115T093417Z"
    ours, other = (row_of("h200_lomo.jsonl", f"speed/{name}", run) for name in ("adalomo", "peer_adalomo"))
    assert f"takes {1e3 * ours['step_s']:.0f} ms a step, and {1e3 * other['step_s']:.0f} by the package" in text
    run = "20261117T050307Z"
    ours, other = (row_of("h200_adapter.jsonl", f"7b/nf4-{name}", run) for name in ("streamed", "bitsandbytes"))
    said = "makes {:,.0f} tokens/s in {:.1f} GB, and bitsandbytes with the base on the GPU {:,.0f} in {:.1f} GB."
    assert said.format(*(row[key] for row in (ours, other) for key in ("tokens_per_s", "peak_gb"))) in text
    gpu, host, speed = figures_of(row_of("lean/held-7b-24gb/rows.jsonl", "zero2-offload-bf16", ""))
    assert f"ZeRO-Offload makes {speed} in {gpu} and {host} of host memory" in text


def test_scores_of_the_readme_are_those_of_rows() -> None:
    head, *lines = [row for row in tables_of(README) if len(row) == 8 and row[1] != "---"]
    scores = [scores_of(*SCORES[name]) for name in head[1:]]
    assert [row[0] for row in lines] == ["SST-2", "RTE", "BoolQ"]
    assert [row[1:] for row in lines] == [list(task) for task in zip(*scores, strict=True)]


def test_the_picture_of_the_readme_is_drawn_from_rows_and_legible_on_a_phone() -> None:
    kept = (REPO / "docs" / "pictures" / "front_page.svg").read_text(encoding="utf-8")
    assert front_page.draw() == kept, "run: python -m benchmarks.front_page --draw docs/pictures/front_page.svg"
    assert "(docs/pictures/front_page.svg)" in README
    assert 24 * 360 / front_page.WIDTH >= 11 and "font: 24px" in kept and "fill: #ffffff" in kept
    bars = front_page.bars()
    assert len(bars) == len(front_page.SIZES) * len(front_page.NAMES) and bars["7B/zero-offload"].starts_larger
    row = front_page.planned_row("30B/lora")
    kept_row = next(r for r in rows_of(front_page.PLANNED) if r["case"] == "30B/lora")
    assert row == {**kept_row, **{key: pytest.approx(kept_row[key], rel=0.02) for key in ("peak_gb", "host_peak_gb")}}


def test_saves_cost_what_the_page_says() -> None:
    file, page = "h200_checkpoint_speed.jsonl", (REPO / "docs" / "checkpoints.md").read_text(encoding="utf-8")
    kept = {
        run: row_of(file, "opt-6.7b/zo-async", run)["tokens_per_s"] / row_of(file, "opt-6.7b/zo", run)["tokens_per_s"]
        for run in ("20261115T130850Z", "20261115T085025Z")
    }
    in_memory, on_disk = kept.values()
    assert f"OPT-6.7B streamed kept {in_memory:.2f} of its tokens/s" in page
    speed = row_of(file, "disk", "20261115T085025Z")["disk_gbps"]
    assert f"On a disk of {speed:.1f} GB/s it kept {on_disk:.2f}" in page
