"""Runs a function on several files at a time.

A pool of `concurrent.futures` accepts no work once the interpreter has begun to end. A script's last checkpoint may be
written at that time, so these are plain threads.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable
from typing import TypeVar

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")

THREADS = max(2, min(12, (os.cpu_count() or 4) * 3 // 4))
"""Number of threads. One thread hashes and writes about 1 GB/s, and a quarter of the cores is left to training."""


def in_threads(
    call: Callable[[_Item], _Result], items: Iterable[_Item], *, threads: int = THREADS, name: str = "ds_zo-files"
) -> list[_Result]:
    """Calls `call` with each item, begun in their order, and returns the results in that order.

    After an error no call is begun. The error is raised when the calls that had begun have ended.
    """
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

    workers = [threading.Thread(target=work, name=name) for _ in range(min(threads, len(waiting)) - 1)]
    try:
        for worker in workers:
            worker.start()
        work()
        for worker in workers:
            worker.join()
    except BaseException:  # an interrupt
        with lock:
            waiting.clear()
        for worker in workers:
            if worker.ident is not None:
                worker.join()
        raise
    if errors:
        raise errors[0]
    return [results[i] for i in range(len(results))]
