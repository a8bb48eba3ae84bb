"""The engine of a run: DeepSpeed's, or a reference that ds_zo is compared with."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from typing import Any

import deepspeed
import torch
from deepspeed.accelerator import get_accelerator

from ds_zo.reference.galore import TYPE as GALORE
from ds_zo.reference.galore import galore_engine
from ds_zo.reference.mezo_engine import MeZOEngine

REFERENCE = "mezo"
"""The optimizer.type of in-memory MeZO, which ZO is compared with. DeepSpeed does not know it."""
REFERENCES = (REFERENCE, GALORE)
"""The optimizer.type of every reference, in lower case."""


def make_engine(model: Any, config: dict[str, Any]) -> Any:
    kind = str((config.get("optimizer") or {}).get("type", "")).lower()
    if kind == GALORE:
        return galore_engine(model, config)
    if kind == REFERENCE:
        deepspeed.init_distributed()
        return MeZOEngine(model, config, device=torch.device(get_accelerator().current_device_name()))
    trainable = [p for p in model.parameters() if p.requires_grad]
    return deepspeed.initialize(model=model, model_parameters=trainable, config=config)[0]


def samples_per_step(engine: Any) -> int:
    """Number of different examples that all ranks consume in a step."""
    return int(engine.train_batch_size()) // ranks_per_batch(engine)


def ranks_per_batch(engine: Any) -> int:
    """Number of ranks that train on one batch: ZO's `direction_parallel`, else 1."""
    resolved = getattr(engine, "resolved", None)  # other engines than ds_zo's have none
    return 1 if resolved is None else int(resolved.optimizer.ranks_per_batch)


def ensure_environment() -> None:
    """Makes a process without a launcher a world of one, on a free port. A launcher has set these variables.

    In a world of one, DeepSpeed does not compile its shared-memory collectives in this process. That takes minutes.
    """
    defaults = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    for name, value in defaults.items():
        os.environ.setdefault(name, value)
    if os.environ["WORLD_SIZE"] == "1":
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    if shutil.which("ninja") is None:  # DeepSpeed compiles by it; it is beside a Python whose environment is not active
        os.environ["PATH"] += os.pathsep + str(Path(sys.executable).parent)
