"""Exchanges the state that modules keep besides parameters, for passes in lockstep.

[Note: state of a pass] A forward may change its modules: running statistics, counters, tables for a longer batch, hooks
that it registers once ([Note: state of a module]). The passes of one training forward all start from the same state.
The state that the last pass leaves stays, so the module is as one forward would leave it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from ds_zo.backends.common.module_state import ABSENT, CONTAINERS, Places, SavedState, is_state, refill


class PassState:
    """Keeps one module state per pass; see [Note: state of a pass]."""

    def __init__(self, num_passes: int) -> None:
        self._num_passes = num_passes
        self._places = Places()
        self._pass_buffers: list[list[torch.Tensor | None]] = []
        """Buffers of all passes but the last, which uses the module's own. They are reused, because recorded CUDA
        graphs refer to their addresses."""
        self._held: list[tuple[list[Any], list[Any]]] = []
        """Values and contents of each pass that is not running."""
        self._start = SavedState(self._places)
        self._current = num_passes - 1

    def set_places(self, places: Places) -> None:
        """Sets the places that each pass has its own state in."""
        self._places = places
        self._pass_buffers = [[None] * len(places.values) for _ in range(self._num_passes - 1)]

    def forget_hooks(self) -> None:
        """Stops exchanging hooks. Forwards register hooks once, so only the passes of a mode's first forward need hooks
        of their own."""
        self._places = self._places.without_hooks()

    @contextmanager
    def in_passes(self) -> Iterator[None]:
        """Context around the passes of one forward. If they are interrupted, the module's state is restored."""
        self._start = SavedState(self._places)
        self._begin()
        try:
            yield
        except BaseException:
            self.restart()
            raise
        else:
            self.switch(self._num_passes - 1)
        finally:
            self._held, self._start = [], SavedState(Places())  # frees activations that may be among them

    def restart(self) -> None:
        """Restores the state at the start of the passes, for every pass."""
        self.switch(self._num_passes - 1)
        self._start.restore()
        self._begin()

    @torch.no_grad()
    def _begin(self) -> None:
        """Copies the module's state for every pass but the last, which uses the module's own."""
        self._current = self._num_passes - 1
        values, contents = self._read()
        held = []
        for made in self._pass_buffers:
            memo: dict[int, Any] = {}
            for i, (value, (_, _, is_buffer)) in enumerate(zip(values, self._places.values, strict=True)):
                if is_buffer and is_state(value):
                    memo[id(value)] = made[i] = _copy(value, into=made[i])
            own = [_deep_copy(value, memo) for value in values]
            held.append((own, [_deep_copy(container, memo) for container in self._containers]))
        self._held = [*held, (values, contents)]

    @property
    def _containers(self) -> list[Any]:
        return [*self._places.contents, *self._places.hooks]

    def _read(self) -> tuple[list[Any], list[Any]]:
        """The module's values and contents at the tracked places."""
        values = [owner.get(name, ABSENT) for owner, name, _ in self._places.values]
        return values, [container.copy() for container in self._containers]

    def switch(self, index: int) -> None:
        """Saves the running pass's state, and gives the modules that of pass `index`, which starts or resumes."""
        if index != self._current and self._places:
            self._held[self._current] = self._read()
            self.enter(index)

    def enter(self, index: int) -> None:
        """Gives the modules the state of pass `index`, without saving the present one."""
        if not self._places:
            return
        values, contents = self._held[index]
        for (owner, name, _), value in zip(self._places.values, values, strict=True):
            if value is not ABSENT:
                owner[name] = value
            elif name in owner:
                del owner[name]
        for container, saved in zip(self._containers, contents, strict=True):
            refill(container, saved)
        self._current = index


def _deep_copy(value: Any, memo: dict[int, Any]) -> Any:
    """Copies a tensor, or a container with copies of the tensors and containers in it. A value in `memo` has its copy
    there."""
    if id(value) in memo:
        return memo[id(value)]
    if is_state(value):
        memo[id(value)] = value.detach().clone()
    elif type(value) in CONTAINERS:
        memo[id(value)] = made = value.copy()
        if isinstance(value, Mapping):
            made.update({key: _deep_copy(item, memo) for key, item in value.items()})
        elif not isinstance(value, set):
            refill(made, [_deep_copy(item, memo) for item in value])
    return memo.get(id(value), value)


def _copy(value: torch.Tensor, *, into: torch.Tensor | None) -> torch.Tensor:
    """Copies `value` into the tensor `into` if shape, dtype and device match, else into a new tensor."""
    if into is None or (into.shape, into.dtype, into.device) != (value.shape, value.dtype, value.device):
        return value.detach().clone()
    return into.copy_(value)
