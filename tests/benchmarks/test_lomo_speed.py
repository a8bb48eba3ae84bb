"""Every LOMO case once on a toy model, so that nothing is left to find out on a rented machine; and the report."""

from __future__ import annotations

import importlib.util
import math
from typing import Any

import pytest
import torch
from torch import nn

from benchmarks.lomo_methods import MasterWeights
from benchmarks.lomo_plans import planned
from benchmarks.lomo_report import TARGETS, markdown
from benchmarks.lomo_speed import PRESETS, WARM, cases_of
from ds_zo.bench.runner import Case, run_cases
from ds_zo.records.rows import Row
from tests.helpers.clean_process import in_clean_process

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HAS_PEER = importlib.util.find_spec("lomo_optim") is not None


def _kinds() -> list[Case]:
    """One case of each kind: presets repeat them at other sizes."""
    found: dict[tuple[Any, ...], Case] = {}
    for case in cases_of("all", device=DEVICE, tiny=True):
        method = case.params.get("method", "")
        if method.startswith("peer_") and (not HAS_PEER or (method == "peer_adalomo" and DEVICE == "cpu")):
            continue  # its AdaLomo puts its state on a GPU
        found.setdefault((case.target, method, "stream" in case.params), case)
    return list(found.values())


@pytest.fixture(scope="module")
def rows() -> dict[str, Row]:
    return {
        row["case"]: row
        for row in in_clean_process(run_cases, _kinds(), out=None, device=DEVICE, warm=WARM, min_free_host_gib=0.5)
    }


def test_every_kind_of_case_gives_a_row(rows: dict[str, Row]) -> None:
    assert {name: row["error"] for name, row in rows.items() if row["status"] != "ok"} == {}
    speeds = [row for row in rows.values() if row["target"].endswith(":speed")]
    for row in speeds:
        assert row["tokens_per_s"] > 0 and row["step_s_min"] <= row["step_s"] <= row["step_s_max"]
        assert len(row["losses"]) == row["params"]["warmup"] + row["params"]["steps"]
        assert "step 1 done" in row["last_words"] and "a step issued" in row["last_words"]  # what a cut case leaves
    # The same weights and batch for all: what they are compared at is one piece of work.
    losses = [row["losses"][0] for row in speeds]
    assert math.isfinite(losses[0]) and max(losses) - min(losses) < 0.01
    assert "config" in rows["speed/lomo"] and rows["speed/lomo"]["config"]["gradient_clipping"] == 0


def test_streamed_cases_stream(rows: dict[str, Row]) -> None:
    row = rows["streamed/1.3b"]
    assert row["config"]["zero_optimization"]["offload_param"]["device"] == "cpu"
    assert "3 blocks stream" in row["placement"]
    assert row["losses"] == pytest.approx(rows["speed/lomo"]["losses"], abs=1e-6 if DEVICE == "cpu" else 1e-2)
    up, down = row["up_gb_a_step"], row["down_gb_a_step"]
    # Three blocks, two slots: each pass finds two where the one before left them, and brings the third.
    assert up == pytest.approx(2 / 3 * down) and down > 0


def test_gradients_alive_are_measured(rows: dict[str, Row]) -> None:
    lomo, adamw = rows["paper/memory-lomo-checkpointed"], rows["paper/memory-adamw_master-checkpointed"]
    assert adamw["gradients_gb"] == adamw["parameters_gb"]
    assert lomo["gradients_gb"] == 97 * 32 * 2 / 1e9  # the largest parameter: embeddings, or the head
    assert lomo["total_gb"] < adamw["total_gb"]


def test_sequential_accumulation_is_not_accumulation(rows: dict[str, Row]) -> None:
    row = rows["paper/accumulation"]
    assert row["largest_sgd_difference"] < 1e-4 < row["largest_loss_difference"]
    assert abs(row["last_loss_difference"]) < 0.2


def test_report_of_measured_rows(rows: dict[str, Row]) -> None:
    text = markdown(rows.values())
    assert "≥" not in text  # toy models are held to no target
    assert "| speed/adamw_fused |" in text
    alone = text.partition("Forward and backward alone, as the model is: ")[2].partition("\n")[0]
    assert "lomo takes" in alone and "adamw_fused takes" in alone
    assert "| paper/memory-lomo-checkpointed |" in text and "Sequential accumulation, 2 updates of 2 rows" in text


