"""Recording what is launched as a CUDA graph."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch


def recorded(work: Callable[[], None], *, stream: torch.cuda.Stream, pool: Any = None) -> torch.cuda.CUDAGraph:
    """A graph of what `work` launches. `pool`: of a graph whose memory it may use too. Where something fails, Ctrl-C
    included, it is raised when nothing is being recorded any more."""
    graph = torch.cuda.CUDAGraph()
    pool = torch.cuda.graph_pool_handle() if pool is None else pool
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
            _recover(stream.device, pool)
    current.wait_stream(stream)
    if error is not None:
        raise error.with_traceback(None)  # which would keep the tensors of `work`
    return graph


def _recover(device: torch.device, pool: Any) -> None:
    """Where CUDA refuses to end a recording, versions of PyTorch leave their allocator as if it went on, which then
    frees nothing that another stream has used, and random numbers too, which then cannot be drawn. The first is told;
    for the second a recording must come to an end."""
    with suppress(AttributeError, RuntimeError):
        torch._C._cuda_endAllocateToPool(device.index, pool)
    with suppress(RuntimeError):
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(capture_error_mode="thread_local")
        torch.zeros(1, device=device)
        graph.capture_end()


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
