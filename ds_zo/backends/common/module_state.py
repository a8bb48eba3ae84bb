"""Saves and restores the state that modules keep besides parameters, for forwards that run again.

[Note: state of a module] State means: buffers, attributes, and the contents of lists, dicts and sets that attributes
hold, hooks among them. Other objects that a module mutates are not tracked. Contents are exchanged inside the same
container, because hook handles and other modules refer to it.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

ABSENT: Any = object()
CONTAINERS = frozenset((dict, OrderedDict, defaultdict, list, set, deque))
_STRUCTURE = frozenset(("_parameters", "_modules", "_buffers"))
"""Containers of a module that are not searched like other attributes: buffers are compared by name and value."""


@dataclass(frozen=True)
class Places:
    """The places in which a forward leaves another state than it found."""

    values: Sequence[tuple[dict[str, Any], str, bool]] = ()
    """Each entry: a module's dict of attributes or of buffers, a name in it, and whether it is a buffer."""
    contents: Sequence[Any] = ()
    """Containers whose contents change."""
    hooks: Sequence[Any] = ()
    """Containers of hooks whose contents change."""

    def __len__(self) -> int:
        return len(self.values) + len(self.contents) + len(self.hooks)

    def __or__(self, found: Places) -> Places:
        """These places, and those of `found` that are not among them."""
        named, held = {(id(owner), name) for owner, name, _ in self.values}, set(map(id, self.contents))
        values = [place for place in found.values if (id(place[0]), place[1]) not in named]
        contents = [container for container in found.contents if id(container) not in held]
        return Places([*self.values, *values], [*self.contents, *contents], found.hooks)

    def without_hooks(self) -> Places:
        return Places(self.values, self.contents)


class SavedState:
    """A copy of module state, taken when it is made. Parameters are not saved: passes work on copies of them."""

    def __init__(self, places: Places) -> None:
        self._named: list[tuple[dict[str, Any], Sequence[str] | None, dict[str, Any]]] = [
            (owner, (name,), {name: owner[name]} if name in owner else {}) for owner, name, _ in places.values
        ]
        """Each entry: a dict of attributes or buffers, the names in it that are saved (None for all), and their
        values."""
        self._contents: dict[int, tuple[Any, Any]] = {}
        """Containers and copies of them, by the container's id."""
        self._tensors: dict[int, _SavedTensor] = {}
        self._buffers: set[int] = set()
        """Ids of dicts of buffers."""
        self._hooks: set[int] = set()
        """Ids of dicts of hooks."""
        self._save([owner.get(name) for owner, name, _ in places.values], by_value=True)
        self._save([*places.contents, *places.hooks], by_value=True)

    @classmethod
    def of(cls, module: nn.Module, *, tensors: bool = True) -> SavedState:
        """Saves all state of a module and its submodules. Without `tensors`, writes to tensors are not tracked."""
        saved = cls(Places())
        saved.renew(module, tensors=tensors)
        return saved

    def renew(self, module: nn.Module, *, tensors: bool = True) -> None:
        """Saves all state of the module again, in place of the saved one."""
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
        """Saves the containers and tensors among `values`, and in containers among them."""
        while values:
            value = values.pop()
            if type(value) in CONTAINERS:
                if id(value) not in self._contents:
                    self._contents[id(value)] = (value, value.copy())
                    values += _items(value)
            elif tensors and is_state(value) and id(value) not in self._tensors:
                self._tensors[id(value)] = _SavedTensor(value, by_value=by_value)

    def keep_changed(self) -> Places:
        """Returns the places that differ from the saved state. Drops the saved values of unchanged tensors: these are
        mostly masks and tables that no forward changes."""
        self._tensors = {key: saved for key, saved in self._tensors.items() if saved.is_written()}
        values = [
            (held, name, id(held) in self._buffers)
            for held, _, before in self._named
            for name in {**before, **held}
            if _differ(held.get(name, ABSENT), before.get(name, ABSENT)) or id(before.get(name)) in self._tensors
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
    def restore(self) -> None:
        """Gives the same objects the contents and values that they had. Tensors keep their addresses, which recorded
        CUDA graphs refer to."""
        for held, names, before in self._named:
            for name in [name for name in (held if names is None else names) if name in held and name not in before]:
                del held[name]
            held.update({name: value for name, value in before.items() if held.get(name, ABSENT) is not value})
        for container, before in self._contents.values():
            if not _same_contents(container, before):
                refill(container, before)
        for saved in self._tensors.values():
            saved.restore()


class _SavedTensor:
    """A tensor, a copy of its value, and how to tell whether it was written."""

    def __init__(self, tensor: torch.Tensor, *, by_value: bool) -> None:
        self._tensor = tensor
        self._value = tensor.detach().clone()
        self._version = None if by_value or tensor.is_inference() else tensor._version
        """The tensor's version counter, or None to compare by value: batch norms write without a change of the
        counter."""

    def is_written(self) -> bool:
        if self._version is not None:
            return self._tensor._version != self._version
        return not torch.equal(self._tensor, self._value)

    def restore(self) -> None:
        if self._tensor.is_inference() or (self._version is not None and not self.is_written()):
            return  # nothing has written to it: outside inference mode, writes to inference tensors raise
        self._tensor.copy_(self._value)
        self._version = None if self._version is None else self._tensor._version


def is_state(value: Any) -> bool:
    """Whether the value is a tensor that holds state. Parameters and meta tensors do not."""
    return isinstance(value, torch.Tensor) and not isinstance(value, nn.Parameter) and not value.is_meta


def _items(container: Any) -> list[Any]:
    return list(container.values() if isinstance(container, Mapping) else container)


def _differ(a: Any, b: Any) -> bool:
    """Whether two values differ, by identity. Numbers and strings that are created again may be equal."""
    return a is not b and not (type(a) is type(b) and isinstance(a, (bool, int, float, str)) and a == b)


def _same_contents(a: Any, b: Any) -> bool:
    if isinstance(a, set):
        return {id(value) for value in a} == {id(value) for value in b}
    same_keys = not isinstance(a, Mapping) or list(a) == list(b)
    return same_keys and len(a) == len(b) and not any(_differ(x, y) for x, y in zip(_items(a), _items(b), strict=True))


def refill(container: Any, contents: Any) -> None:
    if isinstance(container, list):
        container[:] = contents
        return
    container.clear()
    (container.extend if isinstance(container, deque) else container.update)(contents)
