"""DeepSpeed's accessors of whole parameters, for weights that may lag until their next use."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import nn

from ds_zo.backends.common.module_state import ModuleState
from ds_zo.streaming.units import Placed, Unit
from ds_zo.streaming.watched import unwatch, watch


class SettledState(ModuleState):
    """Weights stay where they are, so all there is to do is to bring them up to date before somebody looks."""

    def __init__(
        self, module: nn.Module, settle: Callable[[], None], *, lags: Callable[[], bool], device: torch.device
    ) -> None:
        """`lags`: whether some weight is behind the last step."""
        self._settle, self._lags = settle, lags
        self._parameters: list[nn.Parameter] = []
        super().__init__((), module, device=device)
        self._parameters = [p for p in module.parameters() if p.is_floating_point()]
        self._block_store: dict[int, torch.Tensor] = {}
        """Where a parameter's weights are while it shows somebody's copy."""
        for p in self._parameters:
            self._attach_accessors(p, partial(self._full, p))

    def watch(self) -> None:
        """Where weights lag, which nothing but the engine's own work makes them do."""
        if self._lags():
            watch(p for p in self._parameters if p not in self.gathered_copies)

    def unwatch(self) -> None:
        unwatch(self._parameters)

    @torch.no_grad()
    def bring_up(self, parameter: nn.Parameter) -> None:
        self._settle()

    def replace(self, parameter: nn.Parameter, value: torch.Tensor) -> bool:
        self._settle()
        return False

    @torch.no_grad()
    def read(self, parameter: nn.Parameter) -> torch.Tensor:
        self._settle()
        return self._block_store.setdefault(id(parameter), parameter.data)

    @torch.no_grad()
    def write(self, parameter: nn.Parameter, value: torch.Tensor) -> None:
        self._settle()
        self._block_store.get(id(parameter), parameter.data).copy_(value)

    def bind_stored(self, parameter: nn.Parameter) -> None:
        home = self._block_store.pop(id(parameter), None)
        if home is not None:
            parameter.data = home

    def _full(self, parameter: nn.Parameter) -> torch.Tensor:
        self._settle()
        return parameter.detach().to(torch.float32, copy=True)

    def _full_fp32(self, unit: Unit, placed: Placed) -> torch.Tensor:
        return self._full(placed.parameter)

    def _before_load(self, unit: Unit) -> None:
        self._settle()

    def close(self) -> None:
        super().close()
        for p in self._parameters:
            self.bind_stored(p)
            self._detach_accessors(p)
        self._parameters = []
