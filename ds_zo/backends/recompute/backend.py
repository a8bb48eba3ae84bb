"""Access to weights for backends whose blocks may be recomputed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

from ds_zo.backends.common.backend import Backend
from ds_zo.backends.recompute.module_state import RecomputedModuleState


class RecomputedBackend(Backend):
    """A backend that streams blocks and recomputes them, or keeps the whole module on the device."""

    module_state: RecomputedModuleState | None = None
    """Access to the weights of streamed blocks. None: the module's parameters are the weights."""

    def plain_parameters(self) -> AbstractContextManager[None]:
        """Context in which parameters do not report reads ([Note: direct access to parameters])."""
        return nullcontext() if self.module_state is None else self.module_state.unwatched()

    def stored(self) -> dict[str, torch.Tensor]:
        return super().stored() if self.module_state is None else self.module_state.stored()

    @property
    def stored_are_copies(self) -> bool:
        return self.module_state is not None and bool(self.module_state.collected)

    def write_stored(self, name: str, target: torch.Tensor, value: torch.Tensor) -> None:
        write = super().write_stored if self.module_state is None else self.module_state.write_stored
        write(name, target, value)

    def stored_changed(self) -> None:
        if self.module_state is not None:
            self.module_state.stored_changed()

    @contextmanager
    def readable_by_writers(self) -> Iterator[None]:
        state = self.module_state
        with nullcontext() if state is None else state.all_readable(reads=self.is_writer):
            yield
