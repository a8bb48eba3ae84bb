"""Two gloo ranks stay bit-identical, and make the run of one rank with both batches."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from conftest import REPO

SCRIPT = """
import sys
from pathlib import Path
sys.path[:0] = [sys.argv[1], sys.argv[1] + "/engines"]
import deepspeed, torch
from lomo_runs import start
from lsp_runs import lsp_json, settled, small
from tiny_models import tiny_batch

deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False)
rank, world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()
learned = {"projector": "learned", "check_interval": 2, "bias_threshold": 0.1, "eps": 1e-5}
cases = {
    "refits": lsp_json(lr=1e-3, clipping=0.1, params=learned),
    "on the device": lsp_json(lr=1e-3, offload=False, params={"eps": 1e-5}),
    "clipped together": lsp_json(lr=1e-3, clipping=0.1, params={"eps": 1e-5, "clip_scope": "global"}),
    "poisoned": lsp_json(lr=1e-3, params={"eps": 1e-5}),
}
results = {}
for name, config in cases.items():
    config["train_micro_batch_size_per_gpu"] = 4 // world_size
    engine = start(config, small(seed=rank))  # rank 0's weights count
    mine = slice(rank * 4 // world_size, (rank + 1) * 4 // world_size)
    for step in range(5):
        batch = {k: v[mine] for k, v in tiny_batch("llama", seed=step, batch_size=4, length=8).items()}
        loss = engine(**batch).loss
        if name == "poisoned" and step == 1 and rank == world_size - 1:
            loss = loss * float("nan")
        engine.backward(loss)
        engine.step()
    results[name] = (settled(engine), engine.get_global_grad_norm(), engine.skipped_steps)
torch.save(results, Path(sys.argv[2]) / f"{rank}-of-{world_size}.pt")
"""


@pytest.mark.slow
def test_two_ranks_are_one_of_twice_the_batch(run_ranks: Callable[..., list[str]], tmp_path: Path) -> None:
    for num_ranks in (1, 2):
        run_ranks(SCRIPT, str(REPO / "tests"), str(tmp_path), num_ranks=num_ranks, OMP_NUM_THREADS=1)
    alone, first, second = (torch.load(tmp_path / file) for file in ("0-of-1.pt", "0-of-2.pt", "1-of-2.pt"))
    for case, (weights, norm, num_skipped) in first.items():
        assert (norm, num_skipped) == second[case][1:]
        for name, value in weights.items():
            assert torch.equal(value, second[case][0][name]), (case, name)
            torch.testing.assert_close(value, alone[case][0][name], rtol=0, atol=5e-5, msg=f"{case} {name}")
        assert num_skipped == alone[case][2] == (case == "poisoned")
