"""ZO: zeroth-order training. Two forward passes a direction, no backward; the update is a coefficient times noise that
anyone can make again.

A training forward runs `2 * num_directions` passes in lockstep ([Note: twin forward]) over weights that are replayed,
perturbed and, in turn, folded as they come by ([Note: replay instead of write-back], [Note: clean weights stay clean]).
`backward` adds to the projected gradient ([Note: the chain rule does the bookkeeping]); `step` logs the update, and the
next visit of each unit applies it. Anything else that runs the module (evaluation, `generate`, saving) sees the weights
of the current step.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, ClassVar

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
from ds_zo.backends.common.stray_weights import StrayWeightDetector, used_outside
from ds_zo.backends.zo.block_store import ZOBlockStore
from ds_zo.backends.zo.checkpoint import HomesCheckpoint
from ds_zo.backends.zo.cuda_graphs import BlockGraphs
from ds_zo.backends.zo.lockstep import CannotInterleave, Lockstep
from ds_zo.backends.zo.loss_terms import OwnParameters
from ds_zo.backends.zo.outputs import floats_of, loss_of, losses_of, tie, with_floats, with_losses
from ds_zo.backends.zo.pass_inputs import PassInputs
from ds_zo.backends.zo.pass_state import OwnState, Places, SavedState
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
from ds_zo.streaming.shared_store import SharedStore
from ds_zo.streaming.units import Unit
from ds_zo.streaming.watched import told_to_nobody

_MOST_WATCHED = 20
"""Training forwards that are watched while some weights have not been used: a later one may use them. It takes a few
microseconds for each torch function, so a model with weights that nothing uses is not watched for ever."""


class ZOBackend(Backend):
    name: ClassVar[str] = "zo"

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
        self._num_passes = 2 * self.ranks.num_own
        self.block_store = ZOBlockStore(module, config, param_groups=self.param_groups, device=device, ranks=self.ranks)
        self._lockstep = Lockstep(device)
        self._copies = WorkingCopies(
            module, self.block_store, self._lockstep, num_passes=self._num_passes, device=device
        )
        self._own_state = OwnState(self._num_passes)
        self._lockstep.on_switch = self._switch
        self._lockstep.on_again = self._own_state.restart
        self._copies_inputs = False
        """The forward was seen to write to its inputs."""
        self._generators: list[Any] = []
        self.state = ReplayedState(self.block_store, module)
        graphs = config.section.cuda_graphs and device.type == "cuda"
        self._graphs = BlockGraphs(self.block_store, self._lockstep, device=device) if graphs else None
        self._pretrained = PretrainedSaving(module, self.state.read)
        self._checkpoint = HomesCheckpoint(self.block_store, module, aliases=self.aliases())
        writes = not dist.is_initialized() or dist.get_rank() == 0
        self.recorder = self._checkpoint.recorder() if config.section.checkpoint.trajectory and writes else None
        self.state.on_write = self._break_trajectory
        self.state.in_forward = lambda: bool(self._copies.visited)
        self._closed = False
        self._never_in_train_mode = not module.training
        """`from_pretrained` returns models in eval mode, and DeepSpeed trains those of scripts that never call
        `train()`."""
        self._interleave = True
        self._checked = False
        """The first training forward is run both ways, and watched for weights used where they are not brought up."""
        self._num_watched = 0
        self._structure: Structure | None = None
        """As it was when it was last checked."""
        self._signature = self._groups_and_flags()
        self._regrouped = False
        """Groups or flags changed since the last step: what is trained when it is made counts, not what the last
        forward saw (a reference pass under PEFT's `disable_adapter` freezes adapters while it lasts)."""
        self._placed_shapes = {
            id(p.parameter): p.parameter.shape for unit in self.block_store.placement.units for p in unit.placed
        }
        self._parameters = OwnParameters(p for unit in self.block_store.placement.units for p in unit.placed)
        self._anchor = torch.zeros((), device=device, requires_grad=True)
        self._projected = torch.zeros(self.settings.num_directions, device=device)
        self._tied_outputs_logged = self._left_behind_logged = self._narrow_loss_logged = False
        self._models_with_causal_loss = models_with_causal_loss(module)
        self._caches = Caches(module)

    @classmethod
    def places_parameters(cls, config: Resolved) -> bool:
        return True

    # The training forward

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with self.state.unwatched():
            try:
                return self._forward(*args, **kwargs)
            except KeyboardInterrupt:
                self._copies.recover()
                raise

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        self._never_in_train_mode &= not self.module.training
        if self.module.training or self._never_in_train_mode:
            self._copies.recover()
        if not (torch.is_grad_enabled() and (self.module.training or self._never_in_train_mode)):
            return self.module(*args, **kwargs)
        self._check_model()
        args, kwargs = self.ranks.shared_batch(args, kwargs)
        self.block_store.materialiser.begin_forward()
        inputs = PassInputs(args, kwargs, copies=self._copies_inputs)
        self._lockstep.heed([*self._generators, *inputs.generators()])
        calls = [partial(self._one_pass, i, inputs) for i in range(self._num_passes)]
        with self._step_settings():
            if not self._checked:
                results = self._first_forward(calls, inputs)
                self._checked = True
                self._copies.end_probation()
                self._copies.guard_unvisited()
            elif self._copies.has_unvisited and self._num_watched < _MOST_WATCHED:
                results = self._watched(calls, self._rewind)
            else:
                results = self._again_if_crowded(calls, self._run(calls), self._rewind)
        output, passes = results[-1][0], [tensors for _, tensors in results]
        tied = tie(
            passes,
            anchor=self._anchor,
            accumulate=partial(self._accumulate, self.block_store.log.length),
            inputs=[x for x in inputs.requiring_grad() if x not in self._parameters],
        )
        if loss_of(output) is not None:
            self._warn_of_narrow_loss(passes[0][0].dtype)
            return with_losses(output, tied)
        if not self._tied_outputs_logged:
            self._tied_outputs_logged = True
            show(
                f"ds_zo: the model returns no loss, so ZO differentiates its {len(tied)} floating outputs: exact for a "
                "loss that is linear in them, to first order in zo_eps otherwise; pass labels to the model to have "
                "its own loss measured"
            )
        return with_floats(output, tied)

    def _warn_of_narrow_loss(self, dtype: torch.dtype) -> None:
        if dtype.itemsize < 4 and not self._narrow_loss_logged:
            self._narrow_loss_logged = True
            logger.warning(
                f"ds_zo: ZO learns from the difference of two losses, of which {dtype} keeps little: most would be "
                "equal, and no step made; compute the loss in float32 in the model's forward"
            )

    def _one_pass(self, index: int, inputs: PassInputs) -> tuple[Any, list[torch.Tensor]]:
        """One pass's output (the last's only: the others' logits would stay alive) and the tensors to difference."""
        args, kwargs = inputs.fresh()
        with torch.no_grad():
            output = self.module(*args, **kwargs)
        # Cloned: callers multiply losses in place.
        kept = [t.detach().clone() for t in losses_of(output) or floats_of(output)]
        return (output if index == self._num_passes - 1 else None), kept

    def _switch(self, index: int) -> None:
        self._copies.swap_ambient(index)
        self._own_state.switch(index)

    def _run(self, calls: Sequence[Callable[[], Any]]) -> list[Any]:
        """All passes, in lockstep where the forward allows it."""
        if self._interleave:
            try:
                with self._copies.training_pass(), self._own_state.in_passes(), torch.no_grad():
                    return self._lockstep.together(calls, self._copies.ready)
            except CannotInterleave as reason:
                self._interleave = False
                logger.warning(
                    f"ds_zo: this forward runs one pass after the other from now on (each uploads every block): "
                    f"{reason}"
                )
        return self._one_by_one(calls)

    def _one_by_one(self, calls: Sequence[Callable[[], Any]]) -> list[Any]:
        start = SavedState.of(self.module, tensors=False)

        def in_a_pass_of_its_own(index: int, call: Callable[[], Any]) -> Any:
            start.put_back()
            self._own_state.enter(index)
            with self._copies.training_pass():
                return call()

        with self._own_state.in_passes():
            return self._lockstep.one_by_one([partial(in_a_pass_of_its_own, i, call) for i, call in enumerate(calls)])

    def _first_forward(self, calls: Sequence[Callable[[], Any]], inputs: PassInputs) -> list[Any]:
        """State that a model keeps on its modules would mix between passes in lockstep, and a weight used behind its
        module's back would miss its perturbation; what a pass writes to a buffer or to its inputs, the next would meet.
        All are looked for once. Of all forwards that takes, one leaves traces in the module and in random states."""
        randomness, state = self._lockstep.snapshot(), SavedState.of(self.module)
        self._own_state.set_places(Places())
        inputs.watch()

        def rewind() -> None:
            self._lockstep.set_snapshot(randomness)
            state.put_back()

        self._lockstep.on_again = state.put_back
        try:
            results = self._watched(calls, rewind, partial(state.renew, self.module))
            changed = state.keep_changed()
            inputs.copies = self._copies_inputs = inputs.were_written()
            if changed or inputs.copies:
                rewind()
                if self._graphs is not None:
                    self._graphs.forget()  # a second run would be recorded, of blocks that replace buffers in it
                self._own_state.set_places(changed)
                self._lockstep.on_again = self._own_state.restart
                results = self._run(calls)
            after = SavedState(changed)
            if self._interleave and self.block_store.placement.blocks:
                rewind()
                apart = self._one_by_one(calls)
                if not _agree(results, apart):
                    self._interleave = False
                    logger.warning(
                        "ds_zo: passes in lockstep give other losses than one after the other, so the model keeps "
                        "state between blocks that is neither a buffer nor an attribute of its modules; it runs one "
                        "pass after the other from now on (each uploads every block)"
                    )
                    return apart
                del apart  # its outputs, before more forwards
            if self.block_store.measures:

                def again() -> None:
                    rewind()
                    self._run(calls)

                self.block_store.rehearse(again)
            after.put_back()
            return results
        except BaseException:
            state.put_back()
            raise
        finally:
            self._own_state.forget_hooks()
            self._lockstep.on_again = self._own_state.restart

    def _watched(
        self, calls: Sequence[Callable[[], Any]], rewind: Callable[[], None], renew: Callable[[], None] | None = None
    ) -> list[Any]:
        units = {id(unit): unit for unit in self.block_store.placement.units}
        watch = StrayWeightDetector.of_units(units.values(), self._copies.visited)
        results: list[Any] | None = None
        try:
            with watch, torch.compiler.set_stance("force_eager"):  # compiled code would not be watched
                results = self._run(calls)
        except Exception as error:
            self._refuse_streamed(watch, error)
            if not watch.strays:
                raise
        self._refuse_streamed(watch, None)
        self._num_watched += 1
        strays = [units[key] for key in watch.strays]
        self._copies.crowd(strays)
        return self._again_if_crowded(calls, results, rewind, strays=strays, renew=renew)

    def _rewind(self) -> None:
        """To where the last passes started."""
        self._lockstep.rewind()
        self._own_state.restart()

    def _again_if_crowded(
        self,
        calls: Sequence[Callable[[], Any]],
        results: list[Any] | None,
        rewind: Callable[[], None],
        *,
        strays: Sequence[Unit] = (),
        renew: Callable[[], None] | None = None,
    ) -> list[Any]:
        """`results`, unless copies of units were in one another's way, or were not there where they were used. What one
        run shows of that may hide more. `strays`: units that were used outside of their modules. `renew` takes hooks
        that are made here for state of the module."""
        while found := self._copies.take_crowded():
            rewind()  # first: it would take off the hooks that are made below
            self._move_whole(strays)
            if self._graphs is not None:
                self._graphs.leave(found)
            self._copies.make_ambient(found)
            self._signature = self._groups_and_flags()  # units stand in another order
            if renew is not None:
                renew()
            results = self._run(calls)
        assert results is not None
        return results

    def _move_whole(self, units: Sequence[Unit]) -> None:
        """Weights that are used outside their module, as those of a tied head, have a gradient in every row."""
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

    def _refuse_streamed(self, watch: StrayWeightDetector, error: Exception | None) -> None:
        """Where blocks stream, one that is not called whole is never brought up."""
        in_blocks = {id(unit) for unit in self.block_store.placement.blocks}
        for key, name in watch.strays.items():
            if self._copies.streams and key in in_blocks:
                raise used_outside(name) from error

    @contextmanager
    def _step_settings(self) -> Iterator[None]:
        """Besides what saves memory, the arithmetic that `compute_dtype` asks for."""
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
        if step != self.block_store.log.length:
            raise RuntimeError(
                f"a loss says how to move along the noise of its own step, got one of step {step} in step "
                f"{self.block_store.log.length}: call engine.backward before the engine.step that follows its forward"
            )
        self._projected[self.ranks.own] += differences / (2 * self.settings.zo_eps)

    def backward(self, loss: torch.Tensor, *, retain_graph: bool = False) -> None:
        self._parameters.check(loss)
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
            g = torch.where(g.isfinite(), g.clamp(-limit, limit), g)  # an overflow is skipped, not cut to the limit
        self.block_store.materialiser.make_room()
        finite = self.block_store.log.append(
            g,
            lrs=[float(group["lr"]) for group in self.param_groups],
            weight_decays=[float(group.get("weight_decay", 0.0)) for group in self.param_groups],
        )
        if self.recorder is not None:
            self.recorder.append(self.block_store.log.last_row)
        self._projected = torch.zeros_like(g)
        if not self.config.section.stream.fuse_update:
            self._fold_everything()  # an ablation: the update as a sweep of its own
        self.block_store.fill_device()
        if self.block_store.measures:
            num_visits = 1 if self._interleave else self._num_passes
            self.block_store.choose_interval(num_visits=num_visits, agree=self.ranks.first_decides)
        return StepOutcome(applied=DeferredScalar(finite), grad_norm=DeferredScalar(norm))

    def _fold_everything(self) -> None:
        self.block_store.materialiser.fold_now(*self.block_store.placement.units)

    # What may change under us

    def _groups_and_flags(self) -> list[tuple[int, bool]]:
        group_of = {id(p): index for index, group in enumerate(self.param_groups) for p in group["params"]}
        return [
            (group_of.get(id(p.parameter), 0), p.parameter.requires_grad and id(p.parameter) in group_of)
            for unit in self.block_store.placement.units
            for p in unit.placed
        ]

    def _check_model(self) -> None:
        """Frozen or regrouped parameters take effect; parameters that are not the ones that were placed can't."""
        if self._structure is not None and self._structure.is_that_of(self.param_groups):
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
                    f"parameter {name} is not the one that deepspeed.initialize placed: add, resize or replace "
                    "parameters before deepspeed.initialize, and load weights without assign=True"
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
            if trainable and part.direct:
                raise ValueError(
                    f"parameter {p.name} was frozen when deepspeed.initialize ran and was laid out so; unfreeze it "
                    "before initialize (and give it to an optimizer group)"
                )
        self._fold_everything()
        for (part, p), (group, trainable) in zip(placed, signature, strict=True):
            p.group, p.trainable = group, trainable
            part.forget_tables()
        for unit in self.block_store.placement.units:
            unit.version = self.block_store.log.length
        self._signature, self._regrouped = signature, True
        if self.block_store.log.length:
            self._break_trajectory()

    def _break_trajectory(self) -> None:
        """Weights, or what is trained, are changed by something else than a step."""
        if self.recorder is not None:
            self.recorder.end_log(self.block_store.log.length)

    # Saving, loading, describing

    def snapshot(self, *, hold: bool, omit_frozen: bool = False) -> Snapshot:
        self.block_store.measures = False  # what is saved names the interval
        return self._checkpoint.snapshot(hold=hold, omit_frozen=omit_frozen)

    def restore(self, saved: Saved, *, resume: bool, strict: bool = True) -> None:
        self._checkpoint.restore(saved, resume=resume, strict=strict)
        self.state.forget()
        if not resume:
            self._break_trajectory()

    @torch.no_grad()
    def replay_steps(self, rows: torch.Tensor) -> None:
        """Folds where the forward of each step did, so that the weights have the bits they had."""
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
        with told_to_nobody():
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
        self.block_store.measures = False  # as in `snapshot`, which the first rank alone makes: all must agree or none
        return {"projected": self._projected.cpu()}

    def check_rank_state(self, state: Mapping[str, Any]) -> None:
        if not isinstance(state["projected"], torch.Tensor):
            raise TypeError("projected gradients are no tensor")

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

    @torch.no_grad()
    def _leave_module_whole(self) -> None:
        """The module outlives the engine: scripts save it, Trainer trains it again. It gets the weights of the current
        step, in memory of its own where the stored form is not the parameters'."""
        for unit in self.block_store.placement.units:
            if self.block_store.shared is not None and unit.streamed:
                self._leave_shared_unit_whole(unit, self.block_store.shared)
            elif all(part.viewable for part in unit.parts):
                self.block_store.materialiser.fold_now(unit)
                self.block_store.runtime.host_wait(unit)
            else:
                unit.bind([self.state.read(placed.parameter) for placed in unit.placed])

    def _leave_shared_unit_whole(self, unit: Unit, store: SharedStore) -> None:
        """Ranks close when they please, so nothing that they share is changed. Where weights of the current step are
        not what is stored, every rank would need a copy of its own: not if the machine can't hold that."""
        pending = self.block_store.materialiser.pending(unit)
        if not all(part.viewable for part in unit.parts):
            unit.bind([self.state.read(placed.parameter) for placed in unit.placed])
        elif not pending or store.has_room_for(unit.nbytes * store.share.size):
            self.block_store.runtime.host_wait(unit)
            values = [self.state.read(placed.parameter) for placed in unit.placed] if pending else None
            unit.settle(store.private(unit.store_buffer), None, streamed=False, low_streamed=False)
            unit.bind_stored()
            for placed, value in zip(unit.placed, values or (), strict=False):
                placed.parameter.data.copy_(value)
        elif not self._left_behind_logged:
            self._left_behind_logged = True
            logger.warning(
                "ds_zo: the engine is destroyed and this machine has no room for a whole model a rank: the module "
                "keeps weights that lag; save, or read state_dict(), before engine.destroy()"
            )

    def close(self) -> None:
        try:
            if self.recorder is not None:
                self.recorder.close()
        finally:
            # Not at the interpreter's end: nobody has the module then, and PyTorch aborts on tensors made in a
            # finalizer. Where it fails, for lack of memory say, the weights stay where they are stored, and it may be
            # tried again.
            if not self._closed and not sys.is_finalizing() and self.state.owns_module():
                self.state.unwatch()
                self.state.gathered_copies.close(comes_home=True)
                self._leave_module_whole()
            self._closed = True
            self._copies.close()
            self._parameters.close()
            if self._graphs is not None:
                self._graphs.close()
            self._pretrained.close()
            self.state.close()
            self.block_store.close()


def _agree(together: Sequence[Any], apart: Sequence[Any]) -> bool:
    for (_, ours), (_, theirs) in zip(together, apart, strict=True):
        for a, b in zip(ours, theirs, strict=True):
            exact = 1e-7 if a.device.type == "cpu" else 1e-6  # CUDA's atomics add in any order
            tolerance = exact if a.dtype is torch.float32 else 1e-2
            if a.shape != b.shape or not torch.allclose(
                a.float(), b.float(), rtol=tolerance, atol=tolerance, equal_nan=True
            ):
                return False
    return True
