"""`zero_grad` of the optimizer or of the module reaches what an engine has accumulated, which need not be gradients."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from ds_zo.backends.common.plain_copies import StandIn


class ZeroGrads:
    """Stands before `zero_grad` of each owner: after its own, `forget` is called."""

    def __init__(self, *owners: Any, forget: Callable[[], None]) -> None:
        """`forget` may itself call them, and must not keep the engine alive."""
        self._forget = forget
        self._is_forgetting = False
        self._stand_ins: list[tuple[Any, StandIn]] = []
        for owner in owners:
            stand_in = StandIn(partial(self._zero, owner.zero_grad), owner.zero_grad)
            object.__setattr__(owner, "zero_grad", stand_in)
            self._stand_ins.append((owner, stand_in))

    def _zero(self, own: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        own(*args, **kwargs)
        if not self._is_forgetting:
            self._is_forgetting = True
            try:
                self._forget()
            finally:
                self._is_forgetting = False

    def close(self) -> None:
        for owner, stand_in in self._stand_ins:
            if owner.__dict__.get("zero_grad") is stand_in:
                object.__delattr__(owner, "zero_grad")
        self._stand_ins = []
