"""Records the steps of a fit as CUDA graphs.

A step of a fit has about sixty kernels of a few microseconds each. Launching them one by one takes a millisecond. They
use the same memory in every step, so a CUDA graph of one step can be replayed for the others.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from deepspeed.utils import logger

from ds_zo.ops.recording import recorded


class FitGraphRecorder:
    """Records work as a CUDA graph. Only the last recording can be replayed; all share one memory pool until
    `release`."""

    def __init__(self) -> None:
        self._graph: torch.cuda.CUDAGraph | None = None
        self._stream: torch.cuda.Stream | None = None
        """One stream for all recordings; None before the first. The allocator does not reuse memory of another stream,
        not even within a pool. PyTorch takes streams from a ring of 32, so new ones would soon coincide with streams
        that other code copies on."""
        self._gave_up = False

    def record(self, work: Callable[[], None], device: torch.device) -> Callable[[], None]:
        """Returns a function that repeats `work` by a CUDA graph, or `work` itself if it cannot be recorded.

        `work` must have run before and must not wait for the device. Earlier recordings become invalid."""
        if self._gave_up or device.type != "cuda":
            return work
        try:
            self._graph = self._recorded(work, device)  # reuses the memory pool of the recording before
        except Exception as error:
            self._gave_up, self._graph = True, None
            logger.warning(f"ds_zo: projectors are fitted without CUDA graphs: recording a step failed: {error}")
            return work
        return self._graph.replay

    def _recorded(self, work: Callable[[], None], device: torch.device) -> torch.cuda.CUDAGraph:
        if self._stream is None:
            self._stream = torch.cuda.Stream(device)
        pool = None if self._graph is None else self._graph.pool()
        try:
            return recorded(work, stream=self._stream, pool=pool)
        except torch.OutOfMemoryError:
            torch.cuda.empty_cache()  # which the allocator itself does not do during a recording
        return recorded(work, stream=self._stream, pool=pool)

    def release(self) -> None:
        """Frees the graph's memory. Its replays must have ended."""
        if self._graph is not None:
            self._graph = None
            torch.cuda.empty_cache()
