"""Makes `copy.deepcopy` of a module that an engine trains return a plain module, without the engine.

Users make reference models and averages of weights by `copy.deepcopy`. It copies a function as the same function, so a
copied hook would act on the engine's blocks; it copies a bound method together with the engine. So every hook or method
that an engine sets on a module is a `Hook` or a `StandIn`.
"""

from __future__ import annotations

import copy
import inspect
import weakref
from collections.abc import Callable
from functools import update_wrapper
from typing import Any


class Hook:
    """A hook on a module. It calls `call`; its copy does nothing."""

    def __init__(self, call: Callable[..., Any]) -> None:
        self._call = call

    def __call__(self, *args: Any) -> Any:
        return self._call(*args)

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., None]:
        return _nothing

    def __reduce__(self) -> str:
        raise TypeError(
            "a module that an engine trains cannot be pickled, because its hooks belong to the engine: save its "
            "state_dict(), or a copy.deepcopy of it"
        )


def _nothing(*args: Any) -> None:
    pass


def weakly(method: Callable[..., Any], *first: Any) -> Callable[..., Any]:
    """A hook that calls a bound method with `first` before its other arguments. It does not keep the method's object
    alive, and does nothing once the object is freed: a hook outlives an engine that was dropped without `destroy`."""
    found = weakref.WeakMethod(method)

    def call(*args: Any) -> Any:
        alive = found()
        return None if alive is None else alive(*first, *args)

    return Hook(call)


class StandIn:
    """A replacement of a module's method. It calls `call`; a copied or pickled module has the original `method`."""

    def __init__(self, call: Callable[..., Any], method: Callable[..., Any]) -> None:
        update_wrapper(self, method)
        self._call = call
        self._method = method
        self._place: tuple[Any, str, Any] | None = None
        """The object, the method's name, and the attribute of that name that the object had itself before, or None."""

    @classmethod
    def put(cls, owner: Any, name: str, call: Callable[..., Any]) -> StandIn:
        """Replaces a method of one object until `remove`."""
        found = cls(call, getattr(owner, name))
        found._place = owner, name, vars(owner).get(name)
        object.__setattr__(owner, name, found)
        return found

    def remove(self) -> None:
        """Puts the original back, unless other code has replaced this stand-in."""
        if self._place is None or vars(self._place[0]).get(self._place[1]) is not self:
            return
        owner, name, before = self._place
        if before is None:
            object.__delattr__(owner, name)
        else:
            object.__setattr__(owner, name, before)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._call(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., Any]:
        found: Callable[..., Any] = copy.deepcopy(self._method, memo)
        return found

    def __reduce__(self) -> Any:
        return self._method.__reduce__()


def own_forward(module: Any) -> Any:
    """The module's forward, below the stand-ins of an engine."""
    return inspect.unwrap(module.forward, stop=lambda found: not isinstance(found, StandIn))
