"""Every case of the ZO suites at a toy size on the CPU: what runs on a GPU for minutes must not stop at a typo."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from benchmarks import timeline
from benchmarks.speed import cases_of
from benchmarks.training_speed import measure

LAYERS = 4
SMALL = {"shape": "opt-tiny", "layers": LAYERS, "length": 8, "warmup": 1, "steps": 1, "device": "cpu", "age": False}


def kinds() -> dict[str, dict[str, Any]]:
    """One case of each kind: those that differ in more than size. Of the AMP grid one row and the corners."""
    found: dict[str, dict[str, Any]] = {}
    for case in (case for suite in ("zo", "zo-members") for case in cases_of(suite, device="cpu", tiny=True)):
        if not re.match(r"amp\..*\.fp16\.(fp16|bf16|fp32)", case.name):
            key = {k: v for k, v in case.params.items() if k not in ("shape", "batch", "fill_steps")}
            found.setdefault(json.dumps(key, sort_keys=True), {"name": case.name, **case.params})
    return {params.pop("name"): params for params in found.values()}


@pytest.mark.parametrize("name", kinds())
def test_a_case_of_each_kind_runs(name: str, single_process: None) -> None:
    params = kinds()[name]
    row = measure(**params)
    json.dumps(row)
    assert row["tokens_per_s"] > 0 and 0 < row["loss"] < 20
    assert ("plain_forward_s" in row) == params.get("plain_forward", False)
    if params["method"] == "zo":
        streamed = not params.get("resident")
        assert row["num_blocks"] == LAYERS and (row["up_gb_a_step"] > 0) == streamed
        assert (row["host_gb"] > 0) == streamed
    if "inputs" in params:
        assert [(p["batch"], p["length"]) for p in row["points"]] == [tuple(pair) for pair in params["inputs"]]


def test_streamed_zo_is_measured_with_its_updates_pending(single_process: None) -> None:
    """Before a whole interval has passed fewer updates wait for replay than later on."""
    stream = {"resident_blocks": 0, "writeback_interval": 5}
    row = measure(**{**SMALL, "method": "zo", "stream": stream, "age": True})
    assert row["warmup"] == 5


def test_wire_decides_the_bytes_moved(single_process: None) -> None:
    def up(wire: str) -> float:
        stream = {"master": "wire", "resident_blocks": 0, "wire_dtype": wire}
        moved: float = measure(**SMALL, method="zo", dtype="fp32", stream=stream)["up_gb_a_step"]
        return moved

    assert up("bf16") == pytest.approx(0.5 * up("fp32"), rel=0.02)
    assert up("fp8") == pytest.approx(0.25 * up("fp32"), rel=0.05)  # and the groups' scales


def test_a_trace_becomes_the_spans_of_one_step() -> None:
    def event(cat: str, name: str, ts: float, dur: float) -> dict[str, Any]:
        return {"cat": cat, "name": name, "ts": ts, "dur": dur, "args": {"stream": 7}}

    events: list[dict[str, Any]] = [{"cat": "cpu_op", "name": "aten::mm", "ts": 0, "dur": 9}]
    for step in range(3):
        at = 1000.0 + 10_000 * step
        events.append(event("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", at, 9_000))
        events.append(event("gpu_memcpy", "Memcpy DtoD (Device -> Device)", at, 10))
        events.append(event("kernel", "_replay_perturb_kernel", at, 1_000))
        events += [event("kernel", "gemm", at + 1_005 + 100 * i, 95) for i in range(80)]
        events.append(event("kernel", "gemm", at + 9_990, 10))
        events.append(event("gpu_memcpy", "Memcpy DtoH (Device -> Pinned)", at + 2_000, 3_000))
    recording = timeline.from_trace(events, num_steps=3)
    assert recording["step_s"] == pytest.approx(0.010)
    kinds = [(lane, kind) for lane, kind, *_ in recording["spans"]]
    assert kinds.count(("compute", "noise")) == 1 and kinds.count(("compute", "forward")) == 2, "kernels are joined"
    share = timeline.busy(recording)
    assert share["upload"] == pytest.approx(0.9) and share["download"] == pytest.approx(0.3)
    with pytest.raises(ValueError, match="no kernels"):
        timeline.from_trace(events[:1], num_steps=3)
