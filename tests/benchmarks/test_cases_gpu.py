"""What the CPU cannot show of the speed suites: caps, a filled device, kernel rates, recorded steps, slowed links."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.speed import cases_of
from ds_zo.bench.runner import Case, run_cases

pytestmark = pytest.mark.gpu
CAPPED = {"master": "wire", "resident_blocks": 0, "device_memory_gb": 4.0}


def test_a_case_is_filled_within_its_cap_and_machine_facts_are_in_its_run() -> None:
    params = {"shape": "opt-1.3b", "layers": 8, "method": "zo", "stream": CAPPED, "cap_gb": 4.0, "fill_steps": 7}
    machine_case = Case("machine", "benchmarks.kernels:machine", {"numel": 2**24})
    case = Case("capped", "benchmarks.training_speed:measure", {**params, "steps": 13})
    machine, row = run_cases([machine_case, case], out=None)
    assert machine["status"] == row["status"] == "ok", (machine.get("error"), row.get("error"))
    assert row["resident_blocks"] == 0 and row["filled"]["resident_blocks"] > 0
    assert row["filled"]["up_gb_a_step"] < row["up_gb_a_step"]
    assert row["filled"]["peak_gb"] <= row["cap_gb"]
    assert row["up_gb_a_step"] / row["step_s"] / machine["link_gbps"]["up"] > 0
    assert machine["kernel_gparameters_per_s"]["bf16 replay 1 + perturb 1"] > 10


def test_a_streamed_step_is_recorded(tmp_path: Path) -> None:
    params = {"shape": "opt-1.3b", "method": "zo", "layers": 6, "stream": {"master": "wire", "resident_blocks": 0}}
    (row,) = run_cases([Case("timeline", "benchmarks.timeline:record", params)], out=None)
    assert row["status"] == "ok", row.get("error")
    assert {"upload", "forward", "noise"} <= {kind for _, kind, *_ in row["spans"]}
    assert all(0 <= start <= end <= row["step_s"] + 1e-9 for _, _, start, end in row["spans"])


def test_a_step_with_early_uploads_is_taken_apart_on_every_link() -> None:
    cases = [case for case in cases_of("lsp-figure5", tiny=True) if case.params.get("take_apart")]
    rows = run_cases(cases, out=None)
    assert [row["status"] for row in rows] == ["ok"] * 4, [row.get("error") for row in rows]
    for row in rows:
        for found in (row, *row["links"].values()):
            parts = found["rest_s"] + found.get("exposed_copy_s", 0.0) + found["exposed_cpu_s"]
            assert parts == pytest.approx(found["apart_step_s"])
