"""A progress bar for saves, checks and exports that take longer than a few seconds."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar
from weakref import WeakSet

from tqdm import tqdm

AFTER_S = 3.0
"""Seconds before a bar is shown."""


class _Bar(tqdm):
    """A bar with a lock of this process alone.

    Each bar takes its class's lock, also a bar that is not shown. tqdm's own lock is shared with all processes that are
    forked after the first bar: a process that is killed while it has that lock would stop every later save.
    """

    _lock = threading.RLock()
    _instances: ClassVar[WeakSet[Any]] = WeakSet()
    """The bars that the lock guards."""


@contextmanager
def progress_bar(doing: str, *, nbytes: int, shown: bool) -> Iterator[Callable[[int], None]]:
    """Yields a function that threads call with the number of bytes they have done."""
    lock = threading.Lock()
    bar = _Bar(total=nbytes, unit="B", unit_scale=True, desc=doing, delay=AFTER_S, disable=not shown, leave=False)

    def advance(nbytes: int) -> None:
        with lock:
            bar.update(nbytes)

    with bar:
        yield advance
