"""Access by name to the weights of the current step, whichever way a backend stores them.

`UnitWeights` serves modules whose blocks a backend has placed. `ResidentWeights` serves modules that are on the device
as a whole. Both make reads, `state_dict`, `GatheredParameters` and DeepSpeed's accessors of full parameters return and
change the weights of the current step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from ds_zo.backends.common.ownership import LowBits, attach, detach
from ds_zo.backends.common.unit_weights import UnitWeights
from ds_zo.streaming.intercepted import check_class, intercept, stop_intercepting


class ResidentWeights:
    """The weights of a module on the device, where each parameter is its own storage. Updates may be pending, and are
    applied before weights are used. The methods do what those of `UnitWeights` do."""

    def __init__(
        self,
        module: nn.Module,
        *,
        device: torch.device,
        low_bits: LowBits | None = None,
        settle: Callable[[], None] | None = None,
        has_pending: Callable[[], bool] = lambda: False,
    ) -> None:
        """`settle` applies pending updates; None: updates are never pending. `has_pending`: whether there are any. None
        of the arguments may refer to the engine, which a module that outlives it would keep alive."""
        self.device = device
        self._module = module
        self._low_bits = low_bits or LowBits()
        self._settle, self._has_pending = settle or (lambda: None), has_pending
        self._parameters = [p for p in module.parameters() if p.is_floating_point()]
        for name, p in module.named_parameters() if settle is not None else ():
            if p.is_floating_point():
                check_class(p, name=name)
        for p in self._parameters:
            attach(p, self)

    def refresh(self, parameter: nn.Parameter) -> None:
        with torch.no_grad():
            self._settle()

    def replace(self, parameter: nn.Parameter, value: torch.Tensor) -> bool:
        self._settle()
        return False

    @contextmanager
    def unwatched(self) -> Iterator[None]:
        """Reads are watched while an update is pending. Only the engine's own work makes updates pending."""
        try:
            stop_intercepting(self._parameters)
            yield
        finally:
            if self._has_pending():
                intercept(self._parameters)

    @torch.no_grad()
    def read(self, parameter: nn.Parameter) -> torch.Tensor:
        self._settle()
        return parameter.data

    @torch.no_grad()
    def store(self, parameter: nn.Parameter, value: torch.Tensor) -> None:
        """An unchanged parameter keeps its low bits."""
        self._settle()
        if not torch.equal(parameter.data, value):
            parameter.copy_(value)

    @torch.no_grad()
    def read_full(self, parameter: nn.Parameter) -> torch.Tensor:
        self._settle()
        return self._low_bits.added(parameter, parameter.detach().to(torch.float32, copy=True))

    @torch.no_grad()
    def write_full(self, parameter: nn.Parameter, value: torch.Tensor) -> None:
        self._settle()
        value = value.to(parameter.device, torch.float32)
        parameter.data.copy_(value)
        self._low_bits.keep(parameter, value)

    def frozen_undecoded(self) -> AbstractContextManager[None]:
        return nullcontext()

    # Checkpoints

    def stored(self) -> dict[str, torch.Tensor]:
        self._settle()
        return {name: value for name, value in self._module.state_dict().items() if isinstance(value, torch.Tensor)}

    def read_stored(self, name: str, value: torch.Tensor) -> torch.Tensor:
        return value.cpu()

    def write_stored(self, name: str, target: torch.Tensor, value: torch.Tensor) -> None:
        target.copy_(value)

    def stored_changed(self) -> None:
        """Does nothing: parameters are the storage."""

    @property
    def stored_are_copies(self) -> bool:
        return False

    def readable(self, *, reads: bool) -> AbstractContextManager[None]:
        return nullcontext()

    # DeepSpeed's `GatheredParameters`: no copies are made

    def gather(self, parameters: Sequence[nn.Parameter]) -> None:
        self._settle()

    def is_gathered(self, parameter: nn.Parameter) -> bool:
        return False

    def gathered_value(self, parameter: nn.Parameter) -> torch.Tensor:
        return parameter.data

    def release(self, parameter: nn.Parameter) -> None:
        """Does nothing: there is no copy."""

    def bind_stored(self, parameter: nn.Parameter) -> None:
        """Does nothing: a parameter is its own storage."""

    def modules_that_materialise(self, parameters: Sequence[nn.Parameter]) -> dict[nn.Module, list[nn.Parameter]]:
        return {}

    def check_forward(self, parameters: Sequence[nn.Parameter], is_written: bool, *hooked: Any) -> None:
        """Does nothing: a forward uses the values that a user has written."""

    def owns_module(self) -> bool:
        return True

    def close(self) -> None:
        stop_intercepting(self._parameters)
        for p in self._parameters:
            detach(p, self)
        self._parameters = []


WeightsByName = UnitWeights | ResidentWeights
"""The weights of one engine's module. Each parameter has it as its owner."""
