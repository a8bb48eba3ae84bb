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
    """A module's attributes or buffers, the name of one, and whether its tensor is written to."""
    contents: Sequence[tuple[Any, bool]] = ()
    """A container, and whether a tensor in it is written to."""
    hooks: Sequence[tuple[Any, bool]] = ()
    """The same for containers of hooks."""

    def __bool__(self) -> bool:
        return bool(self.values or self.contents or self.hooks)

    def without_hooks(self) -> Places:
        return Places(self.values, self.contents)


class SavedState:
    """State as it is now. Parameters need none of this: a pass works on copies of them."""

    def __init__(self, places: Places) -> None:
        containers = [*places.contents, *places.hooks]
        self._named: list[tuple[dict[str, Any], Sequence[str] | None, dict[str, Any]]] = [
            (owner, (name,), {name: owner[name]} if name in owner else {}) for owner, name, _ in places.values
        ]
        """Attributes or buffers, those names of them that are saved (None: all), and their values."""
        self._contents = [(container, container.copy()) for container, _ in containers]
        self._buffers: set[int] = set()
        """Dicts of buffers, by id."""
        self._hooks: set[int] = set()
        """Dicts of hooks, by id."""
        self._tensors: dict[int, _SavedTensor] = {}
        for owner, name, is_written in places.values:
            if is_written:
                self._save_tensor(owner.get(name), is_buffer=True)
        for container, is_written in containers:
            for value in _values(container) if is_written else ():
                self._save_tensor(value, is_buffer=True)

    @classmethod
    def of(cls, module: nn.Module, *, tensors: bool = True) -> SavedState:
        """All state of a module and its submodules. Without `tensors`, what is written to tensors is not seen."""
        saved = cls(Places())
        saved.renew(module, tensors=tensors)
        return saved

    def renew(self, module: nn.Module, *, tensors: bool = True) -> None:
        self._named, self._contents, self._tensors, seen = [], [], {}, set()
        for m in module.modules():
            self._buffers.add(id(m._buffers))
            self._hooks |= {id(value) for name, value in vars(m).items() if "_hooks" in name}
            self._named += [(held, None, dict(held)) for held in (vars(m), m._buffers)]
            due = [value for name, value in vars(m).items() if name not in _STRUCTURE]
            while due:
                value = due.pop()
                if type(value) in _CONTAINERS and id(value) not in seen:
                    seen.add(id(value))
                    self._contents.append((value, value.copy()))
                    due += _values(value)
                elif tensors:
                    self._save_tensor(value, is_buffer=False)
            for buffer in m._buffers.values() if tensors else ():
                self._save_tensor(buffer, is_buffer=True)

    def _save_tensor(self, value: Any, *, is_buffer: bool) -> None:
        if not isinstance(value, torch.Tensor) or isinstance(value, nn.Parameter) or value.is_meta:
            return
        if is_buffer or not value.is_inference():
            self._tensors[id(value)] = _SavedTensor(value, is_buffer=is_buffer)

    def keep_changed(self) -> Places:
        """Where something has changed since. The values of other tensors are no longer kept: masks and tables, most of
        them, that no forward changes."""
        self._tensors = {key: saved for key, saved in self._tensors.items() if saved.is_written()}
        values = [
            (held, name, id(held) in self._buffers or id(before.get(name)) in self._tensors)
            for held, _, before in self._named
            for name in {**before, **held}
            if _differ(held.get(name, _ABSENT), before.get(name, _ABSENT)) or id(before.get(name)) in self._tensors
        ]
        contents = [
            (container, is_written)
            for container, before in self._contents
            if (is_written := any(id(value) in self._tensors for value in _values(before)))
            or not _same_contents(container, before)
        ]
        return Places(
            values,
            [place for place in contents if id(place[0]) not in self._hooks],
            [place for place in contents if id(place[0]) in self._hooks],
        )

    @torch.no_grad()
    def put_back(self) -> None:
        """The same objects with the contents and values they had: recorded kernels know tensors by address."""
        for held, names, before in self._named:
            for name in [name for name in (held if names is None else names) if name in held and name not in before]:
                del held[name]
            held.update({name: value for name, value in before.items() if held.get(name, _ABSENT) is not value})
        for container, before in self._contents:
            if not _same_contents(container, before):
                _refill(container, before)
        for saved in self._tensors.values():
            saved.put_back()


class _SavedTensor:
    def __init__(self, tensor: torch.Tensor, *, is_buffer: bool) -> None:
        self._tensor = tensor
        self._value = tensor.detach().clone()
        self._version = None if is_buffer or tensor.is_inference() else tensor._version
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
            for i, (value, (_, _, is_written)) in enumerate(zip(values, self._places.values, strict=True)):
                made[i] = _copy(value, into=made[i]) if is_written and isinstance(value, torch.Tensor) else None
            own = [value if copied is None else copied for value, copied in zip(values, made, strict=True)]
            own_contents = [
                _with_copies(container) if is_written else container
                for container, (_, is_written) in zip(contents, self._containers, strict=True)
            ]
            held.append((own, own_contents))
        self._held = [*held, (values, contents)]

    @property
    def _containers(self) -> list[tuple[Any, bool]]:
        return [*self._places.contents, *self._places.hooks]

    def _read(self) -> tuple[list[Any], list[Any]]:
        values = [owner.get(name, _ABSENT) for owner, name, _ in self._places.values]
        return values, [container.copy() for container, _ in self._containers]

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
        for (container, _), saved in zip(self._containers, contents, strict=True):
            _refill(container, saved)
        self._current = index


def _values(container: Any) -> list[Any]:
    return list(container.values() if isinstance(container, Mapping) else container)


def _differ(a: Any, b: Any) -> bool:
    """By identity; numbers and strings that are made anew may be equal."""
    return a is not b and not (type(a) is type(b) and isinstance(a, (bool, int, float, str)) and a == b)


def _same_contents(a: Any, b: Any) -> bool:
    if isinstance(a, set):
        return {id(value) for value in a} == {id(value) for value in b}
    same_keys = not isinstance(a, Mapping) or list(a) == list(b)
    return (
        same_keys and len(a) == len(b) and not any(_differ(x, y) for x, y in zip(_values(a), _values(b), strict=True))
    )


def _refill(container: Any, contents: Any) -> None:
    if isinstance(container, list):
        container[:] = contents
        return
    container.clear()
    (container.extend if isinstance(container, deque) else container.update)(contents)


def _with_copies(contents: Any) -> Any:
    """Of the tensors inside."""
    if isinstance(contents, Mapping):
        return {key: _own_copy(value) for key, value in contents.items()}
    return type(contents)(map(_own_copy, contents))


def _own_copy(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def _copy(value: torch.Tensor, *, into: torch.Tensor | None) -> torch.Tensor:
    if into is None or (into.shape, into.dtype, into.device) != (value.shape, value.dtype, value.device):
        return value.detach().clone()
    return into.copy_(value)
