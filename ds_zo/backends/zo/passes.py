"""Runs the passes of a training forward: in lockstep where the forward allows it, the first one with checks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from deepspeed.utils import logger
from torch import nn

from ds_zo.backends.common.stray_weights import StrayWeightDetector, used_outside
from ds_zo.backends.zo.activations import Activations
from ds_zo.backends.zo.block_store import ZOBlockStore
from ds_zo.backends.zo.cuda_graphs import BlockGraphs
from ds_zo.backends.zo.lockstep import CannotInterleave, Lockstep
from ds_zo.backends.zo.outputs import floats_of, losses_of
from ds_zo.backends.zo.pass_inputs import PassInputs
from ds_zo.backends.zo.pass_state import PassState, Places, SavedState
from ds_zo.backends.zo.repeats import agree, check_repeats
from ds_zo.backends.zo.working_copies import WorkingCopies
from ds_zo.streaming.units import Unit

_MAX_WATCHED_FORWARDS = 20
"""Training forwards that run under the stray-weight detector while some weights have been used by none: a later forward
may use them. Detection takes a few microseconds per torch function, so a model with unused weights is not watched for
ever."""


class TrainingPasses:
    """The passes of a model's training forwards, two for each direction that this rank evaluates."""

    def __init__(
        self,
        module: nn.Module,
        block_store: ZOBlockStore,
        lockstep: Lockstep,
        activations: Activations,
        *,
        num_passes: int,
        graphs: BlockGraphs | None,
        before_pass_long: Callable[[Sequence[Unit]], None],
    ) -> None:
        """`before_pass_long` is called with units that were used outside of their modules, before each pass gets its
        own copies of them."""
        self._module = module
        self._modules = list(module.modules())
        self._block_store = block_store
        self._lockstep = lockstep
        self._activations = activations
        self._num_passes = num_passes
        self._graphs = graphs
        self._before_pass_long = before_pass_long
        self._working_copies = WorkingCopies(
            module, block_store, lockstep, num_passes=num_passes, device=block_store.device
        )
        self._pass_state = PassState(num_passes)
        lockstep.on_switch = self._switch
        lockstep.before_rerun = self._pass_state.restart
        self.recover = self._working_copies.recover
        self.close = self._working_copies.close
        self.copies_inputs = False
        """Whether the first forward wrote to its inputs, so that each pass needs copies of them."""
        self.interleave = True
        """Whether passes run in lockstep."""
        self._checked = False
        """Whether the first training forward has run. That forward runs both in lockstep and one pass after the other,
        and it detects weights that are used where they are not materialised."""
        self._known_flags: set[tuple[bool, ...]] = set()
        """`training` flags of the model's modules for which the state of the passes is known."""
        self._num_watched = 0

    @property
    def num_uploads(self) -> int:
        """How often a step uploads each block."""
        return 1 if self.interleave else self._num_passes

    def run(self, inputs: PassInputs, *, generators: Sequence[Any]) -> list[Any]:
        """Runs the passes of one forward. Returns, for each pass, its output (None but for the last) and the tensors to
        difference. `generators`: the random generators of the model."""
        self._lockstep.track_generators([*generators, *inputs.generators()])
        calls = [partial(self._one_pass, i, inputs) for i in range(self._num_passes)]
        flags = tuple(m.training for m in self._modules)
        if self._checked and flags not in self._known_flags:
            self._find_state(calls)
        self._known_flags.add(flags)
        with self._activations.watched(inputs.without_grad):
            if not self._checked:
                results = self._first_forward(calls, inputs)
                self._checked = True
                self._working_copies.remove_first_forward_hook()
                self._working_copies.guard_unused()
                return results
            if self._working_copies.has_unused and self._num_watched < _MAX_WATCHED_FORWARDS:
                return self._watched(calls, self._rewind)
            return self._rerun_if_overlapping(calls, self._run(calls), self._rewind)

    def _one_pass(self, index: int, inputs: PassInputs) -> tuple[Any, list[torch.Tensor]]:
        """Runs pass `index`, and returns its output and the tensors to difference. The output is None except for the
        last pass: the logits of the others would stay in memory."""
        args, kwargs = inputs.fresh()
        with torch.no_grad():
            output = self._module(*args, **kwargs)
        # Cloned, because callers multiply losses in place.
        kept = [t.detach().clone() for t in losses_of(output) or floats_of(output)]
        return (output if index == self._num_passes - 1 else None), kept

    def _switch(self, index: int) -> None:
        """Binds the weights and the module state of pass `index`, which starts or resumes."""
        self._working_copies.bind_pass_long(index)
        self._pass_state.switch(index)

    def _run(self, calls: Sequence[Callable[[], Any]]) -> list[Any]:
        """Runs all passes, in lockstep where the forward allows it."""
        if self.interleave:
            try:
                with self._working_copies.training_pass(), self._pass_state.in_passes(), torch.no_grad():
                    return self._lockstep.together(calls, self._working_copies.ready)
            except CannotInterleave as reason:
                self.interleave = False
                logger.warning(
                    "ds_zo: from now on this forward runs one pass after the other, and each pass uploads every block, "
                    f"because {reason}"
                )
        return self._one_by_one(calls)

    def _one_by_one(self, calls: Sequence[Callable[[], Any]], *, last_first: bool = False) -> list[Any]:
        """Runs the passes one after the other, each from the same module state and random state."""
        start = SavedState.of(self._module, tensors=False)

        def run_alone(index: int, call: Callable[[], Any]) -> Any:
            start.restore()
            self._pass_state.enter(index)
            with self._working_copies.training_pass():
                return call()

        with self._pass_state.in_passes():
            alone = [partial(run_alone, i, call) for i, call in enumerate(calls)]
            return self._lockstep.one_by_one(alone, last_first=last_first)

    def _find_state(self, calls: Sequence[Callable[[], Any]]) -> None:
        """Runs the passes once, without effects on the module and on the random states, to find the state that they
        change and that earlier forwards did not. Norms that were frozen before write to their statistics, for
        example."""
        state = SavedState.of(self._module)
        try:
            self._run(calls)
            changed = state.keep_changed()
        finally:
            state.restore()
        self._lockstep.rewind()
        if self._pass_state.add_places(changed) and self._graphs is not None:
            self._graphs.forget()

    def _first_forward(self, calls: Sequence[Callable[[], Any]], inputs: PassInputs) -> list[Any]:
        """Runs the first training forward with checks that later ones do not repeat.

        The checks look for four things. State that the model keeps on its modules would mix between passes in
        lockstep. A weight used outside its module's forward would miss its perturbation. A write to a buffer, or to the
        inputs, would reach the next pass. Passes may differ by more than the weights ([Note: two runs of a pass]). The
        checks run several forwards. Only one of these leaves its effects on the module and on the random states.
        """
        randomness, state = self._lockstep.snapshot(), SavedState.of(self._module)
        self._pass_state.set_places(Places())
        inputs.watch()

        def rewind() -> None:
            self._lockstep.set_snapshot(randomness)
            state.restore()

        self._lockstep.before_rerun = state.restore
        try:
            results = self._watched(calls, rewind, partial(state.renew, self._module))
            changed = state.keep_changed()
            inputs.copies = self.copies_inputs = inputs.were_written()
            if changed or inputs.copies:
                rewind()
                if self._graphs is not None:
                    self._graphs.forget()  # else the second run would record blocks that replace their buffers in it
                self._pass_state.set_places(changed)
                self._lockstep.before_rerun = self._pass_state.restart
                results = self._run(calls)
            # The repetition's output is returned. Two outputs at a time would count as a step's activations.
            results = [(None, losses) for _, losses in results]
            if self._block_store.must_choose_interval:

                def again() -> None:
                    rewind()
                    self._run(calls)

                with self._activations.unwatched():
                    self._block_store.time_forwards(again)
            return self._repeated(calls, results, rewind)
        except BaseException:
            state.restore()
            raise
        finally:
            self._pass_state.forget_hooks()
            self._lockstep.before_rerun = self._pass_state.restart

    def _repeated(
        self, calls: Sequence[Callable[[], Any]], results: list[Any], rewind: Callable[[], None]
    ) -> list[Any]:
        """Repeats the first passes one after the other, from the same state. Returns `results` with the output of the
        repetition, whose state the module keeps. See [Note: two runs of a pass]."""
        rewind()
        runs = [self._one_by_one(calls, last_first=True)]
        if not agree(results, runs[0]):
            if self.interleave and self._block_store.placement.blocks:
                rewind()
                runs.append(self._one_by_one(calls))
                if agree(*runs):
                    self.interleave = False
                    self._block_store.forget_times()
                    logger.warning(
                        "ds_zo: passes in lockstep give other losses than passes one after the other, so the model "
                        "keeps state between blocks that is neither a buffer nor an attribute of its modules; from now "
                        "on it runs one pass after the other, and each pass uploads every block"
                    )
                    return runs[-1]
            for run in runs:
                check_repeats(results, run, self._dtypes())
        return [(output, losses) for (output, _), (_, losses) in zip(runs[-1], results, strict=True)]

    def _dtypes(self) -> set[torch.dtype]:
        """The floating-point formats that the model computes in, as far as is known outside its forward."""
        kind = self._block_store.device.type
        autocast = {torch.get_autocast_dtype(kind)} if torch.is_autocast_enabled(kind) else set()
        return autocast | {p.dtype for p in self._module.parameters()}

    def _watched(
        self, calls: Sequence[Callable[[], Any]], rewind: Callable[[], None], renew: Callable[[], None] | None = None
    ) -> list[Any]:
        """Runs the passes under the stray-weight detector, and again if units must become pass-long. `renew` saves the
        module's state again after new hooks are registered."""
        units = {id(unit): unit for unit in self._block_store.placement.units}
        detector = StrayWeightDetector.of_units(units.values())
        results: list[Any] | None = None
        try:
            with detector, torch.compiler.set_stance("force_eager"):  # the detector does not see compiled code
                results = self._run(calls)
        except Exception as error:
            self._refuse_streamed(detector, error)
            if not detector.strays:
                raise
        self._refuse_streamed(detector, None)
        self._num_watched += 1
        strays = [units[key] for key in detector.strays]
        self._working_copies.request_pass_long(strays)
        return self._rerun_if_overlapping(calls, results, rewind, strays=strays, renew=renew)

    def _rewind(self) -> None:
        """Restores the random and module state that the last passes started from."""
        self._lockstep.rewind()
        self._pass_state.restart()

    def _rerun_if_overlapping(
        self,
        calls: Sequence[Callable[[], Any]],
        results: list[Any] | None,
        rewind: Callable[[], None],
        *,
        strays: Sequence[Unit] = (),
        renew: Callable[[], None] | None = None,
    ) -> list[Any]:
        """Returns `results`, unless units must become pass-long: then changes them, and runs the passes again until
        none is left. One run may hide overlaps that the next run shows. `strays` are units that were used outside of
        their modules. `renew` saves the module's state again, with the hooks that this method registers."""
        while found := self._working_copies.take_overlapping():
            rewind()  # before new hooks are registered: restoring state would remove them
            self._before_pass_long(strays)
            if self._graphs is not None:
                self._graphs.exclude(found)
            self._working_copies.make_pass_long(found)
            if renew is not None:
                renew()
            results = self._run(calls)
        assert results is not None
        return results

    def _refuse_streamed(self, detector: StrayWeightDetector, error: Exception | None) -> None:
        """Raises if a weight of a block was used without a call of the whole block, while blocks stream: such a block
        is never uploaded."""
        in_blocks = {id(unit) for unit in self._block_store.placement.blocks}
        for key, name in detector.strays.items():
            if self._working_copies.streams and key in in_blocks:
                raise used_outside(name) from error
