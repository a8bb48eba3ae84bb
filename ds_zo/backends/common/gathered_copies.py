"""Copies of the current weights that parameters show for a while, as under DeepSpeed's `GatheredParameters`.

[Note: shown and stored] Visits bring up what is stored, so a forward meanwhile does not see what somebody writes to a
copy: one that was changed is refused. One that was not shows its copy again when the visit is over.
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
"""Numbers of a copy that are compared to tell whether it was changed: of any row, where there are no more rows."""


@dataclass
class _Copy:
    parameter: nn.Parameter
    unit: Unit | None
    """Where the parameter is placed, if it is: then that keeps what it shows."""
    sample: torch.Tensor
    handles: list[RemovableHandle] = field(default_factory=list)

    @property
    def value(self) -> torch.Tensor:
        return self.parameter.data if self.unit is None else self.unit.lent(self.parameter)


class GatheredCopies:
    def __init__(self) -> None:
        self._copies: dict[int, _Copy] = {}

    def __contains__(self, parameter: nn.Parameter) -> bool:
        return id(parameter) in self._copies

    def add(
        self, parameter: nn.Parameter, value: torch.Tensor, *, unit: Unit | None, checked_modules: Iterable[nn.Module]
    ) -> None:
        """`parameter` is at home. `checked_modules`: modules whose forwards run on what is stored."""
        copy = self._copies[id(parameter)] = _Copy(parameter, unit, _sample(value))
        if unit is None:
            parameter.data = value
        else:
            unit.lend(parameter, value)
        check = Hook(torch.compiler.disable(partial(self._check, copy)))
        copy.handles += [module.register_forward_pre_hook(check, prepend=True) for module in checked_modules]

    def value_of(self, parameter: nn.Parameter) -> torch.Tensor:
        """What it shows, or would if no visit had come between."""
        return self._copies[id(parameter)].value

    def remove(self, parameter: nn.Parameter) -> torch.Tensor:
        """What it shows; whoever asks brings it home."""
        copy = self._copies.pop(id(parameter))
        for handle in copy.handles:
            handle.remove()
        value = copy.value
        if copy.unit is not None:
            copy.unit.take_back(parameter)
        return value

    def update(self, parameter: nn.Parameter, value: torch.Tensor) -> None:
        """`value` was stored; it is shown too."""
        copy = self._copies[id(parameter)]
        if copy.value.data_ptr() != value.data_ptr():
            copy.value.copy_(value.detach())
        copy.sample = _sample(copy.value)

    def close(self, *, rebind: bool) -> None:
        """The engine ends first: what copies show is not stored."""
        for copy in list(self._copies.values()):
            self.remove(copy.parameter)
            if rebind and copy.unit is not None:
                copy.unit.bind_stored()

    def _check(self, copy: _Copy, *hooked: Any) -> None:
        unit = copy.unit
        if unit is None or unit.is_visited or torch.equal(_sample(copy.value), copy.sample):
            return
        name = next(placed.name for placed in unit.placed if placed.parameter is copy.parameter)
        raise RuntimeError(
            "weights that were changed under deepspeed.zero.GatheredParameters are stored when it ends (with a "
            f"modifier_rank), and a forward inside would run on those of before, got {name}: leave it first"
        )


def _sample(value: torch.Tensor) -> torch.Tensor:
    """As bytes: NaN equals itself."""
    flat = value.detach().reshape(-1)
    return flat[:: max(1, flat.numel() // _SAMPLE_NUMEL) | 1].clone().view(torch.uint8)
