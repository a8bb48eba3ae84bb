"""The start-up table of two ranks: the first rank shows it, once an engine."""

from __future__ import annotations

from collections.abc import Callable

SCRIPT = """
import deepspeed
import ds_zo
from tests.helpers.tiny_models import tiny_model

deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False)
HOST = {"offload_param": {"device": "cpu"}}

def start(kind, zero, **params):
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": kind, "params": {"lr": 1e-4, **params}},
        "zero_optimization": zero,
    }
    deepspeed.initialize(model=tiny_model("llama", num_hidden_layers=2), config=config)[0].destroy()

start("ZO", {"stage": 0, **HOST})
start("ZO", {"stage": 3, **HOST}, num_directions=2, direction_parallel=2)
start("LOMO", {"stage": 3})
start("LSP", {"stage": 0})
"""


def test_the_first_rank_shows_a_table_for_each_engine(run_ranks: Callable[..., list[str]]) -> None:
    first, second = run_ranks(SCRIPT)
    assert "ds_zo: backend" not in second
    tables = [text.splitlines() for text in first.split("ds_zo: backend ")[1:]]
    assert [lines[0] for lines in tables] == ["zo on cpu", "zo on cpu", "lomo on cpu", "lsp on cpu"]
    rows = [dict(line.split(maxsplit=1) for line in lines[1:] if line.startswith("  ")) for lines in tables]
    assert rows[0]["ranks"] == "2, 2 batches a step"
    assert rows[1]["ranks"] == "2, 1 batch a step, each shared by 2 ranks: give all ranks of a group the same batch"
    assert rows[1]["host"].endswith("the part of one of 2 ranks")
    assert "all 2 blocks are sharded over the devices of 2 ranks" in rows[2]["weights"]
    assert "this rank's shards" in rows[2]["device"] and rows[2]["ranks"].startswith("2, gradients averaged in")
    assert all(row["model"] == rows[0]["model"] for row in rows), "shards of a sharded model are counted whole"
    assert "2 ranks average" in rows[3]["ranks"]
