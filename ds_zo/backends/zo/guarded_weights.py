"""Refuses weights that a training pass uses while they are not materialised.

[Note: guarded weights] The first forward of each mode shows where weights are used (`probe.py`). A weight that a later
pass uses elsewhere would have neither its noise nor its pending updates. So in a pass, the parameters of a unit that is
not materialised are of a class whose torch functions raise. A materialised unit has plain parameters, so that the
forward's operations have no overhead. Hooks that log a model read `parameter.data`: the first such read is warned of.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar

from torch import nn

from ds_zo.logs import warn
from ds_zo.streaming.intercepted import is_harmless, parameters_in, plain_class, property_of, without_interception
from ds_zo.streaming.units import Unit


class _Guarded:
    __slots__ = ()
    guard: ClassVar[WeightGuard]

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        with without_interception():
            if property_of(func) == "data" and func.__name__ == "__get__":
                cls.guard.warn_of_read(args[0])
            elif not is_harmless(func):
                for parameter in parameters_in((*args, *kwargs.values())):
                    if isinstance(parameter, cls):
                        cls.guard.check(parameter)
            return func(*args, **kwargs)


class WeightGuard:
    """Guards the parameters of units. See [Note: guarded weights]."""

    def __init__(self, units: Iterable[Unit]) -> None:
        units = list(units)
        self._placed = {id(p.parameter): (unit, part, p) for unit in units for part in unit.parts for p in part.placed}
        self._parameters = {id(unit): [p.parameter for p in unit.placed] for unit in units}
        plain = {plain_class(p) for own in self._parameters.values() for p in own}
        self._guarded = {cls: type(f"Guarded{cls.__name__}", (_Guarded, cls), {"guard": self}) for cls in plain}
        """The guarded class of each class of parameters."""
        self._plain = {guarded: cls for cls, guarded in self._guarded.items()}
        self._has_warned = False

    def put(self, unit: Unit) -> None:
        """Guards the unit's parameters."""
        for p in self._parameters[id(unit)]:
            p.__class__ = self._guarded.get(type(p), type(p))  # type: ignore[assignment]

    def lift(self, unit: Unit) -> None:
        for p in self._parameters[id(unit)]:
            p.__class__ = self._plain.get(type(p), type(p))  # type: ignore[assignment]

    def check(self, parameter: nn.Parameter) -> None:
        """Raises if the forward needs another value of the parameter than it shows."""
        if self._is_prepared(parameter):
            unit, _, placed = self._placed[id(parameter)]
            raise unseen(f"parameter {placed.name} was used outside the forward of its module", unit)

    def warn_of_read(self, parameter: nn.Parameter) -> None:
        if self._is_prepared(parameter) and not self._has_warned:
            self._has_warned = True
            warn(
                f"{self._placed[id(parameter)][2].name}.data was read inside a training forward, while its module did "
                "not run: it shows stored weights, which may lack the last updates and have no noise; read weights "
                "between steps, where they are current"
            )

    def _is_prepared(self, parameter: nn.Parameter) -> bool:
        """Whether materialising changes what the parameter shows. False for a frozen weight that is on the device in
        its own dtype."""
        unit, part, placed = self._placed[id(parameter)]
        return placed.trainable or unit.streamed or not part.viewable


def unseen(use: str, unit: Unit) -> ValueError:
    """The error for a use of the unit's weights that the first forward of the mode did not show."""
    remedy = "use it there from the first step on"
    if unit.is_block:
        remedy += ", or name a list of modules whose own forwards are called, or [] for none (ds_zo.stream.blocks)"
    return ValueError(f"{use}, where the first step did not use it, so that it has no noise there: {remedy}")
