"""Tables, plots and the timeline, from rows and recordings made by hand."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from benchmarks import timeline, zo_plots, zo_report
from benchmarks.zo_presets import TARGETS, paper, targets
from benchmarks.zo_speed import main

PNG = b"\x89PNG"


def row(case: str, method: str = "zo", **more: Any) -> dict[str, Any]:
    made: dict[str, Any] = {
        "case": case,
        "run_id": "r1",
        "status": "ok",
        "method": method,
        "shape": "opt-6.7b",
        "dtype": "bf16",
        "parameters": 6_700_000_000,
        "layers": 32,
        "full_layers": 32,
        "batch": 1,
        "length": 2048,
        "warmup": 8,
        "steps": 8,
        "step_s": 0.2,
        "step_s_min": 0.19,
        "step_s_max": 0.25,
        "tokens_per_s": 10_240.0,
        "peak_gb": 2.0,
        "host_peak_gb": 14.0,
        "loss": 10.0,
        "resident": method != "zo",
        "stream": None,
        "points": None,
    }
    if method == "zo":
        made |= {"up_gb_a_step": 10.0, "down_gb_a_step": 1.0, "interval": 8, "host_gb": 12.9, "master": "wire"}
        made |= {"resident_blocks": 0, "num_blocks": 32, "stream": {"resident_blocks": 0}}
    return made | more


MACHINE = {
    "case": "machine",
    "run_id": "r1",
    "method": "machine",
    "link_gbps": {"up": 55.0, "down": 54.0, "both": 100.0},
    "kernel_gparameters_per_s": {"bf16 replay 1 + perturb 1": 275.0},
}


def test_every_target_has_a_case_and_every_ratio_its_mezo() -> None:
    cases = {case.name: case.params for case in targets()}
    assert TARGETS.keys() <= cases.keys()
    same = ("shape", "dtype", "layers", "batch", "length")
    for name, wanted in TARGETS.items():
        if any(target.what == "ratio" for target in wanted):
            peers = [p for p in cases.values() if p.get("method") == "mezo"]
            assert any(all(p.get(k) == cases[name].get(k) for k in same) for p in peers), name
    for target in (t for wanted in TARGETS.values() for t in wanted if t.what.startswith("of ")):
        assert target.what.removeprefix("of ") in cases
    names = {case.name for case in paper()}
    ours = {name for name in names if name.startswith(("t1.", "t78.")) and ".zo" in name} - {"t1.66b.fp8.zo"}
    theirs = {re.sub(r"\.zo(\.\d+x\d+)?", ".mezo", name) for name in ours}
    assert ours and theirs <= names


def test_names_are_unique() -> None:
    for cases in (targets(), paper()):
        assert len({case.name for case in cases}) == len(cases)


def test_verdicts_compare_with_the_same_run() -> None:
    rows = [
        MACHINE,
        row("6.7b.mezo", "mezo", tokens_per_s=10_000.0),
        row("6.7b.streamed", tokens_per_s=10_500.0, peak_gb=1.8, step_s=0.2, up_gb_a_step=10.0, host_peak_gb=16.0),
        row("13b.mezo", "mezo", run_id="r0", shape="opt-13b"),
        row("13b.streamed", shape="opt-13b"),
        row("6.7b.fp8", status="timeout"),
        row("6.7b.split", tokens_per_s=9_000.0),
    ]
    text = zo_report.report(rows)
    assert "| 6.7b.streamed | tokens/s, x MeZO | 1.05 | >= 1 | 1.1 | yes |" in text
    assert "| 6.7b.streamed | peak GB | 1.8 | <= 2.3 | 1.9 | stretch |" in text
    assert "| 6.7b.streamed | host GB (1.05 x stored + 2) | 16 | <= 15.5 |  | no |" in text
    assert "| 6.7b.streamed | link up, of one-way bandwidth | 0.909 | >= 0.9 | 0.97 | yes |" in text
    assert "| 13b.streamed | tokens/s, x MeZO |  | >= 1 | 1.1 |  |" in text, "no MeZO of that size in its run"
    assert "| 6.7b.fp8 | tokens/s, x MeZO | timeout | >= 1.8 | 2 | no |" in text
    assert "| 6.7b.split | of 6.7b.streamed | 0.857 | >= 0.95 |  | no |" in text
    assert "| bf16 replay 1 + perturb 1 | 275 | 215 | 350 |" in text
    assert text.count("## Run ") == 2


def test_a_capped_run_counts_its_steps_and_looks_at_every_loss() -> None:
    filled = {"warmup": 2, "steps": 5, "loss": 9.0, "losses": [9.0] * 5, "peak_gb": 23.0}
    good = row("30b.capped", cap_gb=24.0, steps=5, losses=[10.0] * 5, filled=filled)
    assert zo_report.trained(good) == (20, True)
    assert not zo_report.trained({**good, "filled": {**filled, "losses": [9.0, float("nan")]}})[1]
    assert not zo_report.trained({**good, "filled": {**filled, "peak_gb": 24.5}})[1]
    assert not zo_report.trained({**good, "filled": None})[1], "13 steps are too few"


def test_paper_tables_name_what_did_not_run() -> None:
    points = [{"batch": b, "length": 2048, "tokens_per_s": 100.0 * b, "step_s": 1.0, "peak_gb": 3.0} for b in (1, 2)]
    no_fit = {"fits": False, "needs_gb": 260.0, "device_gb": 140.0, "tokens_per_s": None}
    rows = [
        row("t1.6.7b.fp32.mezo", "mezo", dtype="fp32", tokens_per_s=2_000.0, peak_gb=30.0),
        row("t1.6.7b.fp32.zo", dtype="fp32", tokens_per_s=2_200.0, peak_gb=6.0),
        row("t1.66b.fp32.mezo.whole", "mezo", dtype="fp32", **no_fit),
        row("t1.66b.fp32.zo.whole", status="skipped", error="needs about 276.0 GB", tokens_per_s=None),
        row("t2.6.7b.1.all", tokens_per_s=1_000.0, interval=1),
        row("t2.6.7b.1.no_overlap", tokens_per_s=500.0, interval=1),
        row("t1.1.3b.fp16.zo", shape="opt-1.3b", tokens_per_s=1_000.0, interval=5),
        row("t2.1.3b.auto.no_overlap", shape="opt-1.3b", tokens_per_s=700.0, interval=5),
        row("amp.bf16.fp32", up_gb_a_step=4.0),
        row("amp.bf16.fp8", up_gb_a_step=1.0, tokens_per_s=20_480.0),
        row("t78.6.7b.mezo", "mezo", dtype="fp16", points=[{**p, "tokens_per_s": 50.0} for p in points]),
        row("t78.6.7b.zo", dtype="fp16", points=points),
        row("t10.bloom-176b", shape="bloom-176b", layers=4, full_layers=70, cap_gb=24.0),
    ]
    text = zo_report.report(rows)
    assert "| 6.7b | fp32 | 32 | 30 | 6 (0.20) | 2,000 | 2,200 (1.10) |" in text
    assert "all, mezo: needs 260 GB, there are 140" in text and "all, zo: needs about 276.0 GB" in text
    assert "| opt-6.7b | no overlap | 1 | 1 | 32 | 500 | 0.50 |" in text
    assert "| opt-1.3b | no overlap | auto | 5 | 32 | 700 | 0.70 |" in text
    assert "| opt-6.7b | 32 | bf16 | fp8 | 20,480 | 2.00 | 1 | 0.25 |" in text
    assert "| opt-6.7b | 32 | 2 | 2048 | 3 | 3 (1.00) | 50 | 200 (4.00) |" in text
    assert "| bloom-176b | 4 of 70 |" in text


def test_rows_that_no_run_wrote_are_refused() -> None:
    with pytest.raises(ValueError, match="preset"):
        zo_report.report([{"shape": "opt-6.7b"}])


def test_plots_take_whole_models_of_one_run(tmp_path: Path) -> None:
    small = {"shape": "opt-1.3b", "parameters": 1_300_000_000, "layers": 24, "full_layers": 24}
    rows = [
        row("6.7b.mezo", "mezo"),
        row("1.3b.mezo", "mezo", **small, tokens_per_s=25_000.0),
        row("6.7b.streamed", tokens_per_s=10_000.0),
        row("again", tokens_per_s=11_000.0),
        row("6.7b.slots3", stream={"device_slots": 3}, tokens_per_s=12_000.0),
        row("6.7b.compiled", compiled=True, tokens_per_s=12_000.0),
        row("6.7b.half", resident_blocks=16),
        row("cut", layers=16),
        row("t2.1.no_overlap", stream={"overlap": False}),
        row("6.7b.resident", resident=True, num_blocks=32, resident_blocks=32),
        row("crash", status="crash", tokens_per_s=None),
    ]
    rows.append(row("t1.6.7b.fp16.zo", dtype="fp16", tokens_per_s=13_000.0))
    lines = zo_plots.group_by_size(rows)["r1"]
    assert [r["case"] for r in lines["mezo"]] == ["1.3b.mezo", "6.7b.mezo"]
    assert [r["case"] for r in lines["streamed"]] == ["again"], "the faster of two that are alike"
    assert set(lines) == {"mezo", "streamed", "resident"}
    file, out = tmp_path / "rows.jsonl", tmp_path / "sizes.svg"
    later = [{**found, "run_id": "r2"} for found in rows[:2]]
    file.write_text("\n".join(json.dumps(found) for found in [MACHINE, *rows, *later]))
    streamed = "ZO, all blocks streamed, bf16"
    main(["plot", str(file), "--out", str(out)])
    assert "MeZO, whole model on the GPU" in out.read_text() and streamed not in out.read_text(), "the newest run"
    main(["plot", str(file), "--run-id", "r1", "--out", str(out)])
    assert streamed in out.read_text()
    with pytest.raises(SystemExit, match=r"no run has whole models of two sizes .*\(--run-id\)"):
        main(["plot", str(file), "--run-id", "r3", "--out", str(out)])


def test_a_recording_among_rows_is_drawn(tmp_path: Path) -> None:
    spans = [["upload", "upload", 0.0, 0.04], ["upload", "upload", 0.03, 0.06], ["compute", "forward", 0.01, 0.07]]
    recording = {"step_s": 0.08, "spans": spans, "shape": "opt-tiny", "method": "timeline"}
    assert timeline.busy(recording)["upload"] == pytest.approx(0.75), "what overlaps counts once"
    rows = tmp_path / "rows.jsonl"
    rows.write_text("\n".join(json.dumps(line) for line in (MACHINE, recording | {"case": "timeline", "run_id": "r1"})))
    main(["timeline", "--draw", str(rows), "--out", str(tmp_path / "step.png")])
    assert (tmp_path / "step.png").read_bytes().startswith(PNG)
    main(["timeline", "--draw", str(rows), "--run-id", "r1", "--out", str(tmp_path / "step.svg")])
    assert "75% of the step" in (tmp_path / "step.svg").read_text()
    with pytest.raises(SystemExit, match="of run r2 is a recorded step: `zo_speed preset all --only timeline`"):
        main(["timeline", "--draw", str(rows), "--run-id", "r2", "--out", str(tmp_path / "step.svg")])


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
