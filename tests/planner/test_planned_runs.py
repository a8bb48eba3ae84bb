"""The JSON of a plan trains; on a GPU it takes the planned memory."""

from __future__ import annotations

import math

import pytest
import torch

from tests.planner.planned_runs import CASES, planned_and_run

pytestmark = pytest.mark.usefixtures("single_process")


@pytest.mark.parametrize("case", CASES)
def test_the_json_of_a_plan_trains(case: str) -> None:
    estimate, _, loss = planned_and_run(case, "llama-tiny", batch=1, seq=8, device=torch.device("cpu"), num_steps=1)
    assert math.isfinite(loss) and estimate.device_nbytes > 0


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("shape", "batch", "seq"),
    [
        ("opt-125m", 8, 512),
        ("opt-1.3b", 1, 2048),
        ("llama-1.3b", 2, 1024),
        ("gpt2-355m", 4, 1024),
        ("bloom-560m", 2, 512),
    ],
)
@pytest.mark.parametrize("case", CASES)
def test_a_run_takes_the_planned_memory(case: str, shape: str, batch: int, seq: int) -> None:
    """Within 5%, and 10% where activations are most of it."""
    estimate, peak, _ = planned_and_run(case, shape, batch=batch, seq=seq, device=torch.device("cuda", 0))
    passing = estimate.device.get("activations", 0) + estimate.device.get("logits", 0)
    tolerance = 0.1 if 2 * passing > estimate.device_nbytes else 0.05
    shown = {name: round(nbytes / 1e6) for name, nbytes in estimate.device.items()}
    print(f"{case} {shape}: measured {peak / 1e6:.0f} MB, planned {estimate.device_nbytes / 1e6:.0f}: {shown}")
    assert estimate.device_nbytes == pytest.approx(peak, rel=tolerance), shown
