"""Captures kernel launches as a CUDA graph."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch


def recorded(work: Callable[[], None], *, stream: torch.cuda.Stream, pool: Any = None) -> torch.cuda.CUDAGraph:
    """Captures the launches of `work` as a graph. `pool` is the memory pool of graphs whose memory this graph may share
    (None: a new pool). An error in `work`, Ctrl-C included, is raised after the capture has ended."""
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
        raise error.with_traceback(None)  # the traceback would keep the tensors of `work` alive
    return graph


def _recover(device: torch.device, pool: Any) -> None:
    """Restores PyTorch's state after a capture that CUDA refused to end.

    Some PyTorch versions leave the allocator in capture mode, in which it frees no memory that another stream has used.
    `_cuda_endAllocateToPool` ends that mode. They also leave the random number generator in capture mode, in which no
    numbers can be drawn. A second capture that ends normally resets it.
    """
    with suppress(AttributeError, RuntimeError):
        torch._C._cuda_endAllocateToPool(device.index, pool)
    with suppress(RuntimeError):
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(capture_error_mode="thread_local")
        torch.zeros(1, device=device)
        graph.capture_end()


@contextmanager
def _uncollected() -> Iterator[None]:
    """Turns garbage collection off inside. Collecting pinned memory waits for the device, which makes a capture in any
    thread fail."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
