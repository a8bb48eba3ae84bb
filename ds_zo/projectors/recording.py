"""Many small kernels, launched as one again and again.

A step of a fit is some sixty kernels of a few microseconds each, which take a millisecond to launch one by one. They
read and write the same places every time, so a CUDA graph of one step does for all the others.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from deepspeed.utils import logger

from ds_zo.ops.recording import recorded


class GradientRecorder:
    """Recordings are used one after the other, and share their memory until `release`."""

    def __init__(self) -> None:
        self._graph: torch.cuda.CUDAGraph | None = None
        self._stream: torch.cuda.Stream | None = None
        """One for all recordings: what was taken on another stream, the allocator does not give again, not even within
        a pool. And streams come from a ring of 32: one for each would soon be one that somebody copies on."""
        self._gave_up = False

    def record(self, work: Callable[[], None], device: torch.device) -> Callable[[], None]:
        """What does again what `work` does, which must have run before and must not wait for the device: `work` itself
        where it cannot be recorded. An earlier recording is gone."""
        if self._gave_up or device.type != "cuda":
            return work
        try:
            self._graph = self._recorded(work, device)  # the one before has given its pool on
        except Exception as error:
            self._gave_up, self._graph = True, None
            logger.warning(f"ds_zo: projectors are fitted without CUDA graphs, for a step can't be recorded: {error}")
            return work
        return self._graph.replay

    def _recorded(self, work: Callable[[], None], device: torch.device) -> torch.cuda.CUDAGraph:
        if self._stream is None:
            self._stream = torch.cuda.Stream(device)
        pool = None if self._graph is None else self._graph.pool()
        try:
            return recorded(work, stream=self._stream, pool=pool)
        except torch.OutOfMemoryError:
            torch.cuda.empty_cache()  # the allocator does so before it gives up, but not while it records
        return recorded(work, stream=self._stream, pool=pool)

    def release(self) -> None:
        """Its memory goes back to the device. What was recorded has ended."""
        if self._graph is not None:
            self._graph = None
            torch.cuda.empty_cache()