def test_targets_name_cases_that_exist() -> None:
    """A target whose case was renamed would vanish from the report without a word."""
    names = [case.name for case in PRESETS["all"]()]
    assert len(set(names)) == len(names)

    class Seen(dict[str, Row]):
        def __missing__(self, name: str) -> Row:
            assert name in names
            return {"tokens_per_s": 1.0, "peak_gb": 1.0, "total_gb": 1.0, "computed_total_gb": 1.0, "losses": [1.0]}

    for target in TARGETS:
        target.value(Seen())


def _row(case: str, run_id: str, *, tokens_per_s: float = 1.0, **more: Any) -> Row:
    speed = {"step_s": 1.0, "step_s_min": 1.0, "step_s_max": 1.0, "peak_gb": 15.0, "peak_reserved_gb": 16.0}
    about = {"status": "ok", "target": "m:speed", "params": {}, "fits": True, "settings": "s", "host_peak_gb": 1.0}
    return {"case": case, "run_id": run_id, **about, **speed, "tokens_per_s": tokens_per_s, "loss": 1.0, **more}


def test_ratios_stay_within_a_run() -> None:
    old = [_row("speed/lomo", "a", tokens_per_s=3.0), _row("speed/peer_lomo", "a", tokens_per_s=2.0)]
    new = [_row("speed/lomo", "b", tokens_per_s=9.0)]
    text = markdown([*old, *new])
    assert "| LOMO against lomo-optim's, tokens/s | ≥ 1.5 | 1.5 | yes | a |" in text
    assert "| LOMO, peak GiB | ≤ 15.3 | 14 | yes | b |" in text


def test_failures_and_misses_are_shown() -> None:
    lost = {"case": "speed/adamw", "run_id": "a", "status": "oom", "target": "m:speed", "error": "a | b"}
    slow = [_row("speed/adalomo", "a", tokens_per_s=1.0), _row("speed/peer_adalomo", "a", tokens_per_s=1.0)]
    large = _row("paper/speed-65b-sgd", "a", fits=False, needed_gb=261.0)
    text = markdown([lost, *slow, large])
    assert "| speed/adamw | oom | a \\| b |" in text
    assert "| ≥ 1.7 | 1 | NO | a |" in text
    assert "does not fit: weights, gradients, state 261 GB" in text
    assert "AdamW" not in text.partition("##")[0]


def test_the_plan_stands_beside_the_measurement() -> None:
    params = {"method": "lomo", "shape": "llama-125m", "batch": 1, "length": 64, "checkpointing": False}
    row = _row("streamed/125m", "a", params=params | {"stream": {"resident_blocks": 0}}, peak_gb=1.0)
    plan, whole = planned(row), planned(_row("speed/125m", "a", params=params | {"checkpointing": True}))
    assert plan is not None and "12 of 12 blocks streamed" in plan["setting"]
    block_nbytes = 2 * (4 * 768**2 + 3 * 768 * 2048 + 2 * 768)
    assert whole is not None and whole["peak_gb"] - plan["peak_gb"] == pytest.approx(10 * block_nbytes / 1e9, rel=1e-3)
    assert f"{plan['peak_gb'] / 1.073741824:.4g} / 0.9313 (" in markdown([row], plan=lambda row: plan)
    assert planned(_row("speed/adamw", "a", params=params | {"method": "adamw"})) is None


def test_master_weights_keep_what_bf16_drops() -> None:
    start = torch.linspace(1.0, 2.0, 8)
    p, exact = nn.Parameter(start.bfloat16()), nn.Parameter(start.bfloat16().float())
    masters = MasterWeights([p], lambda master: torch.optim.AdamW([master], lr=1e-4, weight_decay=0.0))
    plain = torch.optim.AdamW([exact], lr=1e-4, weight_decay=0.0)
    for _ in range(100):
        p.grad, exact.grad = torch.ones_like(p), torch.ones_like(exact)
        masters.step()
        plain.step()
    assert torch.equal(p.detach(), exact.detach().bfloat16())
    assert p.grad is None and not torch.equal(p.detach(), start.bfloat16())
