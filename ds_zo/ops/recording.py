"""Recording what is launched as a CUDA graph."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch


def recorded(work: Callable[[], None], *, stream: torch.cuda.Stream, pool: Any = None) -> torch.cuda.CUDAGraph:
    """A graph of what `work` launches. `pool`: of a graph whose memory it may use too. Where something fails, Ctrl-C
    included, it is raised when nothing is being recorded any more."""
    graph = torch.cuda.CUDAGraph()
    current = torch.cuda.current_stream(stream.device)
    stream.wait_stream(current)
    error: BaseException | None = None
    with _uncollected(), torch.cuda.stream(stream):
        graph.capture_begin(pool=pool, capture_error_mode="thread_local")
        try:
            work()
        except BaseException as raised:
            error = raised
        try:
            graph.capture_end()
        except RuntimeError as raised:
            error = error or raised
    current.wait_stream(stream)
    if error is not None:
        raise error.with_traceback(None)  # which would keep the tensors of `work`
    return graph


@contextmanager
def _uncollected() -> Iterator[None]:
    """Inside, no garbage is collected: pinned memory that was left to it waits for the device when it goes, and a
    recording of any thread would fail."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
