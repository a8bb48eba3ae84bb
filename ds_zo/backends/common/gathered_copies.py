"""Copies of the current weights at which parameters point inside DeepSpeed's `GatheredParameters`.

[Note: shown and stored] A forward materialises the stored weights, so it would not use values that a user has written
to a gathered copy. A forward inside the context raises if the copy of a parameter that it uses was changed. If the copy
is unchanged, the forward runs, and the parameter points at its copy again afterwards.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from ds_zo.backends.common.plain_copies import Hook
from ds_zo.streaming.units import Unit

_SAMPLE_NUMEL = 1 << 16
"""Number of elements of a copy that are compared to find out whether it was changed. They are evenly spaced: a
matrix with no more rows than that has one in every row."""


@dataclass
class _Copy:
    """The gathered copy of one parameter."""

    parameter: nn.Parameter
    unit: Unit | None
    """The unit that holds the parameter and, while its module runs, the copy. None: the backend has not placed the
    parameter in a unit."""
    sample: torch.Tensor
    """Bytes of some elements of the copy when it was made or last stored."""
    handles: list[RemovableHandle] = field(default_factory=list)

    @property
    def value(self) -> torch.Tensor:
        return self.parameter.data if self.unit is None else self.unit.gathered_copy(self.parameter)


class GatheredCopies:
    """The parameters that point at gathered copies now. See [Note: shown and stored]."""

    def __init__(self) -> None:
        self._copies: dict[int, _Copy] = {}
        """By the parameter's id."""

    def __contains__(self, parameter: nn.Parameter) -> bool:
        return id(parameter) in self._copies

    def add(
        self, parameter: nn.Parameter, value: torch.Tensor, *, unit: Unit | None, checked_modules: Iterable[nn.Module]
    ) -> None:
        """Points `parameter`, which is bound to its storage, at the copy `value`. `checked_modules`: the modules whose
        forwards use the stored weights, and raise if the copy was changed."""
        copy = self._copies[id(parameter)] = _Copy(parameter, unit, _sample(value))
        if unit is None:
            parameter.data = value
        else:
            unit.show_gathered_copy(parameter, value)
        check = Hook(torch.compiler.disable(partial(self._check, copy)))
        copy.handles += [module.register_forward_pre_hook(check, prepend=True) for module in checked_modules]

    def value_of(self, parameter: nn.Parameter) -> torch.Tensor:
        """The copy at which the parameter points, also while a forward has bound the parameter elsewhere."""
        return self._copies[id(parameter)].value

    def remove(self, parameter: nn.Parameter) -> torch.Tensor:
        """Removes and returns the copy. The caller binds the parameter to its storage afterwards."""
        copy = self._copies.pop(id(parameter))
        for handle in copy.handles:
            handle.remove()
        value = copy.value
        if copy.unit is not None:
            copy.unit.drop_gathered_copy(parameter)
        return value

    def update(self, parameter: nn.Parameter, value: torch.Tensor) -> None:
        """Writes `value`, which was stored as the parameter's weight, to its copy too."""
        copy = self._copies[id(parameter)]
        if copy.value.data_ptr() != value.data_ptr():
            copy.value.copy_(value.detach())
        copy.sample = _sample(copy.value)

    def close(self, *, rebind: bool) -> None:
        """Called where an engine is closed inside `GatheredParameters`: removes all copies without storing them.
        `rebind`: the parameters are bound to their storage."""
        for copy in list(self._copies.values()):
            self.remove(copy.parameter)
            if rebind and copy.unit is not None:
                copy.unit.bind_stored()

    def _check(self, copy: _Copy, *hooked: Any) -> None:
        """Hook before a forward: raises if the copy was changed. `hooked`: the arguments of torch's hook."""
        unit = copy.unit
        if unit is None or unit.is_materialised or torch.equal(_sample(copy.value), copy.sample):
            return
        name = next(placed.name for placed in unit.placed if placed.parameter is copy.parameter)
        raise RuntimeError(
            "weights that are changed under deepspeed.zero.GatheredParameters are stored when the context ends (with a "
            f"modifier_rank), and a forward inside would use the old weights, got a change of {name}: leave it first"
        )


def _sample(value: torch.Tensor) -> torch.Tensor:
    """Bytes of some elements. They are compared as bytes, because NaN is not equal to NaN."""
    flat = value.detach().reshape(-1)
    return flat[:: max(1, flat.numel() // _SAMPLE_NUMEL) | 1].clone().view(torch.uint8)
