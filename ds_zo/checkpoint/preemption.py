"""Lets a training loop ask between two steps whether SIGTERM has come."""

from __future__ import annotations

import signal
from types import FrameType, TracebackType
from typing import Any

import torch
import torch.distributed as dist


class Preemption:
    """Inside this context SIGTERM does not end the process. `requested()` returns True on all ranks once one got it.

    with Preemption() as preemption:
        for batch in batches:
            ...
            if preemption.requested():
                engine.save_checkpoint(folder)
                break
    """

    def __init__(self) -> None:
        self._came = False
        self._previous_handler: Any = None

    def __enter__(self) -> Preemption:
        self._previous_handler = signal.signal(signal.SIGTERM, self._note_signal)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        signal.signal(signal.SIGTERM, self._previous_handler)

    def _note_signal(self, number: int, frame: FrameType | None) -> None:
        self._came = True

    def requested(self) -> bool:
        """Whether SIGTERM has come to any rank. All ranks must call it after the same step."""
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return self._came
        device = "cuda" if dist.get_backend() == "nccl" else "cpu"
        came = torch.tensor(int(self._came), device=device)
        dist.all_reduce(came, op=dist.ReduceOp.MAX)
        self._came = bool(came.item())
        return self._came
