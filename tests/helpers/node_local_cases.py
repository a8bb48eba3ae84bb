"""A run whose ranks write checkpoints to the storage of their own machines."""

from __future__ import annotations

import copy
import os
from pathlib import Path
from typing import Any

import deepspeed
import torch.distributed as dist

from tests.helpers.lomo_runs import config_for
from tests.helpers.lsp_runs import lsp_json
from tests.helpers.zo_rank_cases import global_batches, json_for, mine
from tests.helpers.zo_runs import Toy, train

JSONS: dict[str, dict[str, Any]] = {
    "ZO, stage 3": json_for(stage=3),
    "LOMO, stage 3": {**config_for("LOMO"), "zero_optimization": {"stage": 3}},
    "LOMO, stage 3, streamed": config_for("LOMO", zero_optimization={"stage": 3, "offload_param": {"device": "cpu"}}),
    "LSP, stage 0": lsp_json(),
    "LSP, stage 2": lsp_json(zero_optimization={"stage": 2, "offload_optimizer": {"device": "cpu"}}),
}


def save_and_load(rank: int, folder: Path) -> dict[str, Any]:
    """Of each run: losses after a checkpoint, and again after it is loaded, where every rank is the first of its
    machine."""
    os.environ["LOCAL_RANK"] = "0"
    return {name: _losses(rank, folder / name, name) for name in JSONS}


def _losses(rank: int, folder: Path, name: str) -> dict[str, Any]:
    model = Toy()
    config = {**copy.deepcopy(JSONS[name]), "train_micro_batch_size_per_gpu": 1}
    config["checkpoint"] = {"use_node_local_storage": True}
    engine = deepspeed.initialize(model=model, model_parameters=list(model.parameters()), config=config)[0]
    batches = [mine(batch, index=rank, of=dist.get_world_size()) for batch in global_batches(5)]
    train(engine, batches[:2])
    engine.save_checkpoint(str(folder / str(rank)))
    before = train(engine, batches[2:])
    engine.load_checkpoint(str(folder / str(rank)))
    after = train(engine, batches[2:])
    engine.destroy()
    return {"before": before, "after": after}
