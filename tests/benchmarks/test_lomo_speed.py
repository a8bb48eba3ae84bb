"""Every LOMO case once on a toy model, so that nothing is left to find out on a rented machine; and the report."""

from __future__ import annotations

import importlib.util
import math
from typing import Any

import pytest
import torch
from torch import nn

from benchmarks.methods import MasterWeights
from benchmarks.report import report
from benchmarks.speed import cases_of
from ds_zo.bench.runner import WARM, Case, run_cases
from ds_zo.records.rows import Row
from tests.helpers.clean_process import in_clean_process

HAS_PEER = importlib.util.find_spec("lomo_optim") is not None
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def _kinds() -> list[Case]:
    """One case of each kind: suites repeat them at other sizes."""
    found: dict[tuple[Any, ...], Case] = {}
    for case in cases_of("lomo", device=DEVICE, tiny=True):
        method = case.params.get("method", "")
        if method.endswith("-optim") and (not HAS_PEER or (method == "adalomo-optim" and DEVICE == "cpu")):
            continue  # its AdaLomo puts its state on a GPU
        found.setdefault((case.target, method, "stream" in case.params), case)
    return list(found.values())


@pytest.fixture(scope="module")
def rows() -> dict[str, Row]:
    options = {"out": None, "device": DEVICE, "warm": (*WARM, "benchmarks.training_speed"), "min_free_host_gib": 0.5}
    return {row["case"]: row for row in in_clean_process(run_cases, _kinds(), **options)}


def test_every_kind_of_case_gives_a_row(rows: dict[str, Row]) -> None:
    assert {name: row["error"] for name, row in rows.items() if row["status"] != "ok"} == {}
    speeds = [row for row in rows.values() if row["target"].endswith(":measure")]
    for row in speeds:
        assert row["tokens_per_s"] > 0 and row["step_s_min"] <= row["step_s"] <= row["step_s_max"]
        assert len(row["losses"]) == 1 + row["params"]["steps"]
    # The same weights and batch for all: what they are compared at is one piece of work.
    losses = [row["losses"][0] for row in speeds]
    assert math.isfinite(losses[0]) and max(losses) - min(losses) < 0.01
    assert "config" in rows["speed/lomo"] and rows["speed/lomo"]["config"]["gradient_clipping"] == 0


def test_streamed_cases_stream(rows: dict[str, Row]) -> None:
    row = rows["streamed/1.3b"]
    assert row["config"]["zero_optimization"]["offload_param"]["device"] == "cpu"
    assert "4 blocks stream" in row["placement"]
    assert row["planned_host_gb"] > rows["speed/lomo"]["planned_host_gb"] > 0 < row["planned_device_gb"]
    assert row["losses"] == pytest.approx(rows["speed/lomo"]["losses"], abs=1e-6 if DEVICE == "cpu" else 1e-2)
    up, down = row["up_gb_a_step"], row["down_gb_a_step"]
    # Four blocks, two slots: each of two passes finds two where the one before left them, and brings the other two.
    assert up == pytest.approx(down) and down > 0


def test_gradients_alive_are_measured(rows: dict[str, Row]) -> None:
    lomo, adamw = rows["paper/memory-lomo-checkpointed"], rows["paper/memory-adamw_master-checkpointed"]
    assert adamw["gradients_gb"] == adamw["parameters_gb"]
    assert lomo["gradients_gb"] == 512 * 64 * 2 / 1e9  # the largest parameter: embeddings, or the head
    assert lomo["total_gb"] < adamw["total_gb"]


def test_sequential_accumulation_is_not_accumulation(rows: dict[str, Row]) -> None:
    row = rows["paper/accumulation"]
    assert row["largest_sgd_difference"] < 1e-4 < row["largest_loss_difference"]
    assert abs(row["last_loss_difference"]) < 0.2


def test_report_of_measured_rows(rows: dict[str, Row]) -> None:
    text = report(rows.values())
    assert "| speed/adamw_fused | " in text and "| paper/memory-lomo-checkpointed | " in text
    assert "oom: a b |" in report([{"case": "speed/adamw", "run_id": "a", "status": "oom", "error": "a\nb"}])


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
