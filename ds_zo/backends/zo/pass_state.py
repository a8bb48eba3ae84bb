"""State that modules keep besides parameters, for forwards that are made again and for passes side by side.

[Note: state of a pass] A forward may leave something on its modules: running statistics, counters, tables for a longer
batch, hooks that it installs once. The passes of one training forward all start from the same state, and the state that
the last pass leaves stays, so that the module is as one forward would leave it. State is: buffers, attributes, and the
contents of lists, dicts and sets that attributes hold, hooks among them. Other objects that a module mutates are not
seen. Contents are exchanged inside the same container, because handles and other modules refer to it.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

_ABSENT: Any = object()
_CONTAINERS = frozenset((dict, OrderedDict, defaultdict, list, set, deque))
_STRUCTURE = frozenset(("_parameters", "_modules", "_buffers"))
"""Containers of a module that are not looked into as such: buffers are compared by name and value."""


@dataclass(frozen=True)
class Places:
    """Where a forward leaves another state than it finds."""

    values: Sequence[tuple[dict[str, Any], str, bool]] = ()
    """A module's attributes or buffers, the name of one, and whether it is a buffer."""
    contents: Sequence[Any] = ()
    """Containers."""
    hooks: Sequence[Any] = ()
    """Containers of hooks."""

    def __bool__(self) -> bool:
        return bool(self.values or self.contents or self.hooks)

    def without_hooks(self) -> Places:
        return Places(self.values, self.contents)


class SavedState:
    """State as it is now. Parameters need none of this: a pass works on copies of them."""

    def __init__(self, places: Places) -> None:
        self._named: list[tuple[dict[str, Any], Sequence[str] | None, dict[str, Any]]] = [
            (owner, (name,), {name: owner[name]} if name in owner else {}) for owner, name, _ in places.values
        ]
        """Attributes or buffers, those names of them that are saved (None: all), and their values."""
        self._contents: dict[int, tuple[Any, Any]] = {}
        """Containers and copies of them, by id."""
        self._tensors: dict[int, _SavedTensor] = {}
        self._buffers: set[int] = set()
        """Dicts of buffers, by id."""
        self._hooks: set[int] = set()
        """Dicts of hooks, by id."""
        self._save([owner.get(name) for owner, name, _ in places.values], by_value=True)
        self._save([*places.contents, *places.hooks], by_value=True)

    @classmethod
    def of(cls, module: nn.Module, *, tensors: bool = True) -> SavedState:
        """All state of a module and its submodules. Without `tensors`, what is written to tensors is not seen."""
        saved = cls(Places())
        saved.renew(module, tensors=tensors)
        return saved

    def renew(self, module: nn.Module, *, tensors: bool = True) -> None:
        self._named, self._contents, self._tensors = [], {}, {}
        for m in module.modules():
            self._buffers.add(id(m._buffers))
            self._hooks |= {id(value) for name, value in vars(m).items() if "_hooks" in name}
            self._named += [(held, None, dict(held)) for held in (vars(m), m._buffers)]
            if tensors:
                self._save(list(m._buffers.values()), by_value=True)
            attributes = [value for name, value in vars(m).items() if name not in _STRUCTURE]
            self._save(attributes, by_value=False, tensors=tensors)

    def _save(self, values: list[Any], *, by_value: bool, tensors: bool = True) -> None:
        """Containers and tensors among `values`, and in containers among them."""
        while values:
            value = values.pop()
            if type(value) in _CONTAINERS:
                if id(value) not in self._contents:
                    self._contents[id(value)] = (value, value.copy())
                    values += _items(value)
            elif tensors and _is_state(value) and id(value) not in self._tensors:
                self._tensors[id(value)] = _SavedTensor(value, by_value=by_value)

    def keep_changed(self) -> Places:
        """Where something has changed since. The values of other tensors are no longer kept: masks and tables, most of
        them, that no forward changes."""
        self._tensors = {key: saved for key, saved in self._tensors.items() if saved.is_written()}
        values = [
            (held, name, id(held) in self._buffers)
            for held, _, before in self._named
            for name in {**before, **held}
            if _differ(held.get(name, _ABSENT), before.get(name, _ABSENT)) or id(before.get(name)) in self._tensors
        ]
        contents = [
            container
            for container, before in self._contents.values()
            if any(id(value) in self._tensors for value in _items(before)) or not _same_contents(container, before)
        ]
        return Places(
            values,
            [container for container in contents if id(container) not in self._hooks],
            [container for container in contents if id(container) in self._hooks],
        )

    @torch.no_grad()
    def put_back(self) -> None:
        """The same objects with the contents and values they had: recorded kernels know tensors by address."""
        for held, names, before in self._named:
            for name in [name for name in (held if names is None else names) if name in held and name not in before]:
                del held[name]
            held.update({name: value for name, value in before.items() if held.get(name, _ABSENT) is not value})
        for container, before in self._contents.values():
            if not _same_contents(container, before):
                _refill(container, before)
        for saved in self._tensors.values():
            saved.put_back()


