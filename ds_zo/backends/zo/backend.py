"""ZO: zeroth-order training with two forward passes per direction and no backward pass. An update is a coefficient
times noise that any rank can generate again.

A training forward runs `2 * num_directions` passes in lockstep ([Note: passes in lockstep]). Each unit is materialised
when the passes reach it: its updates are replayed ([Note: replay instead of write-back]) and its copies perturbed
([Note: clean weights stay clean]). The unit folds when its fold is due. `backward` adds to the projected gradient
([Note: the chain rule does the bookkeeping]). `step` logs the update, which is applied to each unit when that unit is
next materialised. Everything else that runs the module (evaluation, `generate`, saving) reads the weights of the
current step.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.utils import logger
from torch import nn

from ds_zo import ops
from ds_zo.backends.common.backend import Backend, StepOutcome
from ds_zo.backends.common.caches import Caches
from ds_zo.backends.common.chunked_loss import losses_in_chunks, models_with_causal_loss
from ds_zo.backends.common.deferred_scalar import DeferredScalar
from ds_zo.backends.common.pretrained import PretrainedSaving
from ds_zo.backends.common.random_state import generators_of
from ds_zo.backends.common.startup import StartupSummary
from ds_zo.backends.common.stray_weights import StrayWeightDetector, used_outside
from ds_zo.backends.zo.block_store import ZOBlockStore
from ds_zo.backends.zo.checkpoint import ZOCheckpoint
from ds_zo.backends.zo.cuda_graphs import BlockGraphs
from ds_zo.backends.zo.lockstep import CannotInterleave, Lockstep
from ds_zo.backends.zo.loss_terms import TrainedParameters
from ds_zo.backends.zo.outputs import floats_of, loss_of, losses_of, tie, with_floats, with_losses
from ds_zo.backends.zo.pass_inputs import PassInputs
from ds_zo.backends.zo.pass_state import PassState, Places, SavedState
from ds_zo.backends.zo.ranks import Ranks
from ds_zo.backends.zo.state import ReplayedState
from ds_zo.backends.zo.structure import Structure
from ds_zo.backends.zo.working_copies import WorkingCopies
from ds_zo.checkpoint.export import Spec, Stream
from ds_zo.checkpoint.reader import Saved
from ds_zo.checkpoint.snapshot import Snapshot, persistent_buffers
from ds_zo.checkpoint.stock import Weights, check_weights
from ds_zo.config import Resolved
from ds_zo.logs import show
from ds_zo.streaming.intercepted import without_interception
from ds_zo.streaming.loading import has_source, put_back
from ds_zo.streaming.shared_store import SharedStore
from ds_zo.streaming.units import Unit

_MAX_WATCHED_FORWARDS = 20
"""Training forwards that run under the stray-weight detector while some weights have been used by none: a later forward
may use them. Detection takes a few microseconds per torch function, so a model with unused weights is not watched for
ever."""


class ZOBackend(Backend):
    """Zeroth-order training; see the module's docstring."""

    def __init__(
        self,
        module: nn.Module,
        config: Resolved,
        *,
        optimizer: torch.optim.Optimizer,
        device: torch.device,
        process_group: Any = None,
    ) -> None:
        super().__init__(module, config, optimizer=optimizer, device=device, process_group=process_group)
        self.settings = config.optimizer
        self.ranks = Ranks(
            process_group,
            num_directions=self.settings.num_directions,
            direction_parallel=self.settings.direction_parallel,
            device=device,
            at=config.params_at,
        )
        self._num_passes = 2 * self.ranks.num_own_directions
        self.block_store = ZOBlockStore(module, config, param_groups=self.param_groups, device=device, ranks=self.ranks)
        self._lockstep = Lockstep(device)
        self._working_copies = WorkingCopies(
            module, self.block_store, self._lockstep, num_passes=self._num_passes, device=device
        )
        self._pass_state = PassState(self._num_passes)
        self._lockstep.on_switch = self._switch
        self._lockstep.before_rerun = self._pass_state.restart
        self._copies_inputs = False
        """Whether the first forward wrote to its inputs, so that each pass needs copies of them."""
        self._generators: list[Any] = []
        self.state = ReplayedState(self.block_store, module)
        graphs = config.section.cuda_graphs and device.type == "cuda"
        self._graphs = BlockGraphs(self.block_store, self._lockstep, device=device) if graphs else None
        self._pretrained = PretrainedSaving(module, self.state.read)
        self._checkpoint = ZOCheckpoint(self.block_store, module, aliases=self.aliases())
        writes = not dist.is_initialized() or dist.get_rank() == 0
        self.recorder = self._checkpoint.recorder() if config.section.checkpoint.trajectory and writes else None
        self.state.on_write = self._break_trajectory
        self._closed = False
        self._never_in_train_mode = not module.training
        """Whether no forward has run in train mode yet. `from_pretrained` returns models in eval mode, and DeepSpeed
        trains them also if the script never calls `train()`."""
        self._interleave = True
        self._checked = False
        """Whether the first training forward has run. That forward runs both in lockstep and one pass after the other,
        and it detects weights that are used where they are not materialised."""
        self._num_watched = 0
        self._structure: Structure | None = None
        """The module tree and the groups when `_check_model` last looked; None before the first check."""
        self._signature = self._groups_and_flags()
        self._regrouped = False
        """Groups or `requires_grad` flags changed after the last step, so `step` checks them again. The flags at `step`
        count, not the flags that the last forward saw: a reference pass under PEFT's `disable_adapter` freezes adapters
        while it lasts."""
        self._placed_shapes = {
            id(p.parameter): p.parameter.shape for unit in self.block_store.placement.units for p in unit.placed
        }
        self._trained_parameters = TrainedParameters(
            p for unit in self.block_store.placement.units for p in unit.placed
        )
        self._anchor = torch.zeros((), device=device, requires_grad=True)
        self._projected = torch.zeros(self.settings.num_directions, device=device)
        self._tied_outputs_logged = self._stale_weights_logged = self._narrow_loss_logged = False
        self._models_with_causal_loss = models_with_causal_loss(module)
        self._caches = Caches(module)

    @classmethod
    def places_parameters(cls, config: Resolved) -> bool:
        return True

    # The training forward

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Runs a training forward if gradients are enabled in train mode, else the plain module."""
        with self.state.unwatched():
            try:
                return self._forward(*args, **kwargs)
            except KeyboardInterrupt:
                self._working_copies.recover()
                raise

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the passes and returns the last pass's output, its losses replaced by differentiable means over the
        passes."""
        self._never_in_train_mode &= not self.module.training
        if self.module.training or self._never_in_train_mode:
            self._working_copies.recover()
        if not (torch.is_grad_enabled() and (self.module.training or self._never_in_train_mode)):
            return self.module(*args, **kwargs)
        self._check_model()
        args, kwargs = self.ranks.shared_batch(args, kwargs)
        self.block_store.materialiser.begin_forward()
        inputs = PassInputs(args, kwargs, copies=self._copies_inputs)
        self._lockstep.track_generators([*self._generators, *inputs.generators()])
        calls = [partial(self._one_pass, i, inputs) for i in range(self._num_passes)]
        with self._step_settings():
            if not self._checked:
                results = self._first_forward(calls, inputs)
                self._checked = True
                self._working_copies.remove_first_forward_hook()
                self._working_copies.guard_unused()
            elif self._working_copies.has_unused and self._num_watched < _MAX_WATCHED_FORWARDS:
                results = self._watched(calls, self._rewind)
            else:
                results = self._rerun_if_overlapping(calls, self._run(calls), self._rewind)
        output, passes = results[-1][0], [tensors for _, tensors in results]
        tied = tie(
            passes,
            anchor=self._anchor,
            accumulate=partial(self._accumulate, self.block_store.log.length),
            inputs=[x for x in inputs.requiring_grad() if x not in self._trained_parameters],
        )
        if loss_of(output) is not None:
            self._warn_of_narrow_loss(passes[0][0].dtype)
            return with_losses(output, tied)
        if not self._tied_outputs_logged:
            self._tied_outputs_logged = True
            show(
                f"ds_zo: the model returns no loss, so ZO differentiates its {len(tied)} floating-point outputs. This "
                "is exact for a loss that is linear in them, and first order in zo_eps otherwise. Pass labels to the "
                "model to have its own loss measured."
            )
        return with_floats(output, tied)

    def _warn_of_narrow_loss(self, dtype: torch.dtype) -> None:
        """Warns once if the loss has fewer than 32 bits."""
        if dtype.itemsize < 4 and not self._narrow_loss_logged:
            self._narrow_loss_logged = True
            logger.warning(
                f"ds_zo: ZO learns from the difference of two losses, and in {dtype} most such losses are equal, so no "
                "step would be made: compute the loss in float32 in the model's forward"
            )

    def _one_pass(self, index: int, inputs: PassInputs) -> tuple[Any, list[torch.Tensor]]:
        """Runs pass `index`, and returns its output and the tensors to difference. The output is None except for the
        last pass: the logits of the others would stay in memory."""
        args, kwargs = inputs.fresh()
        with torch.no_grad():
            output = self.module(*args, **kwargs)
        # Cloned, because callers multiply losses in place.
        kept = [t.detach().clone() for t in losses_of(output) or floats_of(output)]
        return (output if index == self._num_passes - 1 else None), kept

    def _switch(self, index: int) -> None:
        """Binds the weights and the module state of pass `index`, which starts or resumes."""
        self._working_copies.bind_pass_long(index)
        self._pass_state.switch(index)

    def _run(self, calls: Sequence[Callable[[], Any]]) -> list[Any]:
        """Runs all passes, in lockstep where the forward allows it."""
        if self._interleave:
            try:
                with self._working_copies.training_pass(), self._pass_state.in_passes(), torch.no_grad():
                    return self._lockstep.together(calls, self._working_copies.ready)
            except CannotInterleave as reason:
                self._interleave = False
                logger.warning(
                    "ds_zo: from now on this forward runs one pass after the other, and each pass uploads every block, "
                    f"because {reason}"
                )
        return self._one_by_one(calls)

    def _one_by_one(self, calls: Sequence[Callable[[], Any]]) -> list[Any]:
        """Runs the passes one after the other, each from the same module state and random state."""
        start = SavedState.of(self.module, tensors=False)

        def run_alone(index: int, call: Callable[[], Any]) -> Any:
            start.restore()
            self._pass_state.enter(index)
            with self._working_copies.training_pass():
                return call()

        with self._pass_state.in_passes():
            return self._lockstep.one_by_one([partial(run_alone, i, call) for i, call in enumerate(calls)])

    def _first_forward(self, calls: Sequence[Callable[[], Any]], inputs: PassInputs) -> list[Any]:
        """Runs the first training forward with checks that later ones do not repeat.

        The checks look for three things. State that the model keeps on its modules would mix between passes in
        lockstep. A weight used outside its module's forward would miss its perturbation. A write to a buffer, or to the
        inputs, would reach the next pass. The checks run several forwards. Only one of these leaves its effects on the
        module and on the random states.
        """
        randomness, state = self._lockstep.snapshot(), SavedState.of(self.module)
        self._pass_state.set_places(Places())
        inputs.watch()

        def rewind() -> None:
            self._lockstep.set_snapshot(randomness)
            state.restore()

        self._lockstep.before_rerun = state.restore
        try:
            results = self._watched(calls, rewind, partial(state.renew, self.module))
            changed = state.keep_changed()
            inputs.copies = self._copies_inputs = inputs.were_written()
            if changed or inputs.copies:
                rewind()
                if self._graphs is not None:
                    self._graphs.forget()  # else the second run would record blocks that replace their buffers in it
                self._pass_state.set_places(changed)
                self._lockstep.before_rerun = self._pass_state.restart
                results = self._run(calls)
            after = SavedState(changed)
            if self._interleave and self.block_store.placement.blocks:
                rewind()
                one_by_one = self._one_by_one(calls)
                if not _agree(results, one_by_one):
                    self._interleave = False
                    logger.warning(
                        "ds_zo: passes in lockstep give other losses than passes one after the other, so the model "
                        "keeps state between blocks that is neither a buffer nor an attribute of its modules; from now "
                        "on it runs one pass after the other, and each pass uploads every block"
                    )
                    return one_by_one
                del one_by_one  # frees its outputs before further forwards
            if self.block_store.must_choose_interval:

                def again() -> None:
                    rewind()
                    self._run(calls)

                self.block_store.time_forwards(again)
            after.restore()
            return results
        except BaseException:
            state.restore()
            raise
        finally:
            self._pass_state.forget_hooks()
            self._lockstep.before_rerun = self._pass_state.restart

    def _watched(
        self, calls: Sequence[Callable[[], Any]], rewind: Callable[[], None], renew: Callable[[], None] | None = None
    ) -> list[Any]:
        """Runs the passes under the stray-weight detector, and again if units must become pass-long. `renew` saves the
        module's state again after new hooks are registered."""
        units = {id(unit): unit for unit in self.block_store.placement.units}
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
            self._perturb_every_row(strays)
            if self._graphs is not None:
                self._graphs.exclude(found)
            self._working_copies.make_pass_long(found)
            self._signature = self._groups_and_flags()  # the order of units has changed
            if renew is not None:
                renew()
            results = self._run(calls)
        assert results is not None
        return results

    def _perturb_every_row(self, units: Sequence[Unit]) -> None:
        """Perturbs also the padding rows of these units. A weight that is used outside its module, such as a tied
        head's, has a gradient in every row."""
        for unit in units:
            for part in unit.parts:
                for p in (p for p in part.placed if any(p.still)):
                    self.block_store.materialiser.fold_now(unit)
                    p.still = (0, 0)
                    part.forget_tables()
                    if self.block_store.log.length or (
                        self.recorder is not None and self.recorder.follows_a_checkpoint
                    ):
                        self._break_trajectory()

    def _refuse_streamed(self, detector: StrayWeightDetector, error: Exception | None) -> None:
        """Raises if a weight of a block was used without a call of the whole block, while blocks stream: such a block
        is never uploaded."""
        in_blocks = {id(unit) for unit in self.block_store.placement.blocks}
        for key, name in detector.strays.items():
            if self._working_copies.streams and key in in_blocks:
                raise used_outside(name) from error

    @contextmanager
    def _step_settings(self) -> Iterator[None]:
        """Sets the arithmetic that `compute_dtype` asks for, computes losses in chunks, and turns key-value caches
        off."""
        with ExitStack() as stack:
            stack.enter_context(losses_in_chunks(self._models_with_causal_loss))
            stack.enter_context(self._caches.off())
            compute = self.settings.compute_dtype
            if compute == "tf32" and self.device.type == "cuda":
                stack.callback(setattr, torch.backends.cuda.matmul, "allow_tf32", torch.backends.cuda.matmul.allow_tf32)
                torch.backends.cuda.matmul.allow_tf32 = True
            if compute in ("bf16", "fp16") and self.config.dtype is torch.float32:
                dtype = torch.bfloat16 if compute == "bf16" else torch.float16
                stack.enter_context(torch.autocast(self.device.type, dtype=dtype, cache_enabled=False))
            yield

    # backward and step

    def _accumulate(self, step: int, differences: torch.Tensor) -> None:
        """Adds this rank's `(l+ - l-) / (2 zo_eps)` to the projected gradients. `step` is the step whose forward made
        the loss."""
        if step != self.block_store.log.length:
            raise RuntimeError(
                f"a loss belongs to the noise of its own step, got one of step {step} in step "
                f"{self.block_store.log.length}: call engine.backward before the engine.step that follows its forward"
            )
        self._projected[self.ranks.own_directions] += differences / (2 * self.settings.zo_eps)

    def backward(self, loss: torch.Tensor, *, retain_graph: bool = False) -> None:
        self._trained_parameters.check(loss)
        super().backward(loss, retain_graph=retain_graph)

    def zero_grad(self) -> None:
        self._projected.zero_()

    def step(self) -> StepOutcome:
        if self._regrouped:
            self._check_model()
            self._regrouped = False
        g = self.ranks.average(self._projected)
        norm = g.norm()
        if self.settings.clip_projected_grad is not None:
            limit = self.settings.clip_projected_grad
            g = torch.where(g.isfinite(), g.clamp(-limit, limit), g)  # a step with an overflow is skipped, not clipped
        self.block_store.materialiser.fold_units_at_capacity()
        finite = self.block_store.log.append(
            g,
            lrs=[float(group["lr"]) for group in self.param_groups],
            weight_decays=[float(group.get("weight_decay", 0.0)) for group in self.param_groups],
        )
        if self.recorder is not None:
            self.recorder.append(self.block_store.log.last_row)
        self._projected = torch.zeros_like(g)
        if not self.config.section.stream.fuse_update:
            self._fold_everything()  # an ablation: the update in a sweep over all units, apart from the forward
        self.block_store.fill_device()
        if self.block_store.must_choose_interval:
            num_uploads = 1 if self._interleave else self._num_passes
            self.block_store.choose_interval(num_uploads=num_uploads, agree=self.ranks.broadcast_from_first)
        return StepOutcome(applied=DeferredScalar(finite), grad_norm=DeferredScalar(norm))

    def _fold_everything(self) -> None:
        self.block_store.materialiser.fold_now(*self.block_store.placement.units)

    # Changes that the user makes to the model or the optimizer

    def _groups_and_flags(self) -> list[tuple[int, bool]]:
        """For each placed parameter: its optimizer group, and whether it is trained."""
        group_of = {id(p): index for index, group in enumerate(self.param_groups) for p in group["params"]}
        return [
            (group_of.get(id(p.parameter), 0), p.parameter.requires_grad and id(p.parameter) in group_of)
            for unit in self.block_store.placement.units
            for p in unit.placed
        ]

    def _check_model(self) -> None:
        """Applies changed groups and `requires_grad` flags. Raises if parameters were added, resized or replaced after
        `deepspeed.initialize`."""
        if self._structure is not None and self._structure.is_unchanged(self.param_groups):
            return
        self._structure = None
        self._check_parameters()
        self._generators = generators_of(self.module)
        if self._graphs is not None:
            self._graphs.forget()
        self._structure = Structure(self.module, self.param_groups)

    def _check_parameters(self) -> None:
        for name, parameter in self.module.named_parameters():
            if self._placed_shapes.get(id(parameter)) != parameter.shape:
                raise ValueError(
                    f"parameter {name} is not the one that deepspeed.initialize placed, and the placement is fixed: "
                    "add, resize or replace parameters before deepspeed.initialize, and load weights without "
                    "assign=True"
                )
        if len(self.param_groups) != self.block_store.log.num_groups:
            raise ValueError(
                f"the optimizer had {self.block_store.log.num_groups} parameter groups when deepspeed.initialize ran "
                f"and has {len(self.param_groups)} now: add groups before initialize"
            )
        signature = self._groups_and_flags()
        if signature == self._signature:
            return
        placed = [(part, p) for unit in self.block_store.placement.units for part in unit.parts for p in part.placed]
        for (part, p), (_, trainable) in zip(placed, signature, strict=True):
            if trainable and part.frozen:
                raise ValueError(
                    f"parameter {p.name} was frozen when deepspeed.initialize ran, and its storage cannot be trained: "
                    "unfreeze it before initialize, and give it to an optimizer group"
                )
        self._fold_everything()
        for (part, p), (group, trainable) in zip(placed, signature, strict=True):
            p.group, p.trainable = group, trainable
            part.forget_tables()
        for unit in self.block_store.placement.units:
            unit.folded(self.block_store.log.length)  # also a unit that was frozen: no earlier update applies to it
        self._signature, self._regrouped = signature, True
        if self.block_store.log.length:
            self._break_trajectory()

    def _break_trajectory(self) -> None:
        """Ends the recorded trajectory: the weights, or the set of trained parameters, changed by something other than
        a step."""
        if self.recorder is not None:
            self.recorder.end_log(self.block_store.log.length)

    # Saving, loading, describing

    def snapshot(self, *, hold: bool, omit_frozen: bool = False) -> Snapshot:
        self.block_store.must_choose_interval = False  # the checkpoint holds the interval
        # A trajectory starts from a checkpoint with all weights.
        return self._checkpoint.snapshot(hold=hold, omit_frozen=omit_frozen, omit_base=self.recorder is None)

    def restore(self, saved: Saved, *, resume: bool, strict: bool = True) -> None:
        self._checkpoint.restore(saved, resume=resume, strict=strict)
        self.state.forget()
        if not resume:
            self._break_trajectory()

    @torch.no_grad()
    def replay_steps(self, rows: torch.Tensor) -> None:
        """Applies logged updates. Folds each unit where the original step's forward did, so that the weights have the
        same bits."""
        for row in rows:
            for unit in self.block_store.placement.units:
                if self.block_store.materialiser.pending(unit) and self.block_store.materialiser.folds(
                    unit, step=self.block_store.log.length
                ):
                    self.block_store.materialiser.fold_now(unit)
            self.block_store.log.append_row(row)
            if not self.config.section.stream.fuse_update:
                self._fold_everything()
        self._projected.zero_()
        self.state.forget()

    def weights(self, *, omitted: Collection[str] = ()) -> Stream:
        placed = [p for unit in self.block_store.placement.units for p in unit.placed if p.name not in omitted]
        buffers = dict(persistent_buffers(self.module))
        specs = [Spec(p.name, p.parameter.dtype, tuple(p.parameter.shape)) for p in placed]
        specs += [Spec(name, value.dtype, tuple(value.shape)) for name, value in buffers.items()]

        def read() -> Iterator[tuple[str, torch.Tensor]]:
            yield from ((p.name, self.state.read(p.parameter).cpu()) for p in placed)
            yield from ((name, value.detach().cpu()) for name, value in buffers.items())

        return specs, read()

    @torch.no_grad()
    def load_weights(self, weights: Weights, *, strict: bool = True) -> None:
        aliases = self.aliases()
        with without_interception():
            here = {p.name: p.parameter.data for unit in self.block_store.placement.units for p in unit.placed}
        here |= dict(persistent_buffers(self.module))
        every = {**here, **{alias: here[name] for alias, name in aliases.items()}}
        check_weights(weights, every, aliases, strict=strict)
        names = {name: name for name in here} | {name: alias for alias, name in aliases.items() if name not in weights}
        parameters = dict(self.module.named_parameters())
        for name, value in here.items():
            if names[name] not in weights:
                continue
            if name in parameters:
                self.state.write(parameters[name], weights[names[name]])
            else:
                value.copy_(weights[names[name]])

    def rank_state(self) -> dict[str, Any]:
        # As in `snapshot`, which only the first rank makes: all ranks must keep the same interval.
        self.block_store.must_choose_interval = False
        return {"projected": self._projected.cpu()}

    def check_rank_state(self, state: Mapping[str, Any]) -> None:
        if not isinstance(state["projected"], torch.Tensor):
            raise TypeError(f"projected gradients must be a tensor, got {type(state['projected']).__name__}")

    def load_rank_state(self, state: Mapping[str, Any]) -> None:
        if state["projected"].shape == self._projected.shape:
            self._projected.copy_(state["projected"])

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.block_store.log.length, "seed": self.settings.seed, "noise_version": ops.NOISE_VERSION}

    def describe(self) -> str:
        return (
            f"{self.block_store.describe()}\nds_zo: {self.settings.num_directions} direction(s) a step, zo_eps "
            f"{self.settings.zo_eps:g}, {self.settings.distribution} noise from seed {self.settings.seed}"
            f"{self.ranks.describe()}"
        )

    def startup_summary(self) -> StartupSummary:
        directions = "direction" if self.settings.num_directions == 1 else "directions"
        return replace(
            self.block_store.startup_summary(),
            settings=f"{self.settings.num_directions} {directions} a step, zo_eps {self.settings.zo_eps:g}, "
            f"{self.settings.distribution} noise, seed {self.settings.seed}",
            ranks=self.ranks.startup_text(),
        )

    @torch.no_grad()
    def _return_weights_to_module(self) -> None:
        """Leaves the weights of the current step in the module, which outlives the engine: scripts save it, Trainer
        trains it again. A unit whose stored form differs from its parameters' dtype gets new memory. Frozen parameters
        that were stored in fewer bits are left unread if their source can be read again."""
        for unit in self.block_store.placement.units:
            if self.block_store.shared is not None and unit.streamed:
                self._return_shared_unit(unit, self.block_store.shared)
            elif all(part.viewable for part in unit.parts):
                self.block_store.materialiser.fold_now(unit)
                self.block_store.runtime.host_wait(unit)
            else:
                self._return_narrow_unit(unit)

    def _return_narrow_unit(self, unit: Unit) -> None:
        """Leaves a unit in the module whose stored form differs from its parameters' dtype."""
        unread = {
            id(placed.parameter)
            for part in unit.parts
            for placed in part.placed
            if part.frozen and not part.direct and has_source(self.module, placed.parameter)
        }
        unit.bind([p.parameter if id(p.parameter) in unread else self.state.read(p.parameter) for p in unit.placed])
        for placed in unit.placed:
            if id(placed.parameter) in unread:
                put_back(self.module, placed.parameter)

    def _return_shared_unit(self, unit: Unit, store: SharedStore) -> None:
        """Leaves a unit of a host store that ranks share in the module. Ranks close at different times, so nothing in
        the shared memory is changed. If updates are pending, every rank needs a private copy. If the machine has no
        memory for these copies, the module keeps the stored weights, which lack the pending updates."""
        pending = self.block_store.materialiser.pending(unit)
        if not all(part.viewable for part in unit.parts):
            self._return_narrow_unit(unit)
        elif not pending or store.has_room_for(unit.nbytes * store.partition.size):
            self.block_store.runtime.host_wait(unit)
            values = [self.state.read(placed.parameter) for placed in unit.placed] if pending else None
            unit.assign_buffers(store.private(unit.store_buffer), None, streamed=False, low_streamed=False)
            unit.bind_stored()
            for placed, value in zip(unit.placed, values or (), strict=False):
                placed.parameter.data.copy_(value)
        elif not self._stale_weights_logged:
            self._stale_weights_logged = True
            logger.warning(
                "ds_zo: the engine is destroyed, and this machine has no memory for one whole model per rank, so the "
                "module keeps weights that lack the last updates: save, or read state_dict(), before engine.destroy()"
            )

    def close(self) -> None:
        try:
            if self.recorder is not None:
                self.recorder.close()
        finally:
            # Not while the interpreter exits: nothing refers to the module then, and PyTorch aborts on tensors made in
            # a finalizer. If it fails, for lack of memory for example, the stored weights stay, and the caller may try
            # again.
            if not self._closed and not sys.is_finalizing() and self.state.owns_module():
                self.state.stop_intercepting()
                self.state.release_all(rebind=True)
                self._return_weights_to_module()
            self._closed = True
            self._working_copies.close()
            self._trained_parameters.close()
            if self._graphs is not None:
                self._graphs.close()
            self._pretrained.close()
            self.state.close()
            self.block_store.close()


def _agree(together: Sequence[Any], one_by_one: Sequence[Any]) -> bool:
    """Whether both runs gave the same losses, up to rounding."""
    for (_, ours), (_, theirs) in zip(together, one_by_one, strict=True):
        for a, b in zip(ours, theirs, strict=True):
            exact = 1e-7 if a.device.type == "cpu" else 1e-6  # CUDA's atomic adds have no fixed order
            tolerance = exact if a.dtype is torch.float32 else 1e-2
            if a.shape != b.shape or not torch.allclose(
                a.float(), b.float(), rtol=tolerance, atol=tolerance, equal_nan=True
            ):
                return False
    return True
