"""SIGTERM as a question that a training loop asks between two steps."""

from __future__ import annotations

import signal
from types import FrameType, TracebackType
from typing import Any

import torch
import torch.distributed as dist


class Preemption:
    """While entered, SIGTERM does not end the process: `requested()` says that it came, on every rank if on one.

    with Preemption() as preemption:
        for batch in batches:
            ...
            if preemption.requested():
                engine.save_checkpoint(folder)
                break
    """

    def __init__(self) -> None:
        self._came = False
        self._before: Any = None

    def __enter__(self) -> Preemption:
        self._before = signal.signal(signal.SIGTERM, self._take)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        signal.signal(signal.SIGTERM, self._before)

    def _take(self, number: int, frame: FrameType | None) -> None:
        self._came = True

    def requested(self) -> bool:
        """Every rank must ask, after the same step."""
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return self._came
        device = "cuda" if dist.get_backend() == "nccl" else "cpu"
        came = torch.tensor(int(self._came), device=device)
        dist.all_reduce(came, op=dist.ReduceOp.MAX)
        self._came = bool(came.item())
        return self._came
