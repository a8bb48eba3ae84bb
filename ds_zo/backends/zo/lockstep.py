"""Several passes of one forward in lockstep: at every block each pass runs it before any goes on.

[Note: twin forward] The user's own forward runs in coroutines (greenlets), so no model needs code of ours. A pass that
reaches a block asks for it and pauses; when all have asked, the block is there once and each pass runs it with its own
perturbed copy. What PyTorch and Python keep per thread would leak from one pass into another at a pause, so each pass
owns its grad mode, autocast state, current stream, random states and context variables.
"""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import greenlet
import torch

from ds_zo.backends.common.random_state import RandomState


class CannotInterleave(RuntimeError):
    """This forward can't run in lockstep; one pass after the other is still right."""


_ATTENTION_KERNELS = (
    (torch.backends.cuda.flash_sdp_enabled, torch.backends.cuda.enable_flash_sdp),
    (torch.backends.cuda.mem_efficient_sdp_enabled, torch.backends.cuda.enable_mem_efficient_sdp),
    (torch.backends.cuda.math_sdp_enabled, torch.backends.cuda.enable_math_sdp),
    (torch.backends.cuda.cudnn_sdp_enabled, torch.backends.cuda.enable_cudnn_sdp),
)
"""What `sdpa_kernel` sets and puts back: forwards open it around all their blocks."""


