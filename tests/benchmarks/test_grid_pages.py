"""Blocks of two grids, from made-up rows; and the command that takes a session's rows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import adopt, grid_pages, pages
from ds_zo.records.rows import Row


def write(path: Path, rows: list[Row]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def timed(method: str, lr: float, seed: int, looks: list[tuple[float, float]], commit: str = "c") -> Row:
    """A run whose looks at dev are (seconds, perplexity)."""
    curve = [{"step": i + 1, "train_s": s, "dev": {"perplexity": value}} for i, (s, value) in enumerate(looks)]
    best = min(value for _, value in looks)
    row: Row = {"method": method, "lr": lr, "seed": seed, "status": "ok", "metric": "perplexity", "curve": curve}
    row["commit"] = commit
    return row | {"train_s": looks[-1][0], "dev": best, "after": best, "steps": 320, "batch_size": 4, "task": "alpaca"}


def test_equal_time_takes_the_better_rate_and_says_the_spread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grid_pages, "RESULTS", tmp_path)
    assert grid_pages.lsp_equal_time() == "" == grid_pages.lora_lomo_rates()
    lsp = [timed("lsp-512", 1e-4, seed, [(10, 7.0), (20, 6.0 + seed / 10)]) for seed in (0, 1)]
    worse = [timed("lsp-512", 5e-5, seed, [(10, 9.0), (20, 8.0)]) for seed in (0, 1)]
    zero = [timed("zero-offload", 5e-5, seed, [(15, 8.0), (40, 6.5 - seed)]) for seed in (0, 1)]
    other = [timed("lsp-512-dense", 5e-5, 0, [(1, 5.0)], commit="another")]
    write(tmp_path / grid_pages.EQUAL_TIME, [*worse, *lsp, *zero, *other, {"status": "crash", "method": "lsp-512"}])
    made = grid_pages.lsp_equal_time()
    assert "best dev perplexity in 20 s" in made and "320 steps of 4 texts" in made
    share = "0.50 (one seed); not reached with 1 of 2 seeds"
    assert f"| 0.0001 | 5e-05, 0.0001 | 20 (20 to 20) | 6.05 (6.00 to 6.10) | 6.05 (6.00 to 6.10) | {share} |" in made
    assert "| ZeRO-Offload | 5e-05 | 5e-05 | 40 (40 to 40) | 8.00 (8.00 to 8.00) | 6.00 (5.50 to 6.50) |  |" in made
    assert "| LSP, d = 512, embedding whole | 5e-05 | 5e-05 |  |  | 5.00 (one seed) |  |" in made
    assert "Runs of another commit, on another machine, have none here." in made


def adapted(method: str, lr: float, seed: int, dev: float, after: float, rank: int = 4) -> Row:
    row: Row = {"method": method, "lr": lr, "seed": seed, "dev": dev, "after": after, "lora_rank": rank}
    return row | {"status": "ok", "steps": 120, "batch_size": 16, "metric": "accuracy"}


def test_lora_beside_lomo_has_as_many_rates_and_says_where_it_loses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grid_pages, "RESULTS", tmp_path)
    rows = [adapted("lora", 5e-4, seed, 0.60, 0.99) for seed in (0, 1)]
    rows += [adapted("lora", 2e-3, seed, 0.64, 0.62 + seed / 100) for seed in (0, 1)]
    rows += [adapted("lora+lomo-0.0005", 5e-3, seed, 0.65, 0.60) for seed in (0, 1)]
    rows += [adapted("lora+lomo-0.002", 5e-3, seed, 0.61, 0.90) for seed in (0, 1)]
    rows += [adapted("lora", 2e-3, 0, 0.6, 0.6, 8), adapted("lora+lomo-0.002", 5e-3, 0, 0.6, 0.7, 8)]
    write(tmp_path / grid_pages.LORA_RATES, rows)
    made = grid_pages.lora_lomo_rates()
    line = "| 4 | 62.5 (62.0 to 63.0) at 0.002 | 60.0 (60.0 to 60.0) at 0.0005 | -2.5 (-3.0 to -2.0) |"
    assert line in made and "| 8 | 60.0 (one seed) at 0.002 | 70.0 (one seed) at 0.002 | +10.0 (one seed) |" in made
    assert "LoRA + LOMO is better than LoRA alone at rank 8; worse at rank 4." in made


def test_a_block_without_rows_leaves_nothing_on_the_page(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(pages.BLOCKS, "lsp-equal-time", lambda: "")
    empty = "<!-- rows: lsp-equal-time -->\n<!-- /rows -->\n"
    assert pages.filled(empty.replace("\n<!-- /", "\n\nold\n\n<!-- /")) == empty == pages.filled(empty)


def test_a_session_is_taken_once_and_without_what_did_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made: list[Any] = []
    monkeypatch.setattr(adopt, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(adopt, "write_headline", made.append)
    monkeypatch.setattr(pages, "main", made.append)
    (tmp_path / "results").mkdir()

    def row(case: str, status: str = "ok", run: str = "r") -> Row:
        return {"run_id": run, "case": case, "status": status, "params": {"contender": case}}

    session = tmp_path / "session"
    assert adopt.main([str(session)]) == 1 and "which has none of them" in capsys.readouterr().err
    later = [row("lomo", run="s"), row("zero2-offload", run="s")]
    mine = [row("lomo"), row("zero2-offload-bf16", "oom"), row("lsp", "not run")]
    write(session / "lean-7b/rows.jsonl", [*mine, *later])
    write(session / "bound/rows.jsonl", [row("zero2-offload-bf16")])
    write(session / "zo_paper.jsonl", [{"case": "t1", "status": "ok"}])
    for _ in range(2):
        assert adopt.main([str(session)]) == 0
    lean = (tmp_path / "results/lean/lean-7b/rows.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(line)["case"] for line in lean] == ["lomo", "zero2-offload-bf16"]
    assert len((tmp_path / "results/h200_zo_paper.jsonl").read_text(encoding="utf-8").splitlines()) == 1
    assert not (tmp_path / "results/lean/bound").exists() and "lacks our methods" in capsys.readouterr().err
    other = json.loads((tmp_path / "results/lean/lean-7b-s/rows.jsonl").read_text(encoding="utf-8").splitlines()[1])
    assert other["case"] == "zero2-offload", "a table has rows of one run"
    assert made == [[tmp_path / "results/lean"], []] * 2
