"""Makes `zero_grad` of the optimizer and of the module drop the sums that an engine has accumulated.

These sums need not be gradients, so stock `zero_grad` would not reach them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from ds_zo.backends.common.plain_copies import StandIn


class ZeroGrads:
    """Wraps `zero_grad` of each owner: after the owner's own method, `drop_sums` is called."""

    def __init__(self, *owners: Any, drop_sums: Callable[[], None]) -> None:
        """`drop_sums` may itself call `zero_grad` of an owner. It must hold no reference to the engine."""
        self._drop_sums = drop_sums
        self._is_dropping = False
        self._stand_ins: list[tuple[Any, StandIn]] = []
        for owner in owners:
            stand_in = StandIn(partial(self._zero, owner.zero_grad), owner.zero_grad)
            object.__setattr__(owner, "zero_grad", stand_in)
            self._stand_ins.append((owner, stand_in))

    def _zero(self, own: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        own(*args, **kwargs)
        if not self._is_dropping:
            self._is_dropping = True
            try:
                self._drop_sums()
            finally:
                self._is_dropping = False

    def close(self) -> None:
        """Removes the wrappers."""
        for owner, stand_in in self._stand_ins:
            if owner.__dict__.get("zero_grad") is stand_in:
                object.__delattr__(owner, "zero_grad")
        self._stand_ins = []
