"""Several files at a time.

Not by a pool of `concurrent.futures`: that takes no work once the interpreter has begun to end, which is when the last
checkpoint of a script is written.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable
from typing import TypeVar

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")

THREADS = max(2, min(12, (os.cpu_count() or 4) * 3 // 4))
"""Hashing takes about as long as writing, and one thread does about 1 GB/s of both. The rest is left to training."""


def in_threads(
    call: Callable[[_Item], _Result], items: Iterable[_Item], *, threads: int = THREADS, name: str = "ds_zo-files"
) -> list[_Result]:
    """`call` of each item, begun in their order. The first error is raised when what was begun is done; nothing is
    begun after it."""
    waiting = list(enumerate(items))[::-1]
    results: dict[int, _Result] = {}
    errors: list[BaseException] = []
    lock = threading.Lock()

    def work() -> None:
        while True:
            with lock:
                if errors or not waiting:
                    return
                number, item = waiting.pop()
            try:
                result = call(item)
            except BaseException as error:
                with lock:
                    errors.append(error)
                return
            with lock:
                results[number] = result

    crew = [threading.Thread(target=work, name=name) for _ in range(min(threads, len(waiting)) - 1)]
    try:
        for worker in crew:
            worker.start()
        work()
        for worker in crew:
            worker.join()
    except BaseException:  # an interrupt
        with lock:
            waiting.clear()
        for worker in crew:
            if worker.ident is not None:
                worker.join()
        raise
    if errors:
        raise errors[0]
    return [results[i] for i in range(len(results))]