@dataclass
class ThreadState:
    """What PyTorch keeps per thread or globally and a forward may set around its blocks, besides random states."""

    grad: bool
    autocast: tuple[tuple[str, bool, torch.dtype], ...]
    autocast_cache: bool
    stream: Any
    default_dtype: torch.dtype
    attention_kernels: tuple[bool, ...]

    @classmethod
    def capture(cls, device: torch.device) -> ThreadState:
        kinds = ("cpu", "cuda") if device.type == "cuda" else ("cpu",)
        return cls(
            grad=torch.is_grad_enabled(),
            autocast=tuple((kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds),
            autocast_cache=torch.is_autocast_cache_enabled(),
            stream=torch.cuda.current_stream(device) if device.type == "cuda" else None,
            default_dtype=torch.get_default_dtype(),
            attention_kernels=tuple(enabled() for enabled, _ in _ATTENTION_KERNELS),
        )

    def restore(self) -> None:
        torch.set_grad_enabled(self.grad)
        for kind, enabled, dtype in self.autocast:
            torch.set_autocast_enabled(kind, enabled)
            torch.set_autocast_dtype(kind, dtype)
        torch.set_autocast_cache_enabled(self.autocast_cache)
        torch.clear_autocast_cache()  # casts of a parameter outlive the copy they were made from
        torch.set_default_dtype(self.default_dtype)
        for (_, enable), enabled in zip(_ATTENTION_KERNELS, self.attention_kernels, strict=True):
            enable(enabled)
        if self.stream is not None:
            torch.cuda.set_stream(self.stream)


class _LockstepPass:
    def __init__(self, call: Callable[[], Any], thread: ThreadState, randomness: tuple[Any, ...]) -> None:
        self.coroutine = greenlet.greenlet(call)
        self.coroutine.gr_context = contextvars.copy_context()
        self.thread = thread
        self.randomness = randomness
        self.asked: Any = None
        """What it paused for, or its result once it is dead."""


class Lockstep:
    """Runs passes of one forward, together or one after the other, each from the same random state."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._random = RandomState(device)
        self._hub: greenlet.greenlet | None = None
        self._thread = threading.get_ident()
        """The hub's."""
        self._modes = _open_modes()
        self._start: Any = None
        self.current = 0
        """Which pass is running."""
        self.on_switch: Callable[[int], None] = lambda index: None
        """Called before pass `index` starts or goes on."""
        self.on_again: Callable[[], None] = lambda: None
        """Called before passes that have run, or broken off, are run again."""

    def heed(self, generators: Iterable[Any]) -> None:
        """Gives passes the same numbers from these, too."""
        self._random.own = list({id(generator): generator for generator in generators}.values())

    @property
    def inside(self) -> bool:
        """Whether the caller runs in one of the passes of a lockstep run."""
        return self._hub is not None and greenlet.getcurrent() is not self._hub

    def pause(self, asked: Any) -> None:
        """Called from a hook inside a pass: returns when the hub has made ready what was asked for."""
        assert self._hub is not None
        if threading.get_ident() != self._thread:
            raise CannotInterleave("blocks run in other threads than the one that called the engine")
        if _open_modes() != self._modes:
            asked = CannotInterleave(
                "a torch function mode (such as `with torch.device(...)`) is open while a block runs, and would reach "
                "the other pass"
            )
        self._hub.switch(asked)

    def snapshot(self) -> Any:
        """The random state, for running the same passes again."""
        return self._random.get_state(), self._random.python_state()

    def set_snapshot(self, snapshot: Any) -> None:
        self._random.set_state(snapshot[0])
        self._random.set_python_state(snapshot[1])

    def rewind(self) -> None:
        """To the random state that the last passes started from."""
        self.set_snapshot(self._start)

    def together(self, calls: Sequence[Callable[[], Any]], ready: Callable[[Any, int], None]) -> list[Any]:
        """The calls' results. `ready(asked, i)` is called before pass i goes on with what all asked for."""
        start = self._start = self.snapshot()
        try:
            results = self._together(calls, ready)
        except CannotInterleave:
            self.set_snapshot(start)
            self.on_again()
            raise
        if not self._random.swap_python and not self._random.equal_python_states(start[1], self._random.python_state()):
            # The passes drew different numbers from generators that were not swapped: again, swapping them.
            self._random.swap_python = True
            self.set_snapshot(start)
            self.on_again()
            results = self._together(calls, ready)
        return results

    def _together(self, calls: Sequence[Callable[[], Any]], ready: Callable[[Any, int], None]) -> list[Any]:
        outside = ThreadState.capture(self._device)
        inside = replace(outside, autocast_cache=False)
        start = self._random.get_state()
        twins = [_LockstepPass(call, inside, start) for call in calls]
        self._hub, self._thread, self._modes = greenlet.getcurrent(), threading.get_ident(), _open_modes()
        inside.restore()  # the hub's state too: passes mostly share it, and then switching costs little
        try:
            for index, twin in enumerate(twins):
                self._resume(twin, index, inside)
            while not all(twin.coroutine.dead for twin in twins):
                asked = twins[0].asked
                if any(twin.coroutine.dead or twin.asked is not asked for twin in twins):
                    raise CannotInterleave("the passes visit different blocks")
                for index, twin in enumerate(twins):
                    ready(asked, index)
                    self._resume(twin, index, inside)
            return [twin.asked for twin in twins]
        finally:
            with ExitStack() as ending:  # a pass may raise once more on its way out
                ending.callback(outside.restore)
                ending.callback(setattr, self, "_hub", None)
                for twin in reversed(twins):
                    ending.callback(self._end, twin)

    def one_by_one(self, calls: Sequence[Callable[[], Any]]) -> list[Any]:
        """The calls' results, each pass run whole from the same random state."""
        outside = ThreadState.capture(self._device)
        start = self._start = self.snapshot()
        results = []
        try:
            for self.current, call in enumerate(calls):
                self.on_switch(self.current)
                self.set_snapshot(start)
                torch.set_autocast_cache_enabled(False)
                torch.clear_autocast_cache()
                results.append(contextvars.copy_context().run(call))
        finally:
            outside.restore()
        return results

    def _resume(self, twin: _LockstepPass, index: int, hub: ThreadState) -> None:
        self.current = index
        self.on_switch(index)
        if twin.thread != hub:
            twin.thread.restore()
        self._random.set_state(twin.randomness)
        try:
            twin.asked = twin.coroutine.switch()
        finally:
            twin.thread = ThreadState.capture(self._device)
            twin.randomness = self._random.get_state()
            if twin.thread != hub:
                hub.restore()
            if any(enabled for _, enabled, _ in twin.thread.autocast):
                torch.clear_autocast_cache()  # casts of a parameter outlive the copy they were made from
        if isinstance(twin.asked, CannotInterleave):
            raise twin.asked

    def _end(self, twin: _LockstepPass) -> None:
        """An abandoned pass would keep its activations and leave its grad mode behind."""
        if twin.coroutine.dead or not twin.coroutine:  # finished, or never started
            return
        twin.thread.restore()
        twin.coroutine.throw(greenlet.GreenletExit)


def _open_modes() -> tuple[int, int, bool]:
    """What can't be set aside at a pause: only whoever opened it can close it."""
    return torch._C._len_torch_function_stack(), torch._C._len_torch_dispatch_stack(), torch.is_inference_mode_enabled()
