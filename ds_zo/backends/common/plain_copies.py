"""`copy.deepcopy` of a module under an engine is a plain module: the weights of the current step, no engine.

Reference models and averages of weights are made so. Left alone, a function would be copied as itself, and the copy run
on the engine's blocks; a bound method, together with the engine. What an engine hangs on a module is one of these.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import update_wrapper
from typing import Any


class Hook:
    """Calls what it is given; a copy does nothing."""

    def __init__(self, call: Callable[..., Any]) -> None:
        self._call = call

    def __call__(self, *args: Any) -> Any:
        return self._call(*args)

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., None]:
        return _nothing

    def __reduce__(self) -> str:
        raise TypeError(
            "a module that an engine has cannot be pickled, since its hooks are the engine's: save its state_dict(), "
            "or a copy.deepcopy of it"
        )


def _nothing(*args: Any) -> None:
    pass


class StandIn:
    """Is called in place of a module's method; a copy of the module, or a pickled one, has that method again."""

    def __init__(self, call: Callable[..., Any], method: Callable[..., Any]) -> None:
        update_wrapper(self, method)
        self._call = call
        self._method = method

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._call(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., Any]:
        found: Callable[..., Any] = copy.deepcopy(self._method, memo)
        return found

    def __reduce__(self) -> Any:
        return self._method.__reduce__()
