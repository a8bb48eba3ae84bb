"""The papers' pages: ratios are of one run, a cut model is no measurement of the whole one, a gap is said."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from benchmarks import paper_pages
from ds_zo.records.rows import Row


def row(case: str, run: str, tokens_per_s: float, **more: Any) -> Row:
    found = {"case": case, "run_id": run, "status": "ok", "tokens_per_s": tokens_per_s, "peak_gb": 2.0}
    return found | {"layers": 24, "full_layers": 24, **more}


def write(folder: Path, file: str, rows: list[Row]) -> None:
    (folder / file).parent.mkdir(parents=True, exist_ok=True)
    (folder / file).write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(paper_pages, "RESULTS", tmp_path)
    monkeypatch.setattr(paper_pages, "LEAN", tmp_path / "lean")
    return tmp_path


def test_without_rows_every_block_says_so(results: Path) -> None:
    for name, block in paper_pages.PAPER_BLOCKS.items():
        if name == "stock-7b":  # it falls back to rows of the head to head
            continue
        made = block()
        assert name in ("paper-zo-6", "paper-zo-10") or "ot measured" in made, name
        assert "None" not in made and "nan" not in made


def test_a_line_is_of_the_newest_run_that_has_all_of_it_at_full_depth(results: Path) -> None:
    old = [row("t1.1.3b.fp16.mezo", "1", 1000.0), row("t1.1.3b.fp16.zo", "1", 1500.0)]
    cut = [row("t1.1.3b.fp16.mezo", "2", 9000.0, layers=4), row("t1.1.3b.fp16.zo", "2", 9000.0, layers=4)]
    half = [row("t1.1.3b.fp16.zo", "3", 7000.0), row("t1.66b.fp16.zo", "3", 300.0)]
    write(results, "h200_zo_targets.jsonl", [*old, *cut])
    write(results, "h200_zo_full.jsonl", half)
    made = paper_pages.zo_1()
    assert "| OPT-1.3B, fp16 | 4.9 / 2.0 | 2.7 / 2.0 | 6,788 / 1,000 | 6,788 / 1,500 | 1.00 / 1.50 |" in made
    assert "| OPT-66B, fp16 | out of memory / not measured | 14.1 / 2.0 |" in made
    assert made.endswith("runs 1, 3.")
    ablation = [row("t2.13b.1.all", "4", 400.0), row("t2.13b.1.no_overlap", "4", 100.0), row("t2.13b.mezo", "4", 200.0)]
    write(results, "h200_zo_full.jsonl", ablation)
    assert "| OPT-13B | 0.39 / 0.25 | 0.38 / not measured | 0.73 / not measured | 1.00 / 2.00 |" in paper_pages.zo_2()


def test_figures_5_and_6_are_of_one_link(results: Path) -> None:
    apart = {"rest_s": 0.2, "exposed_cpu_s": 0.1, "apart_step_s": 0.3, "exposed_spread_s": 0.01}
    ours = row("figure5/10/gpt2-774m/lsp-512", "1", 600.0, **apart, exposed_copy_s=0.0)
    other = row("figure5/10/gpt2-774m/zero2-offload", "1", 200.0, **apart)
    write(results, "h200_lsp_figure5.jsonl", [ours, other])
    gap = " not measured |"
    assert f"| 2.03 |{gap}{gap}{gap}{gap} 3.00 |{gap}" in paper_pages.lsp_5()
    made = paper_pages.lsp_6()
    assert "| gpt2-774m, lsp-512 | 10 GB/s | 200 | 0 | 100 | 300 | 10 |" in made
    assert "| gpt2-774m, zero2-offload | 10 GB/s | 200 |  | 100 | 300 | 10 |" in made


def test_a_head_to_head_in_the_least_memory_has_settings_and_spread(results: Path) -> None:
    committed = Path(paper_pages.__file__).parent / "results" / "compare" / "llama-1.3b" / "24gb" / "rows.jsonl"
    (results / "lean" / "a").mkdir(parents=True)
    shutil.copy(committed, results / "lean" / "a" / "rows.jsonl")
    made = paper_pages.lean()
    assert "llama-1.3b with random weights, 4 x 1024 tokens, bf16, GPU memory capped at 24 GB:" in made
    assert "| zero2-offload | " in made and " steps) | " in made and "DeepSpeedCPUAdam on all cores |" in made
    assert "In this run, tokens/s as a multiple of zenflow's: zo " in made


def test_stock_deepspeed_of_7b_is_that_of_the_low_memory_run(results: Path) -> None:
    figures = {"tokens_per_s_mean": 1000.4, "peak_gb": 17.4, "host_peak_gb": 75.0, "params": {"contender": "x"}}
    rows = [row(name, "r", 1.0, **figures) for name in ("lomo", "zero2-offload-bf16")]
    write(results, "compare/llama-7b/uncapped/rows.jsonl", rows[:1])
    assert "on the card as it is, run r: LOMO 1,000 tokens/s, 17.4 GB of GPU and 75.0 GB" in paper_pages.stock_7b()
    write(results, "lean/held-7b-24gb/rows.jsonl", rows)
    made = paper_pages.stock_7b()
    assert "steps within 24 GB, run r: ZeRO-Offload (stage 2), bf16 states 1,000 tokens/s" in made
    assert made.endswith("started on the whole card: the limit holds for its steps.")
