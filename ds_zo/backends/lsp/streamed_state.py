"""Access by name to the weights of streamed blocks with pending updates."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from ds_zo.backends.recompute.module_state import RecomputedModuleState
from ds_zo.backends.recompute.recomputation import Recomputation
from ds_zo.streaming.units import PlacedParameter, Unit


class StreamedUpdateOnAccessState(RecomputedModuleState):
    """Gives access to weights by name, after all pending updates have been applied."""

    def __init__(
        self, recomputation: Recomputation, module: nn.Module, apply_pending_updates: Callable[[], None]
    ) -> None:
        self._apply_pending_updates = apply_pending_updates
        super().__init__(recomputation, module)

    def _is_watched(self, unit: Unit) -> bool:
        return True

    def refresh(self, parameter: nn.Parameter) -> None:
        if not self._is_busy():
            self._apply_pending_updates()
            super().refresh(parameter)

    def read(self, parameter: nn.Parameter) -> torch.Tensor:
        self._apply_pending_updates()
        return super().read(parameter)

    def write(self, parameter: nn.Parameter, value: torch.Tensor) -> None:
        self._apply_pending_updates()
        super().write(parameter, value)

    def _full_fp32(self, unit: Unit, placed: PlacedParameter) -> torch.Tensor:
        self._apply_pending_updates()
        return super()._full_fp32(unit, placed)

    def _before_load(self, unit: Unit) -> None:
        self._apply_pending_updates()
        super()._before_load(unit)
