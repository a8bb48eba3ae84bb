"""Runs several passes of one forward in lockstep: all passes run a block before any pass goes on to the next block.

[Note: passes in lockstep] The user's own forward runs in coroutines (greenlets), so a model needs no code for ZO. A
pass that reaches a block requests it and pauses. When all passes have requested the block, it is uploaded once, and
each pass runs it with its own perturbed copy. PyTorch and Python keep some state per thread, which would leak from one
pass into another at a pause. So each pass has its own flags of torch ([Note: flags of a pass] in `thread_state`),
current stream, random states and context variables.
"""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from typing import Any

import greenlet
import torch

from ds_zo.backends.common.random_state import RandomState
from ds_zo.backends.zo.thread_state import ThreadState


class CannotInterleave(RuntimeError):
    """Raised when a forward cannot run in lockstep. Running one pass after the other gives the right result."""


class _LockstepPass:
    """One pass: its coroutine, and the thread state and random states to restore when it resumes."""

    def __init__(self, call: Callable[[], Any], thread: tuple[Any, ...], randomness: tuple[Any, ...]) -> None:
        self.coroutine = greenlet.greenlet(call)
        self.coroutine.gr_context = contextvars.copy_context()
        self.thread = thread
        self.randomness = randomness
        self.request: Any = None
        """The object that the pass requested when it paused, or the pass's result once its coroutine is dead."""


class Lockstep:
    """Runs passes of one forward, in lockstep or one after the other, each from the same random state."""

    def __init__(self, device: torch.device) -> None:
        self._state = ThreadState(device)
        self._random = RandomState(device)
        self._hub: greenlet.greenlet | None = None
        self._thread = threading.get_ident()
        """Identifier of the thread in which the hub runs."""
        self._modes = _open_modes()
        self.current = 0
        """Index of the pass that is running."""
        self.on_switch: Callable[[int], None] = lambda index: None
        """Called before pass `index` starts or resumes."""
        self.before_rerun: Callable[[], None] = lambda: None
        """Called before passes that have run, or were interrupted, are run again."""

    def track_generators(self, generators: Iterable[Any]) -> None:
        """Gives every pass the same random numbers from these generators too."""
        self._random.own = list({id(generator): generator for generator in generators}.values())

    @property
    def inside(self) -> bool:
        """Whether the caller runs in one of the passes of a lockstep run."""
        return self._hub is not None and greenlet.getcurrent() is not self._hub

    def pause(self, request: Any) -> None:
        """Called from a hook inside a pass. Returns when all passes have made the request and the hub has prepared it
        for this pass."""
        assert self._hub is not None
        if threading.get_ident() != self._thread:
            raise CannotInterleave("blocks run in other threads than the one that called the engine")
        if _open_modes() != self._modes:
            request = CannotInterleave(
                "a torch function mode (such as `with torch.device(...)`) is open while a block runs, and would also "
                "apply to the other passes"
            )
        self._hub.switch(request)

    def snapshot(self) -> Any:
        """The random state, from which the same passes can run again."""
        return self._random.get_state(), self._random.python_state()

    def set_snapshot(self, snapshot: Any) -> None:
        """Restores the random state that `snapshot` returned."""
        self._random.set_state(snapshot[0])
        self._random.set_python_state(snapshot[1])

    def together(self, calls: Sequence[Callable[[], Any]], ready: Callable[[Any, int], None]) -> list[Any]:
        """Runs the calls in lockstep and returns their results. `ready(request, i)` is called before pass i resumes
        with the object that all passes requested."""
        start = self.snapshot()
        try:
            results = self._together(calls, ready)
        except CannotInterleave:
            self.set_snapshot(start)
            self.before_rerun()
            raise
        if not self._random.swap_python and not self._random.equal_python_states(start[1], self._random.python_state()):
            # The passes drew different numbers from generators that were not swapped: run again, swapping them.
            self._random.swap_python = True
            self.set_snapshot(start)
            self.before_rerun()
            results = self._together(calls, ready)
        return results

    def _together(self, calls: Sequence[Callable[[], Any]], ready: Callable[[Any, int], None]) -> list[Any]:
        outside, start = self._state.read(), self._random.get_state()
        self._hub, self._thread, self._modes = greenlet.getcurrent(), threading.get_ident(), _open_modes()
        passes: list[_LockstepPass] = []
        try:
            torch.set_autocast_cache_enabled(False)
            torch.clear_autocast_cache()
            inside = self._state.read()  # the hub has the same state as most passes, so that switching costs little
            passes += (_LockstepPass(call, inside, start) for call in calls)
            for index, pass_ in enumerate(passes):
                self._resume(pass_, index, inside)
            while not all(pass_.coroutine.dead for pass_ in passes):
                request = passes[0].request
                if any(pass_.coroutine.dead or pass_.request is not request for pass_ in passes):
                    raise CannotInterleave("the passes call different blocks")
                for index, pass_ in enumerate(passes):
                    ready(request, index)
                    self._resume(pass_, index, inside)
            return [pass_.request for pass_ in passes]
        finally:
            with ExitStack() as ending:  # a pass may raise again while it unwinds
                ending.callback(self._state.restore, outside)
                ending.callback(setattr, self, "_hub", None)
                for pass_ in reversed(passes):
                    ending.callback(self._end, pass_)

    def one_by_one(self, calls: Sequence[Callable[[], Any]], *, last_first: bool = False) -> list[Any]:
        """Runs the calls one after the other, each from the same random state, and returns their results. With
        `last_first`, runs the last call first."""
        outside = self._state.read()
        start = self.snapshot()
        results: list[Any] = [None] * len(calls)
        order = range(len(calls))
        try:
            for self.current in reversed(order) if last_first else order:
                self.on_switch(self.current)
                self.set_snapshot(start)
                self._state.restore(outside)
                torch.set_autocast_cache_enabled(False)
                results[self.current] = contextvars.copy_context().run(calls[self.current])
        finally:
            self._state.restore(outside)
        return results

    def _resume(self, pass_: _LockstepPass, index: int, hub: tuple[Any, ...]) -> None:
        """Runs the pass until its next request or its end, in its own thread state and random states."""
        self.current = index
        self.on_switch(index)
        if pass_.thread != hub:
            self._state.restore(pass_.thread)
        self._random.set_state(pass_.randomness)
        try:
            pass_.request = pass_.coroutine.switch()
        finally:
            pass_.thread = self._state.read()
            pass_.randomness = self._random.get_state()
            if pass_.thread != hub:
                self._state.restore(hub)
            torch.clear_autocast_cache()  # it holds casts of copies that are overwritten
        if isinstance(pass_.request, CannotInterleave):
            raise pass_.request

    def _end(self, pass_: _LockstepPass) -> None:
        """Ends a pass that has not finished: it would keep its activations alive, and leave its grad mode set."""
        if pass_.coroutine.dead or not pass_.coroutine:  # finished, or never started
            return
        self._state.restore(pass_.thread)
        pass_.coroutine.throw(greenlet.GreenletExit)


def _open_modes() -> tuple[int, int, bool]:
    """Modes that cannot be suspended at a pause: only the code that entered one can exit it."""
    return torch._C._len_torch_function_stack(), torch._C._len_torch_dispatch_stack(), torch.is_inference_mode_enabled()
