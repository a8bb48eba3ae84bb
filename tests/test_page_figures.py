"""Figures of the README and of docs/choose.md are those of rows in benchmarks/results."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from statistics import mean
from typing import Any

import pytest

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
    ("`LSP`, d = 512", "LLaMA-7B", LLAMA, "compare/llama-7b/24gb/rows.jsonl", "lsp", ""),
    ("`LSP`, d = 512, random projectors", "LLaMA-7B", LLAMA, "h200_lsp.jsonl", "capped/7b/4/lsp-512", ""),
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
    # method in the page: file, method, learning rate
    "zero-shot": ("h200_accuracy.jsonl", "zero-shot", None),
    "stock AdamW": ("h200_accuracy.jsonl", "adamw", 1e-4),
    "stock LoRA": ("h200_accuracy.jsonl", "lora", 2e-3),
    "`LOMO`": ("h200_accuracy.jsonl", "lomo", 1e-1),
    "`AdaLOMO`": ("h200_accuracy.jsonl", "adalomo", 5e-4),
    "`LSP`, d = 512": ("h200_lsp_learned.jsonl", "lsp-512-dense", 1e-4),
    "`LSP`, d = 512, random projectors": ("h200_lsp_learned.jsonl", "lsp-512-dense-random", 1e-4),
    "`ZO` in bf16": ("h200_accuracy.jsonl", "zo-bf16", 1e-5),
    "`ZO` in bf16, `master: wire`": ("h200_accuracy.jsonl", "zo-bf16-wire", 1e-5),
    "`ZO` in fp8": ("h200_accuracy.jsonl", "zo-fp8", 1e-5),
    "`ZO` in fp8, `master: wire`": ("h200_accuracy.jsonl", "zo-fp8-wire", 1e-5),
}


def scores_of(file: str, method: str, lr: float | None) -> list[str]:
    """Mean scores over seeds, a cell for each task."""
    cells = []
    for task in ("sst2", "rte", "copa", "boolq", "alpaca"):
        wanted = (method, task, lr, "SmolLM2-135M")
        found = [r["after"] for r in rows_of(file) if (r["method"], r["task"], r["lr"], r["model"]) == wanted]
        cells.append(f"{mean(found):.2f}" if task == "alpaca" else f"{100 * mean(found):.1f}")
    return cells


def test_every_line_of_the_table_of_scores_is_compared() -> None:
    shown = [row[0] for row in tables_of(CHOOSE) if len(row) == 7 and row[2][:1].isdigit()]
    assert shown == list(SCORES)


@pytest.mark.parametrize("name", SCORES)
def test_quality_is_of_rows(name: str) -> None:
    file, method, lr = SCORES[name]
    cells = next(row for row in tables_of(CHOOSE) if row[0] == name and len(row) == 7)
    assert cells[2:] == scores_of(file, method, lr)
    assert (float(cells[1]) if cells[1] else None) == lr


def test_figures_of_the_readme_are_those_of_the_page() -> None:
    """The README has a selection of the page's figures, which the tests above compare with rows."""
    speeds = {row[4]: row for row in speeds_of(CHOOSE)}
    shown = re.findall(r"((?:[\d.]+ GB, )+)([\d,]+) tokens/s", README)
    assert len(shown) >= 6
    for memory, speed in shown:
        row = speeds[speed]
        found = memory.removesuffix(", ").split(", ")
        assert found == [row[2].split(",")[0], *([row[3]] if row[3] else [])], (memory, speed)
    lean, stock = speeds["1,899"], speeds["1,293"]
    words = rf"takes {lean[2].split(',')[0]} .* and {lean[3]} of host memory for 1,899 tokens/s .* {stock[3]} and 1,293"
    assert lean[2] == stock[2] and re.search(words, " ".join(README.split()))
    pairs = {", ".join(row[2:4]) for row in tables_of(CHOOSE) if len(row) == 7}
    quality = re.findall(r"\b(\d\d\.\d, \d\d\.\d)\b", README)
    assert len(quality) >= 7
    assert set(quality) <= pairs


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
