"""Buffers of a module that a forward changes (running statistics, counters), for forwards that are made again, and for
passes side by side."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn

_Place = tuple[dict[str, torch.Tensor | None], str]
"""A module's buffers, and the name of one of them."""


class SavedBuffers:
    """Buffers as they are now. Parameters need none of this: a pass works on copies of them."""

    def __init__(self, places: Iterable[_Place]) -> None:
        self._saved = [
            (owner, name, buffer, buffer.detach().clone())
            for owner, name in places
            if (buffer := owner.get(name)) is not None and not buffer.is_meta
        ]

    @classmethod
    def of(cls, module: nn.Module) -> SavedBuffers:
        return cls((m._buffers, name) for m in module.modules() for name in m._buffers)

    def keep_changed(self) -> list[_Place]:
        """Where something has changed since. The rest is no longer kept: masks and tables, most of them, that no
        forward changes."""
        self._saved = [
            (owner, name, buffer, value)
            for owner, name, buffer, value in self._saved
            if owner.get(name) is not buffer or not torch.equal(buffer, value)
        ]
        return [(owner, name) for owner, name, _, _ in self._saved]

    @torch.no_grad()
    def put_back(self) -> None:
        """The same tensors with the values they had: recorded kernels know them by address."""
        for owner, name, buffer, value in self._saved:
            if buffer.is_inference():  # an evaluation made it, and nothing else may write to it
                owner[name] = value.clone()
            else:
                owner[name] = buffer
                buffer.copy_(value)


class SavedAttributes:
    """What modules keep besides parameters and buffers, as it is now: counters, memories of the last batch. Values that
    are changed in place are not seen."""

    def __init__(self, module: nn.Module) -> None:
        self._saved = [(vars(m), dict(vars(m))) for m in module.modules()]

    def put_back(self) -> None:
        for held, before in self._saved:
            for name in held.keys() - before.keys():
                del held[name]
            held.update({name: value for name, value in before.items() if held.get(name) is not value})


class OwnBuffers:
    """Buffers that forwards change, one set a pass. As with random numbers, the passes of a step start from the same,
    and what the last leaves stays: were they updated in turn, losses would differ by more than the perturbation."""

    def __init__(self, num_passes: int) -> None:
        self._num_passes = num_passes
        self._places: Sequence[_Place] = ()
        self._made: list[list[torch.Tensor | None]] = []
        """Tensors of all passes but the last, which has the module's: recorded kernels know them by address."""
        self._held: list[list[torch.Tensor | None]] = []
        """What each pass that is not running has in each place."""
        self._start = SavedBuffers(())
        self._current = num_passes - 1

    def set_places(self, places: Sequence[_Place]) -> None:
        self._places = list(places)
        self._made = [[None] * len(self._places) for _ in range(self._num_passes - 1)]

    @contextmanager
    def in_passes(self) -> Iterator[None]:
        """Around the passes of one forward. One that breaks off leaves nothing."""
        self._start = SavedBuffers(self._places)
        self._begin()
        try:
            yield
        except BaseException:
            self.restart()
            raise
        self.switch(self._num_passes - 1)

    def restart(self) -> None:
        """As it was when the passes began."""
        self.switch(self._num_passes - 1)
        self._start.put_back()
        self._begin()

    @torch.no_grad()
    def _begin(self) -> None:
        self._current = self._num_passes - 1
        now = [owner.get(name) for owner, name in self._places]
        self._made = [[_copy(value, into=old) for value, old in zip(now, each, strict=True)] for each in self._made]
        self._held = [*map(list, self._made), now]

    def switch(self, index: int) -> None:
        """Pass `index` starts or goes on."""
        if index == self._current or not self._places:
            return
        self._held[self._current] = [owner.get(name) for owner, name in self._places]
        for (owner, name), value in zip(self._places, self._held[index], strict=True):
            owner[name] = value
        self._current = index


def _copy(value: torch.Tensor | None, *, into: torch.Tensor | None) -> torch.Tensor | None:
    if value is None:
        return None
    if into is None or (into.shape, into.dtype, into.device) != (value.shape, value.dtype, value.device):
        return value.detach().clone()
    return into.copy_(value)
