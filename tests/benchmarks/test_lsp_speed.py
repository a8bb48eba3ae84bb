"""The LSP bench: its cases run on toy models."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters

from benchmarks import lsp_parts
from benchmarks.speed import cases_of
from benchmarks.training_speed import measure
from ds_zo.backends.recompute import compiled_blocks


def rehearsed(suite: str, name: str) -> dict[str, Any]:
    return next(case.params for case in cases_of(suite, device="cpu", tiny=True) if case.name == name)


@pytest.mark.usefixtures("single_process")
@pytest.mark.parametrize("name", ["lsp-512", "lsp-none", "ceiling", "adamw-torch"])
def test_a_case_measures_both_batches_memory_and_parts(name: str) -> None:
    row = measure(**rehearsed("lsp", f"issue/1.3b/4+1/{name}"))
    four, one = row, {**row, **row["then"]}
    for found, batch in ((four, 2), (one, 1)):
        assert found["batch"] == batch and found["parameters"] > 1000
        assert found["tokens_per_s"] == pytest.approx(16 * batch / found["step_s"])
        assert all(found[part] >= 0 for part in ("forward_s", "backward_s", "update_s", "first_step_s"))
    assert four["seconds"] != one["seconds"]
    if name == "adamw-torch":
        assert four["losses"][-1] < four["losses"][0]
    assert ("exposed_copy_s" in row) == (row["method"] == "lsp")
    if row["method"] == "lsp":
        seconds = row["apart_seconds"]
        assert {kind: len(turns) for kind, turns in seconds.items()} == {"as it is": 3, "no CPU": 3, "no copies": 3}
        parts = row["rest_s"] + row["exposed_copy_s"] + row["exposed_cpu_s"]
        assert parts == pytest.approx(row["apart_step_s"]) and row["exposed_spread_s"] >= 0
        assert row["host_bytes"] > 0 and row["device_bytes"] > 0
        assert "8 x 8" in row["settings"] or name == "lsp-none"


@pytest.mark.usefixtures("single_process")
def test_one_engine_is_measured_on_every_link(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lsp_parts, "TURNS", 1)
    row = measure(**rehearsed("lsp-figure5", "figure5/llama-1.3b/lsp-512"))
    assert row["link_gbps"] is None and list(row["links"]) == ["20", "10"]
    assert len({row["apart_step_s"], *(found["apart_step_s"] for found in row["links"].values())}) == 3


@pytest.mark.usefixtures("single_process")
def test_parts_of_the_schedule_are_switched_off() -> None:
    params = rehearsed("lsp-schedule", "schedule/1.3b/4+1/late-first-come")
    assert measure(**params)["then"]["batch"] == 1 and params["without"] == ["early uploads", "last first"]


@pytest.mark.usefixtures("single_process")
def test_compiled_cases_compile_whoever_trains(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled_blocks, "BACKEND", "aot_eager_decomp_partition")
    cases = [case for case in cases_of("lsp-speed", device="cpu", tiny=True) if case.name.endswith("-compiled")]
    assert {case.name.rpartition("/")[0] for case in cases} == {"1.3b/4", "1.3b/1"}
    for case in cases[:2]:  # LSP: test_compiled_blocks
        counters.clear()
        row = measure(**case.params)
        assert row["compiled"] and row["settings"].endswith("blocks compiled")
        assert counters["stats"]["calls_captured"] > 0
        torch._dynamo.reset()
