"""Every case of the ZO presets at a toy size on the CPU: what runs on a GPU for minutes must not stop at a typo."""

from __future__ import annotations

import json
import re
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from benchmarks import timeline, zo_case
from benchmarks.zo_presets import CASE, PRESETS, paper, stored_gb, targets, tiny
from benchmarks.zo_speed import main, run_preset
from ds_zo.bench.runner import Case, read_rows

LAYERS = 4


def shrunk(params: dict[str, Any]) -> dict[str, Any]:
    return tiny(Case("", CASE, params), device="cpu").params


def kinds() -> dict[str, dict[str, Any]]:
    """One case of each kind: those that differ in more than size. Of the AMP grid one row and the corners."""
    found: dict[str, dict[str, Any]] = {}
    for case in (*targets(), *paper()):
        if case.target == CASE and not re.match(r"amp\..*\.fp16\.(fp16|bf16|fp32)", case.name):
            params = shrunk(case.params)
            key = {k: v for k, v in params.items() if k not in ("shape", "batch", "fill_steps")}
            found.setdefault(json.dumps(key, sort_keys=True), {"name": case.name, **params})
    return {params.pop("name"): params for params in found.values()}


@pytest.mark.parametrize("name", kinds())
def test_a_case_of_each_kind_runs(name: str, single_process: None) -> None:
    params = kinds()[name]
    row = zo_case.run_case(**params)
    json.dumps(row)
    assert row["tokens_per_s"] > 0 and 0 < row["loss"] < 20
    if params["method"] == "zo":
        streamed = not params.get("resident")
        assert row["num_blocks"] == LAYERS and (row["up_gb_a_step"] > 0) == streamed
        assert (row["host_gb"] > 0) == streamed
    if "inputs" in params:
        assert [(p["batch"], p["length"]) for p in row["points"]] == [tuple(pair) for pair in params["inputs"]]


@pytest.mark.parametrize("stream", [{}, {"master": "wire", "wire_dtype": "fp8"}, {"wire_dtype": "bf12"}])
def test_planned_host_memory_is_what_the_store_takes(stream: dict[str, Any], single_process: None) -> None:
    stream = {**stream, "resident_blocks": 0}
    params = shrunk({"shape": "opt-tiny", "method": "zo", "dtype": "bf16", "stream": stream})
    row = zo_case.run_case(**params)
    assert row["host_gb"] == pytest.approx(stored_gb(zo_case.ZOCase(**params)), rel=0.1)


def test_one_case_by_hand_prints_its_row(single_process: None, capfd: pytest.CaptureFixture[str]) -> None:
    sizes = ["--length", "8", "--warmup", "1", "--steps", "1", "--layers", str(LAYERS)]
    main(["case", "--shape", "opt-tiny", "--method", "zo", "--device", "cpu", *sizes])
    (line,) = (line for line in capfd.readouterr().out.splitlines() if line.startswith("ROW "))
    assert json.loads(line.removeprefix("ROW "))["num_blocks"] == LAYERS


def test_streamed_zo_is_measured_with_its_updates_pending(single_process: None) -> None:
    """Before a whole interval has passed fewer updates wait for replay than later on."""
    stream = {"resident_blocks": 0, "writeback_interval": 5}
    row = zo_case.run_case(**{**shrunk({"shape": "opt-tiny", "method": "zo", "stream": stream}), "age": True})
    assert row["warmup"] == 5


def test_wire_decides_the_bytes_moved(single_process: None) -> None:
    def up(wire: str) -> float:
        stream = {"master": "wire", "resident_blocks": 0, "wire_dtype": wire}
        params = {"shape": "opt-tiny", "method": "zo", "dtype": "fp32", "stream": stream}
        moved: float = zo_case.run_case(**shrunk(params))["up_gb_a_step"]
        return moved

    assert up("bf16") == pytest.approx(0.5 * up("fp32"), rel=0.02)
    assert up("fp8") == pytest.approx(0.25 * up("fp32"), rel=0.05)  # and the groups' scales


def test_cases_become_rows_and_rows_a_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ours = {"shape": "opt-6.7b", "method": "zo", "dtype": "fp32", "stream": {"master": "wire", "resident_blocks": 0}}
    long = Case("long", CASE, {"shape": "no such shape"}, expected_s=1e4)
    cases = [
        Case("6.7b.mezo", CASE, shrunk({"shape": "opt-6.7b", "method": "mezo", "dtype": "fp32"})),
        Case("6.7b.streamed", CASE, shrunk(ours)),
    ]
    out = tmp_path / "rows.jsonl"
    given: dict[str, Any] = {"out": out, "resume": False, "device": "cpu", "spawn": False, "total_s": None}
    first = run_preset(cases[:1], Namespace(**given))
    passed_over, *both = run_preset([long, *cases], Namespace(**given | {"resume": True, "total_s": 600}))
    assert passed_over["status"] == "not run" and "may take 10000 s" in passed_over["error"]
    rows = [row for row in read_rows(out) if row["case"] != "long"]
    assert [row["case"] for row in rows] == ["6.7b.mezo", "6.7b.streamed"], "the first row is kept, not run again"
    assert [row["status"] for row in rows] == ["ok", "ok"], rows[-1].get("last_words")
    assert first[0]["run_id"] == both[1]["run_id"]
    assert "\n| 6.7b.streamed | " in capsys.readouterr().out
    main(["report", str(out)])
    assert "\n| 6.7b.streamed | " in capsys.readouterr().out


def test_presets_list_their_cases(capsys: pytest.CaptureFixture[str]) -> None:
    for preset, cases in PRESETS.items():
        main(["preset", preset, "--list", "--only", "1.3b"])
        listed = capsys.readouterr().out.splitlines()
        assert len(listed) == 1 + sum("1.3b" in case.name for case in cases())  # type: ignore[operator]


def test_names_are_unique_and_every_ratio_has_its_mezo() -> None:
    for cases in (targets(), paper()):
        assert len({case.name for case in cases}) == len(cases)
    names = {case.name for case in paper()}
    ours = {name for name in names if name.startswith(("t1.", "t78.")) and ".zo" in name} - {"t1.66b.fp8.zo"}
    theirs = {re.sub(r"\.zo(\.\d+x\d+)?", ".mezo", name) for name in ours}
    assert ours and theirs <= names


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
