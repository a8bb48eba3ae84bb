"""Looks at the first training forward of each mode, so that later ones run without a check.

[Note: probed forwards] A mode is a set of trained parameters with the modules' `training` flags. Its first forward
shows four things. State that the model keeps on its modules would mix between passes in lockstep, so each pass gets its
own. Where passes write to the inputs, each pass gets copies. A weight that is used outside its module, or while another
module overwrites its copy, becomes pass-long. In the first mode, passes may also differ by more than the weights
([Note: two runs of a pass]). A later forward of the mode that uses a weight elsewhere is refused
([Note: guarded weights]).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from deepspeed.utils import logger

from ds_zo.backends.common.module_state import Places, SavedState
from ds_zo.backends.common.stray_weights import StrayWeightDetector, used_outside
from ds_zo.backends.zo.cuda_graphs import BlockGraphs
from ds_zo.backends.zo.pass_inputs import PassInputs
from ds_zo.backends.zo.pass_runner import Calls, PassRunner
from ds_zo.backends.zo.repeats import Losses, agree, check_repeats
from ds_zo.backends.zo.store import ZOStore
from ds_zo.streaming.units import Unit

Mode = tuple[frozenset[int], tuple[bool, ...]]
"""Ids of the parameters that are trained, and the `training` flag of each module."""


@dataclass(frozen=True)
class ForwardProfile:
    """What the first training forwards of all modes have shown."""

    modes: frozenset[Mode] = frozenset()
    """The modes that were looked at."""
    places: Places = field(default_factory=Places)
    """The module state that passes change."""
    writes_inputs: bool = False
    """Whether passes write to their inputs."""


class Probe:
    """Runs the first training forward of a mode. See [Note: probed forwards]."""

    def __init__(
        self,
        runner: PassRunner,
        store: ZOStore,
        *,
        graphs: BlockGraphs | None,
        before_pass_long: Callable[[Sequence[Unit]], None],
    ) -> None:
        """`before_pass_long` is called with units that were used outside of their modules, before each pass gets its
        own copies of them."""
        self._runner = runner
        self._module, self._lockstep = runner.module, runner.lockstep
        self._working_copies, self._pass_state = runner.working_copies, runner.pass_state
        self._store = store
        self._graphs = graphs
        self._before_pass_long = before_pass_long

    def look(
        self,
        calls: Calls,
        inputs: PassInputs,
        *,
        mode: Mode,
        profile: ForwardProfile,
        check: Callable[[Callable[[], None]], None] | None = None,
    ) -> ForwardProfile:
        """Runs the passes of the first forward of `mode`, and returns what is known now. The runs leave no effects on
        the module and on the random states. `check` runs passes of its own; its argument undoes their effects."""
        randomness, state = self._lockstep.snapshot(), SavedState.of(self._module)

        def rewind() -> None:
            self._lockstep.set_snapshot(randomness)
            state.restore()

        try:
            with torch.compiler.set_stance("force_eager"):  # what detects uses of weights does not see compiled code
                inputs.watch()
                losses = self._with_strays_found(calls, rewind, state)
                found = ForwardProfile(
                    profile.modes | {mode},
                    profile.places | state.keep_changed(),
                    inputs.were_written() or profile.writes_inputs,
                )
                has_changed = len(found.places) > len(profile.places) or found.writes_inputs > profile.writes_inputs
                if has_changed:
                    if self._graphs is not None:
                        self._graphs.forget()
                    inputs.copies = found.writes_inputs
                    self._pass_state.set_places(found.places)
                if not profile.modes:
                    rewind()
                    self._check_repeats(calls, _losses(self._runner.run(calls)) if has_changed else losses, rewind)
                if check is not None:
                    check(rewind)
        finally:
            rewind()
            if self._graphs is not None:
                self._graphs.forget()  # else the next run would record blocks that replace their buffers in it
        return found

    def _with_strays_found(self, calls: Calls, rewind: Callable[[], None], state: SavedState) -> Losses:
        """Runs the passes until all units are pass-long that have to be. Returns the losses of the last run."""
        while True:
            losses, strays, overlapping = self._detected(calls, state)
            if not strays and not overlapping:
                return losses
            rewind()  # before new hooks are registered: restoring state would remove them
            self._before_pass_long(strays)
            found = list({id(unit): unit for unit in (*strays, *overlapping)}.values())
            if self._graphs is not None:
                self._graphs.exclude(found)
            self._working_copies.make_pass_long(found)
            state.renew(self._module)

    def _detected(self, calls: Calls, state: SavedState) -> tuple[Losses, list[Unit], list[Unit]]:
        """Runs the passes. Returns their losses, the units whose weights were used outside of their modules, and those
        whose copies overlap. There are no losses if such a use has led to an error. Raises if blocks stream and a
        weight of one was used outside of it."""
        units = self._store.blocks.placement.units
        detector = StrayWeightDetector.of_units(units)
        losses: Losses = []
        cause, restart = None, self._lockstep.before_rerun

        def before_rerun() -> None:
            state.restore()
            restart()

        self._lockstep.before_rerun = before_rerun
        try:
            with self._working_copies.probing() as overlapping, detector:
                losses = _losses(self._runner.run(calls))
        except Exception as error:
            if not detector.strays:
                raise
            cause = error
        finally:
            self._lockstep.before_rerun = restart
        strays = [unit for unit in units if id(unit) in detector.strays]
        for unit in strays:
            if unit.is_block and self._working_copies.streams:  # a block that is not called is never uploaded
                raise used_outside(detector.strays[id(unit)]) from cause
        return losses, strays, list(overlapping.values())

    def _check_repeats(self, calls: Calls, losses: Losses, rewind: Callable[[], None]) -> None:
        """Repeats the passes that had these losses one after the other, from the same state. See
        [Note: two runs of a pass]."""
        if self._store.must_choose_interval:

            def again() -> None:
                rewind()
                self._runner.run(calls)

            with torch.compiler.set_stance("default"):
                self._store.time_forwards(again)
        rewind()
        first = _losses(self._runner.one_by_one(calls, last_first=True))
        if agree(losses, first):
            return
        rewind()
        second = _losses(self._runner.one_by_one(calls))
        if self._runner.interleave and self._store.blocks.placement.blocks and agree(first, second):
            self._runner.interleave = False
            self._store.forget_times()
            logger.warning(
                "ds_zo: passes in lockstep give other losses than passes one after the other, so the model keeps state "
                "between blocks that is neither a buffer nor an attribute of its modules; from now on it runs one pass "
                "after the other, and each pass uploads every block"
            )
            return
        for run in (first, second):
            check_repeats(losses, run, self._dtypes())

    def _dtypes(self) -> set[torch.dtype]:
        """The floating-point formats that the model computes in, as far as is known outside its forward."""
        kind = self._store.blocks.device.type
        autocast = {torch.get_autocast_dtype(kind)} if torch.is_autocast_enabled(kind) else set()
        return autocast | {p.dtype for p in self._module.parameters()}


def _losses(results: Sequence[tuple[Any, Sequence[torch.Tensor]]]) -> Losses:
    """The losses alone: outputs that are kept would count as a step's activations."""
    return [losses for _, losses in results]
