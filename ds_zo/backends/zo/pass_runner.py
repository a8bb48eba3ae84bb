"""Runs the passes of a training forward: in lockstep where the forward allows it, else one after the other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from deepspeed.utils import logger
from torch import nn

from ds_zo.backends.common.module_state import SavedState
from ds_zo.backends.zo.lockstep import CannotInterleave, Lockstep
from ds_zo.backends.zo.pass_state import PassState
from ds_zo.backends.zo.working_copies import WorkingCopies

Calls = Sequence[Callable[[], Any]]
"""One call of the model for each pass."""


class PassRunner:
    """Runs passes, each on its own copies of the weights and with its own module state."""

    def __init__(
        self, module: nn.Module, lockstep: Lockstep, working_copies: WorkingCopies, pass_state: PassState
    ) -> None:
        self.module, self.lockstep = module, lockstep
        self.working_copies, self.pass_state = working_copies, pass_state
        self.interleave = True
        """Whether passes run in lockstep."""
        lockstep.on_switch = self._switch
        lockstep.before_rerun = pass_state.restart

    def _switch(self, index: int) -> None:
        """Binds the weights and the module state of pass `index`, which starts or resumes."""
        self.working_copies.switch(index)
        self.pass_state.switch(index)

    def run(self, calls: Calls, *, check: Callable[[], None] = lambda: None) -> list[Any]:
        """Runs all passes and returns their results. `check` is called after the last pass. If it raises, the module's
        state is restored."""
        if self.interleave:
            try:
                with self.working_copies.training_pass(), self.pass_state.in_passes(), torch.no_grad():
                    results = self.lockstep.together(calls, self.working_copies.ready)
                    check()
                    return results
            except CannotInterleave as reason:
                self.interleave = False
                logger.warning(
                    "ds_zo: from now on this forward runs one pass after the other, and each pass uploads every block, "
                    f"because {reason}"
                )
        return self.one_by_one(calls, check=check)

    def one_by_one(
        self, calls: Calls, *, last_first: bool = False, check: Callable[[], None] = lambda: None
    ) -> list[Any]:
        """Runs the passes one after the other, each from the same module state and random state. `check`: as in
        `run`."""
        start = SavedState.of(self.module, tensors=False)

        def run_alone(index: int, call: Callable[[], Any]) -> Any:
            start.restore()
            self.pass_state.enter(index)
            with self.working_copies.training_pass():
                return call()

        with self.pass_state.in_passes():
            alone = [partial(run_alone, i, call) for i, call in enumerate(calls)]
            results = self.lockstep.one_by_one(alone, last_first=last_first)
            check()
            return results
