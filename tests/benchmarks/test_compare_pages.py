"""Blocks from rows of `launch/compare.py`: settings, spread, ratios of one run, and the command of such rows."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import compare_pages, sources


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(compare_pages, "RESULTS", tmp_path)
    return tmp_path


def test_a_head_to_head_in_the_least_memory_has_settings_and_spread(results: Path) -> None:
    assert compare_pages.lean() == ""
    committed = (sources.RESULTS / "compare/llama-1.3b/24gb/rows.jsonl").read_text(encoding="utf-8")
    rows = results / "lean" / "a" / "rows.jsonl"
    rows.parent.mkdir(parents=True)
    rows.write_text(committed, encoding="utf-8")
    made = compare_pages.lean()
    setting = "llama-1.3b with random weights, 4 x 1024 tokens, bf16, GPU memory capped at 24 GB"
    assert made.startswith(f"One H200, {setting}, activations recomputed. ")
    assert (
        "| ZeRO-Offload (stage 2) | 5,110 | 807 (777 to 815, 4) | " in made
        and "DeepSpeedCPUAdam on all cores |" in made
    )
    assert (
        "In this run, mean tokens/s as a multiple of those of ZenFlow: ZO " in made
        and "; of SGD on the GPU: ZO 3.72 (" in made
    )
    assert "`python launch/compare.py --model random:llama-1.3b --batch 4 --contenders adamw,sgd,zero2-offload," in made


def test_the_command_has_the_settings_of_the_rows() -> None:
    (row,) = (r for r in sources.read_rows("lean/held-7b-24gb/rows.jsonl") if r["case"] == "zero2-offload-bf16")
    command = (
        "python launch/compare.py --model random:llama-7b --batch 4 --steps 10 --warmup 2 --max-s 30.0 --contenders"
    )
    limits = "--device-memory-gb 24 --start-uncapped --no-profile"
    made = compare_pages.compare_command([row], "runs/a")
    assert made == f"{command} zero2-offload-bf16 {limits} --out runs/a"
    divided = json.loads(json.dumps(row))
    divided["params"]["spec"]["accumulation"] = 2
    assert "--accumulate zero2-offload-bf16=2 --out" in compare_pages.compare_command([divided], "runs/a")
    assert "--best-batch --out" in compare_pages.compare_command([divided | {"tried": [{}]}], "runs/a")
    peer = compare_pages.compare_command([row, row | {"case": "zo2"}], "runs/a")
    assert peer.startswith("python -m benchmarks.peers zo2 --checkout DIR --python FILE --model random:llama-7b")
    assert "--contenders zero2-offload-bf16 " in peer
