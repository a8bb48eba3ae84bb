"""Ctrl-C that comes while an update is half made is answered when it is whole.

[Note: whole steps] A weight and the count of the updates it includes change one after the other, and what a backward
pass has added (LOMO: to the weights) is not counted before `engine.step()`. KeyboardInterrupt in between would leave a
state that nothing can tell from a good one: saved and resumed, an update would be made twice, or by half. Where that
could happen SIGINT waits: for the lines of a fold, and from the start of `engine.backward()` to the end of
`engine.step()`. A second one does not wait, unless it is the same one: programs that start others (`timeout`) hand
Ctrl-C on that the terminal has sent to both. Not held: a bare `loss.backward()`.
"""

from __future__ import annotations

import importlib
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

from deepspeed.utils import logger

_signal: Any = importlib.import_module("_signal")
"""What `signal` wraps. It is asked at every block, and turning handlers into enums and back takes twenty times longer
than setting them."""

_ECHO_S = 0.5
"""What comes so soon after the first is the same Ctrl-C."""


class Interrupts:
    """SIGINT of this process. Python delivers signals to the main thread; elsewhere there is nothing to hold."""

    def __init__(self) -> None:
        self._depth = 0
        self._is_held = self._came = False
        self._came_s = 0.0
        self._previous: Any = None

    # Every method is right if KeyboardInterrupt is raised at any of its lines: ours is set before anything counts on
    # it, and put back last.

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """What comes inside is delivered on leaving."""
        if not _in_main_thread():
            yield
            return
        self._enter()
        try:
            yield
        finally:
            self._leave()

    def hold(self) -> None:
        """Until `release`."""
        if _in_main_thread() and not self._is_held:
            self._enter()
            self._is_held = True

    def release(self) -> None:
        if _in_main_thread() and self._is_held:
            self._is_held = False
            self._leave()

    def _enter(self) -> None:
        if self._depth == 0:
            self._came = False
            previous = _signal.getsignal(signal.SIGINT)
            if previous != self._on_signal:
                self._previous = previous
            if callable(previous) or previous == signal.SIG_DFL:  # else it is ignored, or not Python's
                with suppress(ValueError):  # inside other programs, what `threading` calls main need not be
                    _signal.signal(signal.SIGINT, self._on_signal)
        self._depth += 1

    def _leave(self) -> None:
        self._depth -= 1
        if self._depth == 0:
            self._put_back()  # first: one that came later would wait for the next update
            came, self._came = self._came, False
            if came:
                signal.raise_signal(signal.SIGINT)

    def _put_back(self) -> None:
        """Unless somebody has set another since."""
        if _signal.getsignal(signal.SIGINT) == self._on_signal:
            _signal.signal(signal.SIGINT, self._previous)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        now_s = time.monotonic()
        if self._came:
            if now_s - self._came_s < _ECHO_S:
                return
            self._came = False
            self._put_back()
            signal.raise_signal(signal.SIGINT)
            return
        self._came, self._came_s = True, now_s
        logger.warning("ds_zo: Ctrl-C waits for the update that is being made; another one does not")


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


interrupts = Interrupts()
