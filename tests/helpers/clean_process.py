"""A process without the threads that a test process gathers: forking beside them can leave a child waiting for ever."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import Any

from tests.helpers.forkserver import forkserver_context


def in_clean_process(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """The result of a function that forks, and can be imported by name."""
    with ProcessPoolExecutor(1, mp_context=forkserver_context()) as pool:
        return pool.submit(function, *args, **kwargs).result()
