"""The blocks of Qwen2.5-Coder-1.5B: nothing without rows, and what rows say with them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks import pages, qwen_pages
from benchmarks.grids import GRIDS
from ds_zo.records.rows import append_row


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(qwen_pages, "RESULTS", tmp_path)
    return tmp_path


def row(method: str, task: str, seed: int, lr: float | None, **more: Any) -> dict[str, Any]:
    curve = [{"step": 30, "train_s": 5.0, "dev": {"x": 1}}, {"step": 60, "train_s": 10.0, "dev": {"x": 2}}]
    found = {"method": method, "task": task, "seed": seed, "lr": lr, "status": "ok", "steps": 60, "jobs": 9}
    found |= {"metric": "perplexity" if task == "alpaca" else "accuracy", "peak_device_gb": 30.04, "curve": curve}
    return {"key": f"{method}-{task}-{seed}-{lr}", "best_step": 60, "loss_last": 1.0, **found, **more}


def test_blocks_are_empty_without_rows(results: Path) -> None:
    assert qwen_pages.qwen_quality() == qwen_pages.qwen_code() == ""
    text = "# Page\n\n<!-- rows: qwen-code -->\nold\n<!-- /rows -->\n"
    assert pages.filled(text) == "# Page\n\n<!-- rows: qwen-code -->\n<!-- /rows -->\n"


def test_scores_at_the_rate_that_dev_chose(results: Path) -> None:
    for seed, lr, dev, after in ((0, 1e-5, 0.9, 0.91), (0, 3e-5, 0.8, 0.95), (1, 1e-5, 0.9, 0.93)):
        append_row(results / qwen_pages.QWEN, row("adamw", "sst2", seed, lr, dev=dev, after=after))
    append_row(results / qwen_pages.QWEN, row("adamw", "alpaca", 0, 1e-5, dev=5.0, after=4.5, best_step=30))
    append_row(
        results / qwen_pages.QWEN, row("zero-shot", "sst2", 0, None, dev=None, after=0.6, best_step=None, steps=0)
    )
    found = qwen_pages.qwen_quality()
    assert "| no training |  |  | 60.0 | – | – | 30.0 |" in found
    assert "| AdamW | 1e-5 | 60 | 92.0 (91.0 to 93.0), 10 s | – | 4.50, 5 s | 30.0 |" in found
    assert "up to 9 runs share the GPU" in found


def test_humaneval_takes_the_prompt_that_fits_better_without_training(results: Path) -> None:
    def add(method: str, task: str, seed: int, passed: float, perplexity: float, **more: Any) -> None:
        values = {"pass_at_1": passed, "num_problems": 164.0, "perplexity": perplexity}
        common = {"dev": 2.0, "dev_metric": "perplexity", "after": passed, "metric": "pass_at_1", "train_s": 20.4}
        lr = None if method == "zero-shot" else 1e-5
        append_row(
            results / qwen_pages.CODE,
            row(method, task, seed, lr, **{**common, "after_values": values, "data_digest": "abc", **more}),
        )

    add("zero-shot", "humaneval", 0, 0.3, 2.5)
    add("zero-shot", "humaneval-chat", 0, 0.5, 2.1)
    add("adamw", "humaneval-chat", 0, 0.5, 1.9)
    add("adamw", "humaneval-chat", 1, 0.6, 1.7)
    found = qwen_pages.qwen_code()
    assert "| no training |  |  |  | 30.0 | 2.100 | 50.0 (42.4 to 57.6) | 1 |" in found
    assert "| AdamW | 1e-5 | 60 | 20 | 30.0 | 1.800 | 55.0 (47.4 to 62.4) | 2 |" in found
    assert "Prompts are in its chat template." in found and "digest abc" in found
    add("lora", "humaneval-chat", 0, 0.5, 1.9, data_digest="other")
    with pytest.raises(ValueError, match=r"the same training data, found abc, other"):
        qwen_pages.qwen_code()


def test_every_method_of_the_grids_has_a_name() -> None:
    assert {*GRIDS["qwen"].methods, *GRIDS["qwen-code"].methods} == set(qwen_pages.NAMES)
