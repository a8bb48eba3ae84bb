"""What a user should see without asking."""

from __future__ import annotations

import logging

import deepspeed.comm as dist
from deepspeed.utils import logger


def show(text: str) -> None:
    """Logs at INFO on rank 0, past the WARNING that DeepSpeed's logger starts with: what was chosen automatically is
    worth knowing without asking again. A logger set to errors alone stays silent."""
    if logger.getEffectiveLevel() > logging.WARNING or (dist.is_initialized() and dist.get_rank() != 0):
        return
    record = logger.makeRecord(logger.name, logging.INFO, "ds_zo", 0, text, (), None, func="show")
    source: logging.Logger | None = logger
    while source is not None:
        for handler in source.handlers:
            if handler.level <= logging.WARNING:
                handler.handle(record)
        source = source.parent if source.propagate else None
