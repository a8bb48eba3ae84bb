"""The papers' pages: ratios are of one run, a cut model is no measurement of the whole one, a gap is said."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from benchmarks import paper_pages
from ds_zo.records.rows import Row


def row(case: str, run: str, tokens_per_s: float, **more: Any) -> Row:
    step_s = 2048 / tokens_per_s
    found = {"case": case, "run_id": run, "status": "ok", "tokens_per_s": tokens_per_s, "peak_gb": 2.0}
    found |= {"step_s": step_s, "step_s_min": step_s / 2, "step_s_max": 2 * step_s, "seconds": [step_s] * 3}
    return found | {"layers": 24, "full_layers": 24, "shape": "s", "batch": 1, "length": 2048, **more}


def write(folder: Path, file: str, rows: list[Row]) -> None:
    (folder / file).parent.mkdir(parents=True, exist_ok=True)
    (folder / file).write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(paper_pages, "RESULTS", tmp_path)
    return tmp_path


def test_without_rows_every_block_says_so(results: Path) -> None:
    for name, block in paper_pages.PAPER_BLOCKS.items():
        made = block()
        assert name in ("paper-zo-6", "paper-zo-10") or "ot measured" in made, name
        assert "None" not in made and "nan" not in made


def test_a_line_is_of_the_newest_run_that_has_all_of_it_at_full_depth(results: Path) -> None:
    old = [row("t1.1.3b.fp16.mezo", "1", 1000.0), row("t1.1.3b.fp16.zo", "1", 1500.0)]
    cut = [row("t1.1.3b.fp16.mezo", "2", 9000.0, layers=4), row("t1.1.3b.fp16.zo", "2", 9000.0, layers=4)]
    half = [row("t1.1.3b.fp16.zo", "3", 7000.0), row("t1.66b.fp16.zo", "3", 300.0)]
    write(results, "h200_zo_targets.jsonl", [*old, *cut])
    write(results, "h200_zo_paper.jsonl", half)
    made = paper_pages.zo_1()
    speeds = "6,788 / 1,000 (500 to 2,000, 3) | 6,788 / 1,500 (750 to 3,000, 3) | 1.00 / 1.50 (0.38 to 6.00)"
    assert f"| OPT-1.3B, fp16 | 4.9 / 2.0 | 2.7 / 2.0 | {speeds} |" in made
    assert "| OPT-66B, fp16 | out of memory / not measured | 14.1 / 2.0 |" in made
    assert ", runs 1, 3. Made by `python -m benchmarks.zo_speed preset paper --only '^t1\\.' --out rows.jsonl`." in made
    narrow = row("t1.66b.fp8.zo", "3", 400.0)
    needs = row("t1.175b.fp16.mezo.whole", "3", 1.0) | {"needs_gb": 349.2, "tokens_per_s": None}
    skipped = {"case": "t1.175b.fp16.zo.whole", "run_id": "3", "status": "skipped"}
    skipped |= {"error": "not run: planned 367.3 of 129.2 GB of host memory"}
    write(results, "h200_zo_paper.jsonl", [narrow, needs, skipped])
    made = paper_pages.zo_1()
    assert "| OPT-66B, fp16, our ZO with blocks in fp8 | out of memory / not measured | 14.1 / 2.0 |" in made
    write(results, "h200_zo_paper.jsonl", [narrow, row("t1.66b.fp16.mezo", "3", 200.0), needs, skipped])
    assert "| 273 / 400 (200 to 800, 3) |  / 2.00 (0.50 to 8.00) |" in (made := paper_pages.zo_1())
    large = "out of memory / would take 349 GB | 24.7 / would take 367 GB of host memory | out of memory / not run"
    assert f"| OPT-175B, fp16 | {large} | 37 / not run |  |" in made
    ablation = [row("t2.13b.1.all", "4", 400.0), row("t2.13b.1.no_overlap", "4", 100.0)]
    ablation += [row("t1.13b.fp16.mezo", "4", 200.0), row("t1.13b.fp16.zo", "4", 800.0)]
    write(results, "h200_zo_paper.jsonl", [*ablation, row("t2.13b.auto.no_overlap", "4", 600.0)])
    gap, chosen = "0.38 / not measured | 0.73 / not measured", " / 0.75 (0.19 to 3.00)"
    line = f"| OPT-13B | 0.39 / 0.25 (0.06 to 1.00) | {gap} | 1.00 / 2.00 (0.50 to 8.00) | {chosen} |  |"
    assert line in paper_pages.zo_2()


def test_tables_7_and_8_set_an_input_beside_the_same_of_mezo(results: Path) -> None:
    def measured(name: str, batch: int, speed: float) -> Row:
        return row(name, "1", speed) | {"batch": batch, "length": 2048}

    points = [measured("", batch, 100.0) for batch in (1, 2)]
    mezo = row("t78.1.3b.mezo", "1", 100.0) | {
        "points": [{key: point[key] for key in point if key != "run_id"} for point in points]
    }
    ours = [measured("t1.1.3b.fp16.zo", 1, 120.0), measured("t78.1.3b.zo.2x2048", 2, 150.0)]
    write(results, "h200_zo_paper.jsonl", [mezo, *ours])
    made = paper_pages.zo_7_8()
    assert "| OPT-1.3B, 1 x 2,048 | 9.1 / 2.0 | 4.4 / 2.0 | 1.00 / 1.20 (0.30 to 4.80) |" in made
    assert "| OPT-1.3B, 2 x 2,048 | 10.8 / 2.0 | 6.6 / 2.0 | 1.00 / 1.50 (0.38 to 6.00) |" in made


def test_table_6_takes_a_size_from_the_run_that_has_it(results: Path) -> None:
    def run(name: str, size: str, folder: str, saved: float) -> list[Row]:
        disk = {"case": "disk", "run_id": name, "status": "ok", "params": {"folder": folder}, "disk_gbps": 2.0}
        found = [row(f"opt-{size}/zo", name, 100.0), row(f"opt-{size}/zo-async", name, saved)]
        return [disk, *(case | {"seconds": []} for case in found)]

    rows = [*run("1", "6.7b", "runs", 20.0), *run("2", "1.3b", "runs", 40.0), *run("3", "1.3b", "/dev/shm/runs", 90.0)]
    write(results, "h200_checkpoint_speed.jsonl", rows)
    made = paper_pages.zo_6()
    assert re.search(r"OPT-6.7B, disk, 2.0 GB/s \| .* \| 1.00 / 0.20 \| 1 \|", made)
    assert re.search(r"OPT-1.3B, disk, 2.0 GB/s \| .* \| 1.00 / 0.40 \| 2 \|", made)
    assert re.search(r"OPT-1.3B, tmpfs, 2.0 GB/s \| .* \| 1.00 / 0.90 \| 3 \|", made)
    assert re.search(r"OPT-6.7B, tmpfs \| .* \| 1.00 / not measured \|  \|", made)


def test_figures_5_and_6_are_of_one_link(results: Path) -> None:
    apart = {"rest_s": 0.2, "exposed_cpu_s": 0.1, "apart_step_s": 0.3, "exposed_spread_s": 0.01}
    apart |= {"shape": "gpt2-774m", "batch": 4, "length": 512}
    ours = row("figure5/gpt2-774m/lsp-512", "1", 600.0, shape="gpt2-774m", batch=4, length=512, link_gbps=None)
    other = ours | {"case": "figure5/gpt2-774m/zero2-offload", "tokens_per_s": 300.0}
    ours["links"] = {"10": {**apart, "tokens_per_s": 300.0, "exposed_copy_s": 0.0}}
    other["links"] = {"10": {**apart, "tokens_per_s": 100.0}}
    write(results, "h200_lsp_figure5.jsonl", [ours, other])
    gap = " not measured |"
    own, slow = "2.00 (0.50 to 8.00) |", "3.00 (0.75 to 12.00) |"
    assert f"| gpt2-774m, 4 x 512 | float32 | 2.03 | {own}{gap} {slow}" in paper_pages.lsp_5()
    made = paper_pages.lsp_6()
    assert " own " not in made
    assert "| gpt2-774m, 4 x 512, LSP | 10 GB/s | 200 | 0 | 100 | 300 | 10 | 1 |" in made
    assert "| gpt2-774m, 4 x 512, ZeRO-Offload | 10 GB/s | 200 |  | 100 | 300 | 10 | 1 |" in made


def test_lomo_beside_lora_says_where_seeds_overlap() -> None:
    lomo = {"rte": [0.5, 0.6], "sst2": [0.8, 0.9], "alpaca": [6.0, 6.2]}
    lora = {"rte": [0.7, 0.8], "sst2": [0.85, 0.95], "alpaca": [6.4, 6.6]}
    tasks = {"rte": "RTE", "sst2": "SST-2", "alpaca": "Alpaca"}
    made = paper_pages.lomo_lora({"lomo": lomo, "lora": lora}, tasks=tasks)
    assert "| RTE | 55.0% (50.0% to 60.0%) | 75.0% (70.0% to 80.0%) | LoRA |" in made
    assert "| Alpaca, perplexity | 6.10 (6.00 to 6.20) | 6.50 (6.40 to 6.60) | LOMO |" in made
    assert made.endswith("on RTE, and wins on Alpaca. The ranges of their seeds overlap on SST-2.")
