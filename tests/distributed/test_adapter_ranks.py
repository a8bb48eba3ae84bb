"""Adapters on two ranks: the weights of one rank with twice the batch, and one host copy of the base at stage 3."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("peft")
pytestmark = pytest.mark.slow

SCRIPT = """
import sys
from pathlib import Path
import deepspeed, torch
import ds_zo
from tests.helpers.adapter_runs import adapted, adapter_json, start, weights
from tests.helpers.batch_sizes import batch_sizes
from tests.helpers.tiny_models import tiny_batch

folder = Path(sys.argv[1])
deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False)
rank, world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()

def run(*, stage=0, save=None, load=None, first=0, **more):
    config = adapter_json(gradient_clipping=0.1, train_micro_batch_size_per_gpu=4 // world_size, **more)
    config["zero_optimization"]["stage"] = stage
    model = adapted("rslora")
    sizes = batch_sizes(model)
    engine = start(model, config)
    if load is not None:
        engine.load_checkpoint(str(folder / load))
    mine = slice(rank * 4 // world_size, (rank + 1) * 4 // world_size)
    norms = []
    for step in range(first, 4):
        batch = {k: v[mine] for k, v in tiny_batch("llama", seed=step, batch_size=4, length=8).items()}
        engine.eval()
        if rank == 0:  # an evaluation of one rank
            with torch.no_grad():
                engine(**batch)
        engine.train()
        engine.backward(engine(**batch).loss)
        engine.step()
        norms.append(engine.get_global_grad_norm())
        if save is not None and step == 1:
            engine.save_checkpoint(str(folder / save))
    found = {"state": weights(engine.module), "norms": norms, "samples_at_once": sizes[-1]}
    if engine.backend.blocks.is_streamed:
        found["host"] = engine.backend.blocks.store.store.nbytes
    engine.destroy()
    return found

results = {"streamed": run(), "nf4": run(frozen_dtype="nf4"), "tiles": run(tiles=2)}
if world_size > 1:
    results["shared"] = run(stage=3, save="saved")
    results["shared tiles"] = run(stage=3, tiles=2)
    results["shared nf4"] = run(stage=3, frozen_dtype="nf4")
    results["resumed"] = run(stage=3, load="saved", first=2)
torch.save(results, folder / f"{world_size}-{rank}.pt")
"""


@pytest.fixture(scope="module")
def runs(run_ranks: Callable[..., list[str]], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder: Path = tmp_path_factory.mktemp("adapter")
    for num_ranks in (1, 2):
        run_ranks(SCRIPT, str(folder), num_ranks=num_ranks)
    return {path.stem: torch.load(path) for path in folder.glob("*.pt")}


def test_two_ranks_are_one_of_twice_the_batch(runs: dict[str, Any]) -> None:
    for name, one in runs["1-0"].items():
        for rank in ("2-0", "2-1"):
            two = runs[rank][name]
            assert two["norms"] == pytest.approx(one["norms"], rel=1e-4), name
            for key, value in one["state"].items():
                torch.testing.assert_close(two["state"][key], value, rtol=0, atol=1e-5, msg=f"{name} {key}")
                assert torch.equal(two["state"][key], runs["2-0"][name]["state"][key]), "ranks have the same bits"


def test_tiles_are_half_of_a_ranks_batch(runs: dict[str, Any]) -> None:
    for ranks, found in runs.items():
        for name, run in found.items():
            assert run["samples_at_once"] == 4 // int(ranks[0]) // (2 if "tiles" in name else 1), (ranks, name)


def test_placements_and_a_resumed_run_are_equal_bit_for_bit(runs: dict[str, Any]) -> None:
    two = runs["2-1"]
    for a, b in (("streamed", "shared"), ("nf4", "shared nf4"), ("tiles", "shared tiles"), ("shared", "resumed")):
        assert all(torch.equal(value, two[b]["state"][name]) for name, value in two[a]["state"].items()), (a, b)
    assert two["resumed"]["norms"] == two["shared"]["norms"][2:]
    assert two["shared"]["host"] < 0.6 * two["streamed"]["host"], "ranks share one host copy"
