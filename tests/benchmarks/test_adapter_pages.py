"""The blocks of docs/adapters.md: nothing without rows, and what rows say with them. The repeated block of its speed
cases."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import adapter_pages, pages
from benchmarks.adapter_speed import CASES, AdapterCase, _repeat_first_block, cases_of
from ds_zo.ops import nf4
from ds_zo.records.rows import append_row


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(adapter_pages, "RESULTS", tmp_path)
    return tmp_path


def test_blocks_are_empty_without_rows(results: Path) -> None:
    assert [block() for block in adapter_pages.ADAPTER_BLOCKS.values()] == ["", "", ""]
    assert adapter_pages.ADAPTER_BLOCKS.keys() <= pages.BLOCKS.keys()


def test_speed_has_a_line_for_each_row_by_run(results: Path) -> None:
    common = {"batch": 1, "length": 2048, "peak_gb": 22.5, "host_peak_gb": 99.0}
    plan = {"planned_device_gb": 22.4, "planned_host_gb": 99.3}
    for run, speed in (("s", 500.0), ("r", 812.4)):
        row = {"case": "175b/nf4-zo-24gb", "status": "ok", "tokens_per_s": speed, "link_busy": 0.951, "run_id": run}
        append_row(results / adapter_pages.SPEED, row | common | plan)
    append_row(results / adapter_pages.SPEED, {"case": "7b/bf16-peft", "status": "oom"})
    append_row(results / adapter_pages.SPEED, {"case": "7b/nf4-bitsandbytes", "status": "ok", "why": "not installed"})
    found = adapter_pages.adapter_speed()
    lines = [line for line in found.splitlines() if line.startswith("| OPT")]
    assert lines[0] == "| OPT-175B, ZO, NF4, within 24 GB | 1 x 2,048 | 812 | 22.5 (22.4) | 99.0 (99.3) | 95% | 1 |"
    assert found.count("\n| ") == 4, "a head, a rule, and two rows with numbers"
    assert ", runs r, s. Made by `python -m benchmarks.adapter_speed --out rows.jsonl`.\n\n</details>" in found


def test_every_case_has_a_name_and_makes_the_same_case_again() -> None:
    assert adapter_pages.NAMES.keys() == CASES.keys()
    for case in cases_of():
        assert AdapterCase(**case.params) == CASES[case.name].case


def test_loss_beside_bitsandbytes_and_bf16(results: Path) -> None:
    for form, loss in (("bf16", 3.0), ("nf4", 3.06), ("bitsandbytes", 3.06)):
        row = {"model": "M", "task": "sst2", "form": form, "loss": loss, "texts": 4}
        append_row(results / adapter_pages.LOSS, row)
    assert "| M | SST-2, 4 texts | 3.0000 | 3.0600 | 3.0600 | +0.00% | +2.00% |" in adapter_pages.nf4_loss()


def test_training_compares_seeds_that_both_have(results: Path) -> None:
    def add(method: str, task: str, seed: int, after: float, loss: float, lr: float = 1e-3) -> None:
        row: dict[str, Any] = {"model": "M", "method": method, "task": task, "seed": seed, "lr": lr, "steps": 120}
        row |= {"status": "ok", "after": after, "dev": after, "loss_last": loss, "key": f"{method}{task}{seed}{lr}"}
        row |= {"metric": "perplexity" if task == "alpaca" else "accuracy"}
        append_row(
            results / adapter_pages.TRAINING,
            row | {"curve": [{"step": 60, "train_s": 1.0, "loss": 9.0}, {"step": 120, "train_s": 2.0, "loss": loss}]},
        )

    add("lora", "sst2", 0, 0.90, 0.5)
    add("lora", "sst2", 1, 0.92, 0.5)
    add("lora-nf4", "sst2", 0, 0.91, 0.51)
    add("zo-lora", "sst2", 0, 0.5, 1.0, lr=3e-4)
    add("zo-lora", "sst2", 0, 0.7, 1.0)
    add("zo-lora-nf4", "sst2", 0, 0.69, 1.0)
    found = adapter_pages.nf4_training()
    assert "| M | LoRA by AdamW | SST-2 | 120 | 1 | 90.0 | 91.0 | +1.0 points | +2.00% |" in found
    assert "| M | LoRA by ZO | SST-2 | 120 | 1 | 70.0 | 69.0 | -1.0 points | +0.00% |" in found


def test_a_repeated_block_has_the_values_of_the_first() -> None:
    model: Any = AdapterCase("opt-tiny", "zo", length=8).lazy_model(torch.device("cpu"))
    draw = model._ds_zo_source
    _repeat_first_block(model)
    read, name = model._ds_zo_source, "model.decoder.layers.{}.fc1.weight"
    packed, absmax = nf4.quantise(draw(name.format(0)))
    found = read(name.format(1))
    assert torch.equal(found.packed, packed) and torch.equal(found.absmax, absmax) and found.shape == (256, 64)
    assert torch.equal(read("model.decoder.layers.1.fc1.bias"), draw("model.decoder.layers.1.fc1.bias"))
