"""Log lines that are shown at DeepSpeed's default log level."""

from __future__ import annotations

import logging

import deepspeed.comm as dist
from deepspeed.utils import log_dist, logger


def show(text: str) -> None:
    """Logs a line at INFO on rank 0, also when the logger's level is WARNING, as DeepSpeed's is by default.

    So users see the settings that were chosen automatically. A logger set to ERROR or higher stays silent.
    """
    if logger.getEffectiveLevel() <= logging.WARNING:
        _emit(text, logging.INFO, "show")


def warn(text: str, *, level: int = logging.WARNING) -> None:
    """Logs a warning on rank 0."""
    log_dist(f"ds_zo: {text}", ranks=[0], level=level)


def show_details(text: str) -> None:
    """Logs lines at DEBUG on rank 0, if the logger's level is DEBUG.

    Trainer's `--log_level debug` sets the level of DeepSpeed's logger and leaves its handler at WARNING. The lines are
    shown then too.
    """
    if logger.getEffectiveLevel() <= logging.DEBUG:
        _emit(text, logging.DEBUG, "show_details")


def _emit(text: str, level: int, caller: str) -> None:
    """Gives a record to every handler that shows warnings, whatever the handler's level below WARNING is."""
    if dist.is_initialized() and dist.get_rank() != 0:
        return
    record = logger.makeRecord(logger.name, level, "ds_zo", 0, text, (), None, func=caller)
    source: logging.Logger | None = logger
    while source is not None:
        for handler in source.handlers:
            if handler.level <= logging.WARNING:
                handler.handle(record)
        source = source.parent if source.propagate else None