class _SavedTensor:
    def __init__(self, tensor: torch.Tensor, *, by_value: bool) -> None:
        self._tensor = tensor
        self._value = tensor.detach().clone()
        self._version = None if by_value or tensor.is_inference() else tensor._version
        """None: it is compared by value, because batch norms write past the counter of versions."""

    def is_written(self) -> bool:
        if self._version is not None:
            return self._tensor._version != self._version
        return not torch.equal(self._tensor, self._value)

    def put_back(self) -> None:
        if self._tensor.is_inference() or (self._version is not None and not self.is_written()):
            return  # an evaluation made it and nothing else may write to it, or nothing did
        self._tensor.copy_(self._value)
        self._version = None if self._version is None else self._tensor._version


class OwnState:
    """One state a pass; see [Note: state of a pass]."""

    def __init__(self, num_passes: int) -> None:
        self._num_passes = num_passes
        self._places = Places()
        self._made: list[list[torch.Tensor | None]] = []
        """Tensors of all passes but the last, which has the module's: recorded kernels know them by address."""
        self._held: list[tuple[list[Any], list[Any]]] = []
        """Values and contents of each pass that is not running."""
        self._start = SavedState(self._places)
        self._current = num_passes - 1

    def set_places(self, places: Places) -> None:
        self._places = places
        self._made = [[None] * len(places.values) for _ in range(self._num_passes - 1)]

    def forget_hooks(self) -> None:
        """Forwards install hooks once, so only the first forward's passes need hooks of their own."""
        self._places = self._places.without_hooks()

    @contextmanager
    def in_passes(self) -> Iterator[None]:
        """Around the passes of one forward. One that breaks off leaves nothing."""
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
            self._held, self._start = [], SavedState(Places())  # activations may be among them

    def restart(self) -> None:
        """As it was when the passes began."""
        self.switch(self._num_passes - 1)
        self._start.put_back()
        self._begin()

    @torch.no_grad()
    def _begin(self) -> None:
        self._current = self._num_passes - 1
        values, contents = self._read()
        held = []
        for made in self._made:
            memo: dict[int, Any] = {}
            for i, (value, (_, _, is_buffer)) in enumerate(zip(values, self._places.values, strict=True)):
                if is_buffer and _is_state(value):
                    memo[id(value)] = made[i] = _copy(value, into=made[i])
            own = [_own(value, memo) for value in values]
            held.append((own, [_own(container, memo) for container in self._containers]))
        self._held = [*held, (values, contents)]

    @property
    def _containers(self) -> list[Any]:
        return [*self._places.contents, *self._places.hooks]

    def _read(self) -> tuple[list[Any], list[Any]]:
        values = [owner.get(name, _ABSENT) for owner, name, _ in self._places.values]
        return values, [container.copy() for container in self._containers]

    def switch(self, index: int) -> None:
        """Pass `index` starts or goes on."""
        if index != self._current and self._places:
            self._held[self._current] = self._read()
            self.enter(index)

    def enter(self, index: int) -> None:
        """The modules get the state of pass `index`."""
        if not self._places:
            return
        values, contents = self._held[index]
        for (owner, name, _), value in zip(self._places.values, values, strict=True):
            if value is not _ABSENT:
                owner[name] = value
            elif name in owner:
                del owner[name]
        for container, saved in zip(self._containers, contents, strict=True):
            _refill(container, saved)
        self._current = index


def _is_state(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and not isinstance(value, nn.Parameter) and not value.is_meta


def _items(container: Any) -> list[Any]:
    return list(container.values() if isinstance(container, Mapping) else container)


def _differ(a: Any, b: Any) -> bool:
    """By identity; numbers and strings that are made anew may be equal."""
    return a is not b and not (type(a) is type(b) and isinstance(a, (bool, int, float, str)) and a == b)


def _same_contents(a: Any, b: Any) -> bool:
    if isinstance(a, set):
        return {id(value) for value in a} == {id(value) for value in b}
    same_keys = not isinstance(a, Mapping) or list(a) == list(b)
    return same_keys and len(a) == len(b) and not any(_differ(x, y) for x, y in zip(_items(a), _items(b), strict=True))


def _refill(container: Any, contents: Any) -> None:
    if isinstance(container, list):
        container[:] = contents
        return
    container.clear()
    (container.extend if isinstance(container, deque) else container.update)(contents)


def _own(value: Any, memo: dict[int, Any]) -> Any:
    """A copy of a tensor or a container, with copies of those inside; of what is in `memo`, the one there."""
    if id(value) in memo:
        return memo[id(value)]
    if _is_state(value):
        memo[id(value)] = value.detach().clone()
    elif type(value) in _CONTAINERS:
        memo[id(value)] = made = value.copy()
        if isinstance(value, Mapping):
            made.update({key: _own(item, memo) for key, item in value.items()})
        elif not isinstance(value, set):
            _refill(made, [_own(item, memo) for item in value])
    return memo.get(id(value), value)


def _copy(value: torch.Tensor, *, into: torch.Tensor | None) -> torch.Tensor:
    if into is None or (into.shape, into.dtype, into.device) != (value.shape, value.dtype, value.device):
        return value.detach().clone()
    return into.copy_(value)
