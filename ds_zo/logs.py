"""Log lines that are shown at DeepSpeed's default log level."""

from __future__ import annotations

import logging

import deepspeed.comm as dist
from deepspeed.utils import logger


def show(text: str) -> None:
    """Logs a line at INFO on rank 0, also when the logger's level is WARNING, as DeepSpeed's is by default.

    So users see the settings that were chosen automatically. A logger set to ERROR or higher stays silent.
    """
    if logger.getEffectiveLevel() > logging.WARNING or (dist.is_initialized() and dist.get_rank() != 0):
        return
    record = logger.makeRecord(logger.name, logging.INFO, "ds_zo", 0, text, (), None, func="show")
    source: logging.Logger | None = logger
    while source is not None:
        for handler in source.handlers:
            if handler.level <= logging.WARNING:
                handler.handle(record)
        source = source.parent if source.propagate else None
