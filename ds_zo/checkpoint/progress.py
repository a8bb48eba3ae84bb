"""How far a save, a check or an export has come, for those that take long enough to wonder."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tqdm import tqdm

AFTER_S = 3.0


@contextmanager
def progress_bar(doing: str, *, nbytes: int, shown: bool) -> Iterator[Callable[[int], None]]:
    """Yields a function that threads tell of bytes done."""
    lock = threading.Lock()
    bar = tqdm(total=nbytes, unit="B", unit_scale=True, desc=doing, delay=AFTER_S, disable=not shown, leave=False)

    def advance(nbytes: int) -> None:
        with lock:
            bar.update(nbytes)

    with bar:
        yield advance
