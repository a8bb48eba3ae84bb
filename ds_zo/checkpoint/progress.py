"""A progress bar for saves, checks and exports that take longer than a few seconds."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tqdm import tqdm

AFTER_S = 3.0
"""Seconds before a bar is shown."""


@contextmanager
def progress_bar(doing: str, *, nbytes: int, shown: bool) -> Iterator[Callable[[int], None]]:
    """Yields a function that threads call with the number of bytes they have done."""
    lock = threading.Lock()
    bar = tqdm(total=nbytes, unit="B", unit_scale=True, desc=doing, delay=AFTER_S, disable=not shown, leave=False)

    def advance(nbytes: int) -> None:
        with lock:
            bar.update(nbytes)

    with bar:
        yield advance
