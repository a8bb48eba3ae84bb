"""The harness where it matters: children forked from a warm parent, a capped card, the profiler, all contenders."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ds_zo.bench.runner import read_rows

pytestmark = pytest.mark.gpu

REPO = Path(__file__).parents[2]
SCRIPT = """
import json, sys
from ds_zo.bench.runner import Case, run_cases
cases = [Case(name, "bench_targets:" + target, params) for name, target, params in CASES]
rows = run_cases(cases, out=None, min_free_host_gib=0.5)
print(json.dumps(rows))
"""


def run_in_warm_parent(run_python: Callable[..., str], cases: list[Any]) -> list[dict[str, Any]]:
    path = os.pathsep.join(filter(None, (str(REPO), str(Path(__file__).parent), os.environ.get("PYTHONPATH"))))
    script = SCRIPT.replace("CASES", repr(cases))
    output = run_python(script, PYTHONPATH=path, PYTORCH_NVML_BASED_CUDA_CHECK=1)
    rows: list[dict[str, Any]] = json.loads(output.splitlines()[-1])
    return rows


def test_forked_children_use_cuda_and_a_capped_card_refuses(run_python: Callable[..., str]) -> None:
    cases = [(f"{gb} GB", "allocate_on_gpu", {"gb": gb, "cap_gb": 2.0}) for gb in (1.0, 3.0, 1.5)]
    rows = run_in_warm_parent(run_python, cases)
    assert [row["status"] for row in rows] == ["ok", "oom", "ok"], rows
    assert rows[0]["free_gb"] == pytest.approx(1.0, abs=0.05), "DeepSpeed sees the smaller card too"
    assert not rows[0]["has_arguments"], "a fresh interpreter was started: the parent had touched CUDA"
    assert all(row["gpu"] for row in rows)


def test_the_profiler_counts_bytes_each_way_and_copies_alone(run_python: Callable[..., str]) -> None:
    [row] = run_in_warm_parent(run_python, [("copies", "copy_and_compute", {})])
    assert row["status"] == "ok", row
    assert row["up_gb"] == pytest.approx(0.064, rel=0.02)
    assert row["down_gb"] == pytest.approx(0.016, rel=0.02)
    assert 0 < row["copy_exposed_s"] <= row["gpu_copy_s"]
    assert row["gpu_compute_s"] > 0


@pytest.mark.slow
def test_contenders_run_on_a_gpu_from_equal_weights(tmp_path: Path) -> None:
    names = ["adamw", "sgd", "zero2-offload", "zero3-offload-param", "zo-streamed", "lomo", "lsp"]
    command = [sys.executable, str(REPO / "launch" / "compare.py"), "--model", "random:llama-125m", "--layers", "3"]
    command += ["--batch", "2", "--seq", "128", "--steps", "4", "--warmup", "2", "--device-memory-gb", "12"]
    command += ["--contenders", ",".join(names), "--min-free-host-gib", "1", "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=580)
    assert done.returncode == 0, done.stderr[-3000:]
    rows = {row["case"]: row for row in read_rows(tmp_path / "rows.jsonl")}
    failed = {name: row["error"] for name, row in rows.items() if row["status"] != "ok"}
    assert not failed
    assert rows["machine"]["link_gbps"]["up"] > 1
    first = [rows[name]["losses"][0] for name in names]
    assert first == pytest.approx([first[0]] * len(names), abs=0.03)
    assert all(0 < rows[name]["peak_gb"] <= rows[name]["peak_reserved_gb"] <= 12 for name in names)
    assert rows["zo-streamed"]["peak_gb"] < rows["adamw"]["peak_gb"]
    assert rows["zo-streamed"]["up_gb"] > 0.02 > rows["adamw"]["up_gb"]
    assert "<svg" in (tmp_path / "report.html").read_text()
