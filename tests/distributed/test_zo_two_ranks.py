"""ZO on two ranks: one global batch, the same weights on both, and the run that one rank would have made."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.tiny_models import tiny_model

SCRIPT = """
import sys
from pathlib import Path
import deepspeed, torch
import transformers as hf
import ds_zo
from ds_zo.streaming.loading import load_pretrained
from tests.helpers.tiny_models import tiny_batch, tiny_model

folder = Path(sys.argv[1])
deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False)
rank, world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()

def run(model, *, poison=None, accumulation=1, offload=True, params=None, **more):
    config = {
        "train_micro_batch_size_per_gpu": 4 // world_size,
        "gradient_accumulation_steps": accumulation,
        "optimizer": {"type": "ZO", "params": {"lr": 1e-3, "zo_eps": 1e-2, **(params or {})}},
        "zero_optimization": {"stage": 0, "offload_param": {"device": "cpu" if offload else "none"}},
        "ds_zo": {"stream": {"writeback_interval": 3}},
        **more,
    }
    engine = deepspeed.initialize(model=model, config=config)[0]
    norms, mine = [], slice(rank * 4 // world_size, (rank + 1) * 4 // world_size)
    for step in range(4 * accumulation):
        batch = {k: v[mine] for k, v in tiny_batch("llama", seed=step, batch_size=4, length=8).items()}
        loss = engine(**batch).loss
        if poison == step and rank == world_size - 1:
            loss = loss * float("nan")
        engine.backward(loss)
        engine.step()
        if engine.global_steps > len(norms):
            norms.append(engine.get_global_grad_norm())
    state = {name: value.clone() for name, value in engine.module.state_dict().items()}
    return {"state": state, "norms": norms, "skipped": engine.skipped_steps, "steps": engine.global_steps}

def model():
    return tiny_model("llama", seed=rank, num_hidden_layers=2)  # rank 0's weights count

bf16 = {"bf16": {"enabled": True}}
torch.save(
    {
        "streamed": run(model()),
        "resident": run(model(), offload=False),
        "accumulated": run(model(), accumulation=2),
        "two directions": run(model(), params={"num_directions": 2}),
        "bf16": run(model(), **bf16),
        "poisoned": run(model(), poison=2),
        "dropout": run(tiny_model("llama", attention_dropout=0.5, num_hidden_layers=2)),
        "from a folder": run(load_pretrained(hf.AutoModelForCausalLM, str(folder / "model")).train()),
    },
    folder / f"{rank}-of-{world_size}.pt",
)
"""

CASES = ["streamed", "resident", "accumulated", "two directions", "bf16", "poisoned", "dropout", "from a folder"]
Results = dict[str, dict[str, Any]]


@pytest.fixture(scope="module")
def results(run_ranks: Callable[..., list[str]], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Results]:
    """What each rank of two, and the one of one, ended with."""
    folder = tmp_path_factory.mktemp("ranks")
    tiny_model("llama", num_hidden_layers=2).save_pretrained(folder / "model")
    for world_size in (2, 1):
        run_ranks(SCRIPT, str(folder), num_ranks=world_size)
    return {file.stem: torch.load(file) for file in Path(folder).glob("*.pt")}


@pytest.mark.parametrize("case", CASES)
def test_ranks_stay_identical(case: str, results: dict[str, Results]) -> None:
    first, second = results["0-of-2"][case], results["1-of-2"][case]
    assert str(first["norms"]) == str(second["norms"])
    for name, value in first["state"].items():
        assert torch.equal(value, second["state"][name]), name


EXACT = [case for case in CASES if case not in ("bf16", "dropout")]


@pytest.mark.parametrize("case", EXACT)
def test_two_ranks_make_the_run_of_one(case: str, results: dict[str, Results]) -> None:
    """Bound: a loss of about 4.2 is rounded to 1e-6 of itself in each pass, which g divides by 2 zo_eps; a weight moves
    by lr * g * z with |z| < 5, and later steps start from weights that differ by so much."""
    two, one = results["0-of-2"][case], results["0-of-1"][case]
    g_error = 2 * 4.2e-6 / 2e-2
    for ours, theirs in zip(two["norms"], one["norms"], strict=True):
        if case != "poisoned" or theirs == theirs:
            assert abs(ours - theirs) <= 2 * g_error
    bound = 4 * 1e-3 * g_error * 5 * 2
    start = tiny_model("llama", num_hidden_layers=2).state_dict()
    for name, value in two["state"].items():
        assert (value - one["state"][name]).abs().max() <= bound, name
        assert (value - start[name]).abs().max() > 10 * bound, f"{name} hardly moved: nothing was compared"


def test_a_batch_that_is_bad_on_one_rank_is_skipped_on_both(results: dict[str, Results]) -> None:
    for rank in ("0-of-2", "1-of-2", "0-of-1"):
        assert results[rank]["poisoned"]["skipped"] == 1
        assert results[rank]["poisoned"]["steps"] == 4
        assert all(value.isfinite().all() for value in results[rank]["poisoned"]["state"].values())


def test_where_weights_come_from_changes_nothing(results: dict[str, Results]) -> None:
    for rank, found in results.items():
        for name, value in found["streamed"]["state"].items():
            assert torch.equal(value, found["resident"]["state"][name]), (rank, name)
            assert torch.equal(value, found["from a folder"]["state"][name]), (rank, name)
