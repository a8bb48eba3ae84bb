"""`state_dict`, `GatheredParameters` and DeepSpeed's full-parameter accessors for weights with pending updates."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import nn

from ds_zo.backends.common.module_state import ModuleState
from ds_zo.streaming.intercepted import intercept, stop_intercepting
from ds_zo.streaming.units import PlacedParameter, Unit


class UpdateOnAccessState(ModuleState):
    """Applies pending updates before weights are read or written. The weights stay on the device."""

    def __init__(
        self,
        module: nn.Module,
        apply_pending_updates: Callable[[], None],
        *,
        has_pending: Callable[[], bool],
        device: torch.device,
    ) -> None:
        """`has_pending`: whether the update of some weight is pending."""
        self._apply_pending_updates, self._has_pending = apply_pending_updates, has_pending
        self._parameters: list[nn.Parameter] = []
        super().__init__((), module, device=device)
        self._parameters = [p for p in module.parameters() if p.is_floating_point()]
        for p in self._parameters:
            self._attach_accessors(p, partial(self._full, p))

    def intercept(self) -> None:
        """Watches accesses to parameters while an update is pending. Only the backend's own work makes updates
        pending, so this need not be called at other times."""
        if self._has_pending():
            intercept(self._parameters)

    def stop_intercepting(self) -> None:
        stop_intercepting(self._parameters)

    @torch.no_grad()
    def refresh(self, parameter: nn.Parameter) -> None:
        self._apply_pending_updates()

    def replace(self, parameter: nn.Parameter, value: torch.Tensor) -> bool:
        self._apply_pending_updates()
        return False

    @torch.no_grad()
    def read(self, parameter: nn.Parameter) -> torch.Tensor:
        self._apply_pending_updates()
        return parameter.data

    @torch.no_grad()
    def write(self, parameter: nn.Parameter, value: torch.Tensor) -> None:
        self._apply_pending_updates()
        parameter.data.copy_(value)

    def gather(self, parameters: Sequence[nn.Parameter]) -> None:
        """Makes no copies: a parameter is its own storage."""
        self._apply_pending_updates()

    def gathered_value(self, parameter: nn.Parameter) -> torch.Tensor:
        return parameter.data

    def bind_stored(self, parameter: nn.Parameter) -> None:
        """Does nothing: a parameter is its own storage."""

    def _full(self, parameter: nn.Parameter) -> torch.Tensor:
        self._apply_pending_updates()
        return parameter.detach().to(torch.float32, copy=True)

    def _full_fp32(self, unit: Unit, placed: PlacedParameter) -> torch.Tensor:
        return self._full(placed.parameter)

    def _before_load(self, unit: Unit) -> None:
        self._apply_pending_updates()

    def close(self) -> None:
        super().close()
        for p in self._parameters:
            self._detach_accessors(p)
        self._parameters = []
