"""Slices of the buffers that working copies lie in. Slicing costs more than launching a small block's kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

from ds_zo.ops import Planes
from ds_zo.streaming.units import Unit

_T = TypeVar("_T")


class CachedViews:
    """Makes each slice of a buffer once."""

    def __init__(self) -> None:
        self._cached: dict[Any, Any] = {}

    def clear(self) -> None:
        self._cached.clear()

    def planes(self, unit: Unit, buffer: torch.Tensor, low: torch.Tensor | None = None) -> list[Planes]:
        return self._get(("planes", id(unit), _at(buffer), _at(low)), lambda: unit.planes(buffer, low))

    def outs(self, unit: Unit, scratch: torch.Tensor, second: torch.Tensor | None = None) -> list[torch.Tensor | None]:
        return self._get(("outs", id(unit), _at(scratch), _at(second)), lambda: unit.outs(scratch, second=second))

    def views(
        self, unit: Unit, source: torch.Tensor, scratch: torch.Tensor, *, second: torch.Tensor | None = None
    ) -> list[torch.Tensor]:
        """One tensor per parameter: a view of the working copy, or of the stored bytes of a direct parameter, which is
        not copied. `second`: memory of the second copy, for its views."""
        return self._get(
            ("views", id(unit), _at(source), _at(scratch), _at(second)),
            lambda: unit.views(self.planes(unit, source), self.outs(unit, scratch, second)),
        )

    def _get(self, key: Any, make: Callable[[], _T]) -> _T:
        if key not in self._cached:
            self._cached[key] = make()
        found: _T = self._cached[key]
        return found


def _at(buffer: torch.Tensor | None) -> int:
    return 0 if buffer is None else buffer.data_ptr()
