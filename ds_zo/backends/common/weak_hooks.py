"""Hooks that hold a weak reference to their engine."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from ds_zo.backends.common.plain_copies import Hook


def weakly(method: Callable[..., Any], *first: Any) -> Callable[..., Any]:
    """A hook that calls a bound method with `first` before its other arguments. It does not keep the method's object
    alive, and does nothing once the object is freed: a hook outlives an engine that was dropped without `destroy`."""
    found = weakref.WeakMethod(method)

    def call(*args: Any) -> Any:
        alive = found()
        return None if alive is None else alive(*first, *args)

    return Hook(call)
