"""Copies of the current weights that parameters show for a while, as under DeepSpeed's `GatheredParameters`.

[Note: shown and stored] Visits bring up what is stored, so a forward meanwhile does not see what somebody writes to a
copy: one that was changed is refused. One that was not shows its copy again when the visit is over.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from ds_zo.engines.plain_copies import Hook
from ds_zo.streaming.units import Unit

_SAMPLE_NUMEL = 1 << 16
"""Numbers of a copy that are compared to tell whether it was changed: of any row, where there are no more rows."""


@dataclass
class _Copy:
    parameter: nn.Parameter
    value: torch.Tensor
    home: int
    """Where the parameter is when it does not show the copy: an address."""
    unit: Unit | None
    """Whose visits point the parameter elsewhere, if any do."""
    sample: torch.Tensor
    handles: list[RemovableHandle] = field(default_factory=list)


class Lending:
    def __init__(self, is_visited: Callable[[Unit], bool]) -> None:
        """`is_visited`: its parameters are working copies now."""
        self._is_visited = is_visited
        self._copies: dict[int, _Copy] = {}

    def __contains__(self, parameter: nn.Parameter) -> bool:
        return id(parameter) in self._copies

    def show(self, parameter: nn.Parameter, value: torch.Tensor, *, unit: Unit | None) -> None:
        """`parameter` is at home. `unit`: whose visits point it elsewhere, if any do."""
        copy = _Copy(parameter, value, parameter.data_ptr(), unit, _sample(value))
        parameter.data = value
        self._copies[id(parameter)] = copy
        if unit is not None:
            check, again = (Hook(torch.compiler.disable(partial(f, copy))) for f in (self._check, self._show_again))
            copy.handles.append(unit.module.register_forward_pre_hook(check, prepend=True))
            copy.handles.append(unit.module.register_forward_hook(again, always_call=True))

    def show_again(self) -> None:
        """After something that brought whole units home."""
        for copy in self._copies.values():
            self._show_again(copy)

    def take_back(self, parameter: nn.Parameter) -> torch.Tensor:
        """What it shows, or would if no visit had come between; whoever asks brings it home."""
        copy = self._copies.pop(id(parameter))
        for handle in copy.handles:
            handle.remove()
        return self._shown(copy)

    def stored(self, parameter: nn.Parameter) -> torch.Tensor:
        """What it shows is going to be stored, and shown still."""
        copy = self._copies[id(parameter)]
        copy.value = self._shown(copy)
        copy.sample = _sample(copy.value)
        return copy.value

    def _shown(self, copy: _Copy) -> torch.Tensor:
        return copy.value if copy.parameter.data_ptr() == copy.home else copy.parameter.data

    def _is_elsewhere(self, copy: _Copy) -> bool:
        return copy.unit is not None and self._is_visited(copy.unit)

    def _check(self, copy: _Copy, *hooked: Any) -> None:
        if copy.unit is None or self._is_elsewhere(copy):
            return
        is_own = copy.parameter.data_ptr() in (copy.home, copy.value.data_ptr())
        if not is_own or not torch.equal(_sample(copy.value), copy.sample):
            name = next(placed.name for placed in copy.unit.placed if placed.parameter is copy.parameter)
            raise RuntimeError(
                "weights that were changed under deepspeed.zero.GatheredParameters are stored when it ends (with a "
                f"modifier_rank), and a forward inside would run on those of before, got {name}: leave it first"
            )

    def _show_again(self, copy: _Copy, *hooked: Any) -> None:
        if not self._is_elsewhere(copy) and copy.parameter.data_ptr() == copy.home:
            copy.parameter.data = copy.value


def _sample(value: torch.Tensor) -> torch.Tensor:
    """As bytes: NaN equals itself."""
    flat = value.detach().reshape(-1)
    return flat[:: max(1, flat.numel() // _SAMPLE_NUMEL) | 1].clone().view(torch.uint8)
