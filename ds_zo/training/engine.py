"""The engine of a run, and the environment of its process."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from typing import Any

import deepspeed


def make_engine(model: Any, config: dict[str, Any]) -> Any:
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
