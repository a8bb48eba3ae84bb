"""Many small kernels, launched as one again and again.

A step of a fit is some sixty kernels of a few microseconds each, which take a millisecond to launch one by one. They
read and write the same places every time, so a CUDA graph of one step does for all the others.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from deepspeed.utils import logger


@contextmanager
def uncollected() -> Iterator[None]:
    """Inside, no garbage is collected: pinned memory that was left to it waits for the device when it goes, and a
    recording of any thread would fail."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


class Recorder:
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
        found = self._recorded(work, device)
        if isinstance(found, torch.OutOfMemoryError):
            torch.cuda.empty_cache()  # the allocator does so before it gives up, but not while it records
            found = self._recorded(work, device)
        if isinstance(found, Exception):
            self._gave_up = True
            logger.warning(f"ds_zo: projectors are fitted without CUDA graphs, for a step can't be recorded: {found}")
            return work
        self._graph = found  # the one before has given its pool on
        return found.replay

    def _recorded(self, work: Callable[[], None], device: torch.device) -> torch.cuda.CUDAGraph | Exception:
        if self._stream is None:
            self._stream = torch.cuda.Stream(device)
        graph = torch.cuda.CUDAGraph()
        stream, current = self._stream, torch.cuda.current_stream(device)
        stream.wait_stream(current)
        error: Exception | None = None
        with uncollected(), torch.cuda.stream(stream):
            pool = None if self._graph is None else self._graph.pool()
            graph.capture_begin(pool=pool, capture_error_mode="thread_local")
            try:
                work()
            except Exception as raised:
                error = raised.with_traceback(None)  # which would keep the tensors of `work`
            try:
                graph.capture_end()
            except RuntimeError as raised:
                error = error or raised.with_traceback(None)
        current.wait_stream(stream)
        return graph if error is None else error

    def release(self) -> None:
        """Its memory goes back to the device. What was recorded has ended."""
        if self._graph is not None:
            self._graph = None
            torch.cuda.empty_cache()
