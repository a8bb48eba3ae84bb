"""The LSP bench: its cases run (on toy models), its table has their ratios."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters

from ds_zo.bench import lsp_cases
from ds_zo.bench.lsp_speed import PRESETS, cases_of, markdown
from ds_zo.engines import compiled_blocks


@pytest.mark.parametrize("preset", PRESETS)
def test_every_case_has_a_name_of_its_own_and_a_rehearsal(preset: str) -> None:
    cases, rehearsed = cases_of(preset), cases_of(preset, device="cpu", tiny=True)
    assert len({case.name for case in cases}) == len(cases) == len(rehearsed)
    assert all(case.params["overrides"]["hidden_size"] == 32 for case in rehearsed)
    assert all(case.params["device"] == "cuda" for case in cases)


@pytest.mark.usefixtures("single_process")
@pytest.mark.parametrize("name", ["breakdown/1.3b/4/lsp-512", "breakdown/1.3b/4/ceiling"])
def test_a_case_measures_speed_memory_and_parts(name: str) -> None:
    [case] = [case for case in cases_of("breakdown", device="cpu", tiny=True) if case.name == name]
    row = getattr(lsp_cases, case.target.partition(":")[2])(**case.params)
    assert row["tokens_per_s"] > 0 and row["parameters"] > 1000
    assert all(row[part] >= 0 for part in ("forward_s", "backward_s", "update_s", "first_step_s"))
    assert ("exposed_cpu_s" in row) == (row["method"] == "lsp")
    if row["method"] == "lsp":
        assert row["host_bytes"] > 0 and row["device_bytes"] > 0
        assert "8 x 8" in row["described"]


@pytest.mark.usefixtures("single_process")
def test_compiled_cases_compile_whoever_trains(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled_blocks, "BACKEND", "aot_eager_decomp_partition")
    cases = [case for case in cases_of("speed", device="cpu", tiny=True) if case.name.endswith("-compiled")]
    assert {case.name.rpartition("/")[0] for case in cases} == {"1.3b/4", "1.3b/1"}
    for case in cases[:2]:  # LSP: test_compiled_blocks
        counters.clear()
        row = lsp_cases.speed(**case.params)
        assert row["compiled"] and row["settings"].endswith("blocks compiled")
        assert counters["stats"]["calls_captured"] > 0
        torch._dynamo.reset()


def test_the_table_has_ratios_of_its_own_run() -> None:
    def row(case: str, speed: float, run_id: str = "b", **more: Any) -> dict[str, Any]:
        sizes = {"step_s": 1 / speed, "peak_gb": 1.0, "host_gb_added": 2.0, "first_step_s": 3.0}
        return {"case": case, "run_id": run_id, "status": "ok", "tokens_per_s": speed, **sizes, **more}

    rows = [
        row("1.3b/4/zero2-offload", 1.0, run_id="a"),
        row("1.3b/4/adamw", 400.0),
        row("1.3b/4/zero2-offload", 100.0),
        row("1.3b/4/lsp-512", 380.0, exposed_cpu_s=0.002),
        {"case": "1.3b/4/zenflow", "run_id": "b", "status": "timeout", "error": "late"},
    ]
    lines = markdown(rows).splitlines()
    [ours] = [line for line in lines if "lsp-512" in line]
    assert "3.80 x | 0.95 x" in ours and "| 2.0 |" in ours
    assert any("timeout: late" in line for line in lines)
    assert markdown([]) == "No rows."
