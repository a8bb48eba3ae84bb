"""Makes the passes of a training forward. The first forward of each mode is probed ([Note: probed forwards])."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from ds_zo.backends.zo.activations import Activations
from ds_zo.backends.zo.cuda_graphs import BlockGraphs
from ds_zo.backends.zo.lockstep import Lockstep
from ds_zo.backends.zo.member_passes import MemberPasses
from ds_zo.backends.zo.outputs import floats_of, losses_of
from ds_zo.backends.zo.pass_inputs import PassInputs
from ds_zo.backends.zo.pass_runner import PassRunner
from ds_zo.backends.zo.pass_state import PassState
from ds_zo.backends.zo.probe import ForwardProfile, Probe
from ds_zo.backends.zo.scoring import Scoring
from ds_zo.backends.zo.store import ZOStore
from ds_zo.backends.zo.working_copies import WorkingCopies
from ds_zo.streaming.units import Unit


class TrainingPasses:
    """The passes of a model's training forwards, two for each direction that this rank evaluates."""

    def __init__(
        self,
        module: nn.Module,
        store: ZOStore,
        lockstep: Lockstep,
        activations: Activations,
        *,
        num_passes: int,
        graphs: BlockGraphs | None,
        before_pass_long: Callable[[Sequence[Unit]], None],
        members: MemberPasses | None = None,
    ) -> None:
        """`before_pass_long`: as in `Probe`. With `members`, one pass evaluates all of them."""
        self._members = members
        self._module = module
        self._modules = list(module.modules())
        self._lockstep = lockstep
        self._activations = activations
        self._num_passes = num_passes
        copies = WorkingCopies(module, store, lockstep, num_passes=num_passes, device=store.blocks.device)
        self.runner = PassRunner(module, lockstep, copies, PassState(num_passes))
        self._probe = Probe(self.runner, store, graphs=graphs, before_pass_long=before_pass_long)
        self.recover, self.close = copies.recover, copies.close
        self.profile = ForwardProfile()

    @property
    def num_uploads(self) -> int:
        """How often a step uploads each block."""
        return 1 if self.runner.interleave else self._num_passes

    def run(
        self,
        inputs: PassInputs,
        *,
        generators: Sequence[Any],
        trained: frozenset[int],
        scoring: Scoring | None = None,
    ) -> list[Any]:
        """Runs the passes of one forward. Returns, for each pass, its output (None but for the last) and the tensors to
        difference. `generators`: the random generators of the model. `trained`: ids of the trained parameters. With
        `scoring`, there are no outputs, and each pass has one tensor to difference: the loss that `scoring` returns.
        The tensor of members has the losses of all, as [member, sign]."""
        if self._members is not None:
            inputs = self._members.begin(inputs)
        self._lockstep.track_generators([*generators, *inputs.generators()])
        needs_loss = scoring is None or scoring.by_loss
        calls = [partial(self._one_pass, i, inputs, needs_loss) for i in range(self._num_passes)]
        mode = trained, tuple(m.training for m in self._modules)
        profile = self.profile
        if is_new := mode not in profile.modes:
            check = None if self._members is None else partial(self._check_members, self._members, inputs)
            profile = self._probe.look(calls, inputs, mode=mode, profile=profile, check=check)
        with self._activations.watched(inputs.without_grad, is_new_mode=is_new):
            results = self.runner.run(calls) if scoring is None else self._scored(inputs, scoring)
        if is_new:
            self.runner.pass_state.forget_hooks()
            self.profile = replace(profile, places=profile.places.without_hooks())
        return results

    def _scored(self, inputs: PassInputs, scoring: Scoring) -> list[Any]:
        """Runs the passes and returns their losses. After an error, the random states are as before."""
        randomness = self._lockstep.snapshot()
        calls = [partial(self._scored_pass, i, inputs, scoring) for i in range(self._num_passes)]
        try:
            return self.runner.run(calls, check=scoring.check)
        except BaseException:
            self._lockstep.set_snapshot(randomness)
            raise

    def _scored_pass(self, index: int, inputs: PassInputs, scoring: Scoring) -> tuple[None, list[torch.Tensor]]:
        output, members = self._output(inputs), self._members
        if members is not None:
            return None, [scoring.member_losses(output, inputs, members.rows, members.losses(output))]
        return None, [scoring.loss(index, output, inputs)]

    def _check_members(self, members: MemberPasses, inputs: PassInputs, rewind: Callable[[], None]) -> None:
        """See `MemberPasses.check`."""

        def run(of_check: PassInputs) -> None:
            self.runner.run([partial(self._plain_output, of_check)])

        members.check(inputs, run, rewind)

    def _one_pass(self, index: int, inputs: PassInputs, needs_loss: bool) -> tuple[Any, list[torch.Tensor]]:
        """Runs pass `index`, and returns its output and the tensors to difference. The output is None except for the
        last pass: the logits of the others would stay in memory. `needs_loss`: no other loss will be asked for."""
        output = self._output(inputs)
        if self._members is not None:
            return output, self._members.measured(output, needs_loss=needs_loss)
        # Cloned, because callers multiply losses in place.
        kept = [t.detach().clone() for t in losses_of(output) or floats_of(output)]
        return (output if index == self._num_passes - 1 else None), kept

    def _output(self, inputs: PassInputs) -> Any:
        with nullcontext() if self._members is None else self._members.adding_noise():
            return self._plain_output(inputs)

    def _plain_output(self, inputs: PassInputs) -> Any:
        args, kwargs = inputs.fresh()
        with torch.no_grad():
            return self._module(*args, **kwargs)
