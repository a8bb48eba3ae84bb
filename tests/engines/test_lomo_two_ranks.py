"""Two gloo ranks stay bit-identical, and make the run of one rank with both batches."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import torch
from conftest import REPO

SCRIPT = """
import sys
from pathlib import Path
sys.path[:0] = [sys.argv[1], sys.argv[1] + "/engines"]
import deepspeed, torch
from lomo_runs import config_for, lively, start, streamed, weights_of
from tiny_models import tiny_batch

deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False)
rank, world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()
cases = {
    "one pass": config_for(),
    "clipped": config_for(clipping=0.5),
    "grouped": config_for(clipping=0.5, params={"norm_scope": "group"}),
    "adalomo": config_for("AdaLOMO", lr=1e-2, clipping=0.5),
    "bf16": config_for(lr=1e-2, clipping=0.5, bf16={"enabled": True}),
    "poisoned": config_for(clipping=0.5),
    "streamed": streamed(clipping=0.5),
    "streamed, grouped": streamed(clipping=0.5, params={"norm_scope": "group"}),
}
results = {}
for name, config in cases.items():
    config["train_micro_batch_size_per_gpu"] = 4 // world_size
    engine = start(config, lively("llama", seed=rank))  # rank 0's weights count
    mine = slice(rank * 4 // world_size, (rank + 1) * 4 // world_size)
    for step in range(3):
        batch = {k: v[mine] for k, v in tiny_batch("llama", seed=step, batch_size=4, length=8).items()}
        loss = engine(**batch).loss
        if name == "poisoned" and step == 1 and rank == world_size - 1:
            loss = loss * float("nan")
        engine.backward(loss)
        engine.step()
    results[name] = (weights_of(engine.module), engine.get_global_grad_norm(), engine.skipped_steps)
torch.save(results, Path(sys.argv[2]) / f"{rank}-of-{world_size}.pt")
"""

CASES = ["one pass", "clipped", "grouped", "adalomo", "bf16", "poisoned", "streamed", "streamed, grouped"]


def test_two_ranks_are_one_of_twice_the_batch(run_ranks: Callable[..., list[str]], tmp_path: Path) -> None:
    for num_ranks in (1, 2):
        run_ranks(SCRIPT, str(REPO / "tests"), str(tmp_path), num_ranks=num_ranks, OMP_NUM_THREADS=1)
    alone, first, second = (
        torch.load(os.path.join(tmp_path, file)) for file in ("0-of-1.pt", "0-of-2.pt", "1-of-2.pt")
    )
    for case in CASES:
        assert first[case][1:] == second[case][1:]
        for name, value in first[case][0].items():
            assert torch.equal(value, second[case][0][name]), (case, name)
            if case != "bf16":  # there gradients are rounded before they are averaged
                torch.testing.assert_close(value, alone[case][0][name], rtol=0, atol=2e-5, msg=f"{case} {name}")
        assert first[case][2] == alone[case][2] == (case == "poisoned")
