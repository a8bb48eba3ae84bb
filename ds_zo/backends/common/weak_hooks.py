"""Hooks that do not keep their engine alive."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from ds_zo.backends.common.plain_copies import Hook


def weakly(method: Callable[..., Any], *first: Any) -> Callable[..., Any]:
    """Calls a bound method with `first` before its other arguments, as long as somebody else keeps its object. A hook
    outlives an engine that was dropped without `destroy`; it then does nothing."""
    found = weakref.WeakMethod(method)

    def call(*args: Any) -> Any:
        alive = found()
        return None if alive is None else alive(*first, *args)

    return Hook(call)
