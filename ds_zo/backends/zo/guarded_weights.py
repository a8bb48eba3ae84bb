"""Refuses weights that a training pass uses while they are not materialised.

[Note: guarded weights] The first forward of each mode shows where weights are used (`probe.py`). A weight that a later
pass uses elsewhere would have neither its noise nor its pending updates. So in a pass, the parameters of a unit that is
not materialised are of a class whose torch functions raise. A materialised unit has plain parameters, so that the
forward's operations have no overhead.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar

from torch import nn

from ds_zo.streaming.intercepted import is_harmless, parameters_in, plain_class, without_interception
from ds_zo.streaming.units import Unit


class _Guarded:
    """Comes before the class of the parameter itself."""

    guard: ClassVar[WeightGuard]

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        with without_interception():
            if not is_harmless(func):
                for parameter in parameters_in((*args, *kwargs.values())):
                    if isinstance(parameter, _Guarded):
                        cls.guard.check(parameter)
            return func(*args, **kwargs)


class WeightGuard:
    """Guards the parameters of units. See [Note: guarded weights]."""

    def __init__(self, units: Iterable[Unit]) -> None:
        units = list(units)
        self._placed = {id(p.parameter): (unit, part, p) for unit in units for part in unit.parts for p in part.placed}
        classes = {plain_class(p.parameter) for unit in units for p in unit.placed}
        guarded = {plain: type(f"Guarded{plain.__name__}", (_Guarded, plain), {"guard": self}) for plain in classes}
        self._classes = {
            id(unit): [(p.parameter, plain := plain_class(p.parameter), guarded[plain]) for p in unit.placed]
            for unit in units
        }
        """Each parameter of a unit, with its class and its class while it is guarded, by the unit's id."""

    def put(self, unit: Unit) -> None:
        for p, _, guarded in self._classes[id(unit)]:
            p.__class__ = guarded  # type: ignore[assignment]

    def lift(self, unit: Unit) -> None:
        for p, plain, _ in self._classes[id(unit)]:
            p.__class__ = plain  # type: ignore[assignment]

    def check(self, parameter: nn.Parameter) -> None:
        """Raises, except for a frozen weight that is on the device in its own dtype: materialising changes nothing of
        it."""
        unit, part, placed = self._placed[id(parameter)]
        if placed.trainable or unit.streamed or not part.viewable:
            raise unseen(f"parameter {placed.name} was used outside the forward of its module")


def unseen(use: str) -> ValueError:
    """The error for a use of weights that the first forward of the mode did not show."""
    return ValueError(
        f"{use}, where the first step did not use it, so that it has no noise there: use it there from the first step "
        "on, or name a list of modules whose own forwards are called, or [] for none (ds_zo.stream.blocks)"
    )
