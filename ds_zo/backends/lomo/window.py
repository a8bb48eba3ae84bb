"""The accumulation window: the backwards since the last step, and the outcome that `step` returns for them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from enum import Enum
from typing import Any

import torch

from ds_zo.backends.common.backend import StepOutcome
from ds_zo.backends.common.deferred_scalar import DeferredScalar
from ds_zo.backends.lomo.skipped_updates import SkippedUpdates


class WindowState(Enum):
    EMPTY = "no backward has run since the last step"
    MEASURED = "a backward has run and another may follow: it updated nothing, or zero_grad() was called after it"
    UPDATED = "weights are updated, and the update is counted"
    UPDATED_BARE = "the user has called loss.backward() directly: it updates weights, and the update is not counted yet"


class AccumulationWindow:
    """Counts updates, and collects the outcome of the backwards since the last step."""

    def __init__(self, skipped: SkippedUpdates, *, accumulation: str, params_at: str) -> None:
        """`accumulation`: the optimizer's setting. `params_at`: the place of the optimizer's params in the JSON."""
        self.state = WindowState.EMPTY
        self.skipped = skipped
        self.num_updates = 0
        """Number of backwards that have updated weights. It selects the bits of stochastic rounding."""
        self.num_tries = 0
        """Number of backwards that have updated weights or tried to. It never decreases."""
        self.last_change = 0
        """`num_tries` after the last backward that has updated weights, as far as the host knows."""
        self._change_before = 0
        """`last_change` before the last backward."""
        self._outcome: StepOutcome | None = None
        """None: no backward has ended since the last step."""
        self._accumulation = accumulation
        self._params_at = params_at

    def begin(self, loss: torch.Tensor | None) -> None:
        """Begins a backward. `loss`: see `SkippedUpdates.begin`. Raises at a second backward before `engine.step()`.
        The JSON's `gradient_accumulation_steps` is refused elsewhere; here a user has moved the accumulation boundary
        or has several losses per step."""
        self.read_skipped()
        if self.state is WindowState.UPDATED and self._accumulation == "refuse":
            raise RuntimeError(
                "a step has one backward, because each gradient is freed after its update, got a second backward "
                "before engine.step(): call engine.step() after each backward, add the losses up, or set "
                f'{self._params_at}.accumulation to "sequential" for one small update per backward'
            )
        self.skipped.begin(loss)

    def begin_bare(self) -> None:
        """Begins a direct `loss.backward()`."""
        self.begin(None)
        self.state = WindowState.UPDATED_BARE

    def end(self, norm: float | DeferredScalar | None, *, finite: bool = True, overflow: bool = False) -> None:
        """Ends a backward. `finite` False: it has updated nothing. With sequential accumulation, a step counts as
        skipped if the updates of all its micro-batches were skipped."""
        applied = finite and self.skipped.end()
        made = True if self._outcome is not None and self._outcome.applied is True else applied
        self._outcome = StepOutcome(applied=made, grad_norm=norm, advance_schedule=made is not False or not overflow)
        self.num_updates += finite
        if finite:
            self.state = WindowState.UPDATED
            self.num_tries += 1
            self._change_before, self.last_change = self.last_change, self.num_tries
        elif self.state is WindowState.EMPTY:
            self.state = WindowState.MEASURED

    def end_bare(self) -> None:
        """Ends a direct `loss.backward()`, if there was one. Such a call does not tell the backend that it has ended,
        so the backend's next call does."""
        if self.state is WindowState.UPDATED_BARE:
            self.end(None)

    def read_skipped(self) -> None:
        """Reads which updates of the last pass were skipped, and corrects the counters. See [Note: skipped updates]."""
        self.end_bare()
        if not self.skipped.read():
            self.num_updates -= 1
            self.last_change = self._change_before
        if self._outcome is not None and isinstance(self._outcome.applied, DeferredScalar):
            self._outcome = replace(self._outcome, applied=bool(self._outcome.applied.get()))
            if not self._outcome.applied:
                self.state = WindowState.MEASURED

    def permit_backward(self) -> None:
        """Permits another backward before the next step."""
        self.end_bare()
        if self.state is WindowState.UPDATED:
            self.state = WindowState.MEASURED

    def step(self) -> StepOutcome:
        """Returns the outcome of the window, and empties it."""
        self.end_bare()
        outcome = self._outcome or StepOutcome(applied=True)
        self._outcome, self.state = None, WindowState.EMPTY
        return outcome

    def state_dict(self) -> dict[str, Any] | None:
        """The outcome so far. None: no backward has run since the last step."""
        self.read_skipped()
        if self._outcome is None:
            return None
        norm = self._outcome.grad_norm
        return {
            "applied": self._outcome.applied,
            "grad_norm": norm.get() if isinstance(norm, DeferredScalar) else norm,
            "advance_schedule": self._outcome.advance_schedule,
        }

    def restart(self, num_updates: int) -> None:
        """Empties the window. `num_updates`: of the checkpoint that is loaded."""
        self.num_updates = num_updates
        self.skipped.forget()
        self._outcome, self.state = None, WindowState.EMPTY

    def load_state_dict(self, saved: Mapping[str, Any] | None) -> None:
        if saved is not None:
            self._outcome = StepOutcome(**saved)
            self.state = WindowState.UPDATED if self._outcome.applied else WindowState.MEASURED
