"""Defers Ctrl-C (SIGINT) during an update until the update is complete.

[Note: whole steps] A weight and the counter of the updates that it includes change one after the other. LOMO's backward
changes weights that are counted only in `engine.step()`. A KeyboardInterrupt in between would leave a state that looks
consistent but is not: saved and resumed, an update would be made twice or in part. Therefore SIGINT is deferred while
ZO folds an update into a weight, at the end of a ZO pass, during each use of a recomputed block, and from the start of
`engine.backward()` to the end of `engine.step()`. A second Ctrl-C is not deferred. A signal that follows the first
within `_ECHO_S` counts as the same Ctrl-C. Programs that start others (`timeout`) forward a signal that the terminal
has already sent to both. For a `loss.backward()` that the user calls directly, SIGINT is deferred in uses of blocks
only.
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
"""The C module that `signal` wraps. It is called at every block, and `signal` converts handlers to enums and back,
which takes twenty times longer than setting them."""

_ECHO_S = 0.5
"""Seconds. A signal that follows the first so soon is the same Ctrl-C."""


class Interrupts:
    """The handling of SIGINT in this process. Python delivers signals to the main thread, so in other threads all
    methods do nothing."""

    def __init__(self) -> None:
        self._depth = 0
        """Number of `deferred` and `hold` that are in effect."""
        self._is_held = self._has_signal = False
        """`_is_held`: `hold` is in effect. `_has_signal`: a signal has been deferred."""
        self._signal_s = 0.0
        """Time of the deferred signal, of `time.monotonic`."""
        self._previous: Any = None
        """The handler that was set before this object's."""

    # Every method is correct if KeyboardInterrupt is raised at any of its lines: this object's handler is set before
    # any code relies on it, and the previous one is set again at the end.

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """Context in which SIGINT is deferred. A deferred signal is raised on exit."""
        if not _in_main_thread():
            yield
            return
        self._enter()
        try:
            yield
        finally:
            self._leave()

    def hold(self) -> None:
        """Defers SIGINT until `release`. A second call has no effect."""
        if _in_main_thread() and not self._is_held:
            self._enter()
            self._is_held = True

    def release(self) -> None:
        """Ends `hold`, if it is in effect, and raises a deferred signal unless a `deferred` context is open."""
        if _in_main_thread() and self._is_held:
            self._is_held = False
            self._leave()

    def _enter(self) -> None:
        if self._depth == 0:
            self._has_signal = False
            previous = _signal.getsignal(signal.SIGINT)
            if previous != self._on_signal:
                self._previous = previous
            if callable(previous) or previous == signal.SIG_DFL:  # otherwise SIGINT is ignored, or not Python's to set
                with suppress(ValueError):  # in a program that embeds Python, `threading`'s main thread may be another
                    _signal.signal(signal.SIGINT, self._on_signal)
        self._depth += 1

    def _leave(self) -> None:
        self._depth -= 1
        if self._depth == 0:
            self._restore_handler()  # first, because a signal after the next line would be deferred to the next update
            has_signal, self._has_signal = self._has_signal, False
            if has_signal:
                signal.raise_signal(signal.SIGINT)

    def _restore_handler(self) -> None:
        """Sets the previous handler again, unless other code has replaced this object's handler."""
        if _signal.getsignal(signal.SIGINT) == self._on_signal:
            _signal.signal(signal.SIGINT, self._previous)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        now_s = time.monotonic()
        if self._has_signal:
            if now_s - self._signal_s < _ECHO_S:
                return
            self._has_signal = False
            self._restore_handler()
            signal.raise_signal(signal.SIGINT)
            return
        self._has_signal, self._signal_s = True, now_s
        logger.warning("ds_zo: Ctrl-C takes effect after the current update; a second Ctrl-C takes effect at once")


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


interrupts = Interrupts()
