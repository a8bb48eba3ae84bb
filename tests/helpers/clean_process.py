"""A process without the threads that a test process gathers: forking beside them can leave a child waiting for ever."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any


def in_clean_process(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """The result of a function that forks, and can be imported by name."""
    context = get_context("forkserver")
    context.set_forkserver_preload(["ds_zo.bench.runner", "ds_zo.backends.zo.backend"])  # once, for all that are forked
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        return pool.submit(function, *args, **kwargs).result()
