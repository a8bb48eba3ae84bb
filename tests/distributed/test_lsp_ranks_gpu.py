"""Two LSP ranks on one GPU, talking by gloo: the streams, events and pinned memory that the CPU does not have."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.lsp_rank_cases import json_of
from tests.helpers.ranks import run_job

pytestmark = pytest.mark.gpu

WIDTH = 256
NUM_STEPS = 12
CASES: dict[str, dict[str, Any]] = {
    "all step": {"stage": 0},
    "owned": {"stage": 2},
    "owned, clipped": {"stage": 2, "clipping": 0.1},
    "owned, whole": {"stage": 1, "params": {"projector": "none"}},
    "owned, learned": {"stage": 1, "params": {"projector": "learned", "check_interval": 4, "fit_steps": 5}},
    "clipped together": {"stage": 2, "clipping": 0.1, "params": {"clip_scope": "global"}},
}


def compare_on_gpu(rank: int, folder: Path) -> dict[str, Any]:
    """Every rank has the same batch, so two make the steps of one; each schedule and number of ranks the same bits."""
    from tests.helpers.lomo_runs import start
    from tests.helpers.weights import parameters_of
    from tests.helpers.zoo import Wandering, plain_batch, seeded

    torch.use_deterministic_algorithms(True, warn_only=True)
    found: dict[str, Any] = {}
    for name, case in CASES.items():
        for schedule in ("layerwise", "sync"):
            params = {"subspace_dim": 64, "nonzeros_per_row": 4, **case.get("params", {}), "schedule": schedule}
            json = {**json_of({**case, "params": params}, 2), "bf16": {"enabled": True}}
            engine = start(json, seeded(lambda: Wandering(num_blocks=6, width=WIDTH)))
            for step in range(NUM_STEPS):
                engine.backward(engine(**{key: value.to(engine.device) for key, value in plain_batch(step).items()}))
                engine.step()
            if name == "owned":
                engine.save_checkpoint(str(folder / schedule))
            found[f"{name}, {schedule}"] = parameters_of(engine)
            engine.destroy()
    return found


def test_ranks_on_a_gpu_make_the_same_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    [alone] = run_job(compare_on_gpu, 1, tmp_path / "1", timeout_s=280)
    assert isinstance(alone, dict), alone
    for rank, mine in enumerate(run_job(compare_on_gpu, 2, tmp_path / "2", timeout_s=280)):
        assert isinstance(mine, dict), f"rank {rank}: {mine}"
        for case, weights in mine.items():
            for name, value in weights.items():
                assert torch.equal(value, alone[case][name]), (case, name)
                assert torch.equal(value, mine[case.replace("layerwise", "sync")][name]), (case, name)
