"""Many small kernels, launched as one again and again.

A step of a fit is some sixty kernels of a few microseconds each, which take a millisecond to launch one by one. They
read and write the same places every time, so a CUDA graph of one step does for all the others.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from deepspeed.utils import logger


class Recorder:
    """Recordings are used one after the other, and share their memory until `release`."""

    def __init__(self) -> None:
        self._graph: torch.cuda.CUDAGraph | None = None
        self._gave_up = False

    def record(self, work: Callable[[], None], device: torch.device) -> Callable[[], None]:
        """What does again what `work` does, which must have run before and must not wait for the device: `work` itself
        where it cannot be recorded. An earlier recording is gone."""
        if self._gave_up or device.type != "cuda":
            return work
        graph = torch.cuda.CUDAGraph()
        stream, current = torch.cuda.Stream(device), torch.cuda.current_stream(device)
        stream.wait_stream(current)
        error: Exception | None = None
        with torch.cuda.stream(stream):
            pool = None if self._graph is None else self._graph.pool()
            graph.capture_begin(pool=pool, capture_error_mode="thread_local")
            try:
                work()
            except Exception as raised:
                error = raised
            try:
                graph.capture_end()
            except RuntimeError as raised:
                error = error or raised
        current.wait_stream(stream)
        if error is not None:
            self._gave_up = True
            logger.warning(f"ds_zo: projectors are fitted without CUDA graphs, for a step can't be recorded: {error}")
            return work
        self._graph = graph  # the one before has given its pool on
        return graph.replay

    def release(self) -> None:
        """Its memory goes back to the device. What was recorded has ended."""
        if self._graph is not None:
            self._graph = None
            torch.cuda.empty_cache()
