"""A rank that dies, or stops, and what the others learn of it."""

from __future__ import annotations

import os
import time
from typing import Any

import torch.distributed as dist

from tests.helpers.lomo_rank_cases import CASES, batch_of, with_stage
from tests.helpers.lomo_runs import lively, start
from tests.helpers.lsp_rank_cases import json_of
from tests.helpers.zo_rank_cases import digest, json_for

JSONS: dict[str, dict[str, Any]] = {
    "ZO": json_for(),
    "ZO, sharded": json_for(stage=3),
    "LOMO": CASES["clipped"],
    "LOMO, sharded": with_stage(CASES["streamed"], 3),
    "LOMO, sharded on devices": with_stage(CASES["one pass"], 3),
    "LSP": json_of({"stage": 2}, 2),
}


def end(rank: int, name: str, stops: bool) -> Any:
    """After two steps, of which the second has a shorter batch there, the last rank is gone."""
    engine, is_last = start(JSONS[name], lively("llama")), rank == dist.get_world_size() - 1
    for seed in (0, 1):
        batch = batch_of(1, seed=10 * seed + rank, on=engine)
        if seed and is_last:
            batch = {key: value[:, :5] for key, value in batch.items()}
        engine.backward(engine(**batch).loss)
        engine.step()
    digests = [""] * dist.get_world_size()
    dist.all_gather_object(digests, digest(engine))
    assert len(set(digests)) == 1, "a short last batch parted the ranks"
    if is_last:
        time.sleep(8 * stops)
        os._exit(9)
    began = time.monotonic()
    try:
        engine.backward(engine(**batch_of(1, seed=20, on=engine)).loss)
        engine.step()
        engine.module.state_dict()
    except RuntimeError as error:
        return str(error), time.monotonic() - began  # a str alone would be a failure
    return "went on", time.monotonic() - began
