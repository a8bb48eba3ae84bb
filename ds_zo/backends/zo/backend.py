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

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import torch
import torch.distributed as dist
from deepspeed.utils import logger
from torch import nn

from ds_zo import ops
from ds_zo.backends.common.backend import Backend, StepOutcome
from ds_zo.backends.common.caches import Caches
from ds_zo.backends.common.chunked_loss import CausalLosses
from ds_zo.backends.common.deferred_scalar import DeferredScalar
from ds_zo.backends.common.startup import StartupSummary
from ds_zo.backends.common.unit_weights import UnitWeights
from ds_zo.backends.zo.activations import Activations
from ds_zo.backends.zo.checkpoint import ZOCheckpoint
from ds_zo.backends.zo.cuda_graphs import BlockGraphs
from ds_zo.backends.zo.lockstep import Lockstep
from ds_zo.backends.zo.loss_terms import TrainedParameters, marked_outputs
from ds_zo.backends.zo.member_passes import MemberPasses, log_limits
from ds_zo.backends.zo.members import differences
from ds_zo.backends.zo.model_check import ModelCheck
from ds_zo.backends.zo.outputs import loss_of, losses_of, tie, tie_differences, with_floats, with_losses
from ds_zo.backends.zo.pass_inputs import PassInputs
from ds_zo.backends.zo.passes import TrainingPasses
from ds_zo.backends.zo.ranks import Ranks
from ds_zo.backends.zo.replayed_weights import ReplayedWeights
from ds_zo.backends.zo.scoring import Objective, Scoring
from ds_zo.backends.zo.store import ZOStore
from ds_zo.checkpoint.export import Spec, Stream
from ds_zo.checkpoint.reader import Saved
from ds_zo.checkpoint.snapshot import Snapshot, persistent_buffers
from ds_zo.checkpoint.stock import Weights, check_weights
from ds_zo.config import ConfigError, Resolved, ZOParams
from ds_zo.logs import show
from ds_zo.streaming.intercepted import without_interception
from ds_zo.streaming.units import Unit


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
        assert isinstance(config.optimizer, ZOParams)
        self.settings = config.optimizer
        self.ranks = Ranks(
            process_group,
            num_directions=self.settings.all_directions,
            direction_parallel=self.settings.direction_parallel,
            device=device,
            at=config.params_at,
            divides_members=self.settings.noise == "rank1",
        )
        own = self.ranks.num_own_directions
        if self.settings.noise == "rank1" and not self.settings.antithetic and own < 2:
            raise ConfigError(
                "without antithetic, members of a rank are compared with their mean, so each rank needs two of them, "
                "got one; raise num_members",
                at=f"{config.params_at}.num_members",
            )
        self.store = ZOStore(module, config, param_groups=self.param_groups, device=device, ranks=self.ranks)
        lockstep = Lockstep(device)
        self._members: MemberPasses | None = None
        """Evaluates members of rank-1 noise; None for other noise."""
        if self.store.members is not None:
            self._members = MemberPasses(module, self.store, self.settings, num_members=own)
            log_limits(self.store.blocks.placement)
        graphs = config.section.cuda_graphs and device.type == "cuda"
        self._graphs = BlockGraphs(self.store, lockstep, device=device) if graphs else None
        self._activations = Activations(module)
        self._passes = TrainingPasses(
            module,
            self.store,
            lockstep,
            self._activations,
            num_passes=1 if self._members is not None else 2 * own,
            graphs=self._graphs,
            before_pass_long=self._perturb_every_row,
            members=self._members,
        )
        self._checkpoint = ZOCheckpoint(self.store, module, aliases=self.aliases())
        writes = not dist.is_initialized() or dist.get_rank() == 0
        self.recorder = self._checkpoint.recorder() if config.section.checkpoint.trajectory and writes else None
        storage = ReplayedWeights(module, self.store, on_write=self._break_trajectory)
        self.weights_by_name = UnitWeights(module, storage)
        self._never_in_train_mode = not module.training
        """Whether no forward has run in train mode yet. `from_pretrained` returns models in eval mode, and DeepSpeed
        trains them also if the script never calls `train()`."""
        self._model_check = ModelCheck(
            module, self.store, self.param_groups, graphs=self._graphs, on_regrouping=self._break_trajectory
        )
        self._trained_parameters = TrainedParameters(
            p for unit in self.store.blocks.placement.units for p in unit.placed
        )
        self._anchor = torch.zeros((), device=device, requires_grad=True)
        self._projected = torch.zeros(self.settings.all_directions, device=device)
        self._continues_noise = False
        """Whether the checkpoint that was loaded last has the noise of this run."""
        self._tied_outputs_logged = self._narrow_loss_logged = False
        self._causal_losses = CausalLosses(module, pass_weights=self._passes.runner.working_copies)
        self._caches = Caches(module)
        self._scoring: Scoring | None = None
        """What makes the losses of the present forward; None: the model."""

    @classmethod
    def places_parameters(cls, config: Resolved) -> bool:
        return True

    # The training forward

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Runs a training forward if gradients are enabled in train mode, else the plain module. Cleans up after
        Ctrl-C."""
        if self._scoring is not None:
            self._scoring.check_caller()
        self._never_in_train_mode &= not self.module.training
        trains = self.module.training or self._never_in_train_mode
        try:
            if trains:
                self._passes.recover()
            if not (trains and torch.is_grad_enabled()):
                if self._scoring is not None:
                    raise RuntimeError(
                        "engine.zo_step needs a model in train mode, got one in eval mode: call engine.train() first"
                    )
                return self.module(*args, **kwargs)
            with self.weights_by_name.unwatched():
                self._activations.unmark()
                output = self._training_forward(*args, **kwargs)
                self._activations.mark()
                return output
        except KeyboardInterrupt:
            self._passes.recover()
            raise

    def _training_forward(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the passes and returns the last pass's output, its losses replaced by differentiable means over the
        passes. Inside `scored_by`, returns the mean loss alone."""
        self._model_check.check(self.param_groups)
        args, kwargs = self.ranks.shared_batch(args, kwargs)
        self.store.materialiser.begin_forward()
        inputs = PassInputs(args, kwargs, copies=self._passes.profile.writes_inputs)
        with self._step_settings(kwargs):
            results = self._passes.run(
                inputs,
                generators=self._model_check.generators,
                trained=self._model_check.trained,
                scoring=self._scoring,
            )
        output, passes = results[-1][0], [tensors for _, tensors in results]
        tied = self._tied(passes, [x for x in inputs.requiring_grad() if x not in self._trained_parameters])
        if self._scoring is not None or loss_of(output) is not None:
            self._warn_of_narrow_loss(passes[0][0].dtype)
            if self._scoring is not None:
                return tied[0]
            if self._members is not None:
                output = self._members.of_sequences(output)
            return with_losses(output, [*tied, *marked_outputs(losses_of(output)[len(tied) :])])
        if not self._tied_outputs_logged:
            self._tied_outputs_logged = True
            show(
                f"ds_zo: the model returns no loss, so ZO differentiates its {len(tied)} floating-point outputs. This "
                "is exact for a loss that is linear in them, and first order in zo_eps otherwise. Pass labels to the "
                "model to have its own loss measured."
            )
        return with_floats(output, tied)

    def _tied(self, passes: list[list[torch.Tensor]], inputs: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """Differentiable means over the passes. `inputs`: of the forward, which require grad."""
        accumulate = partial(self._accumulate, self.store.log.length)
        if self._members is None:
            return tie(passes, anchor=self._anchor, accumulate=accumulate, inputs=inputs)
        losses = passes[0][0]
        found = differences(losses.float(), self._members.rows, shaping=self.settings.shaping)
        return (tie_differences(losses.mean(), found, anchor=self._anchor, accumulate=accumulate, inputs=inputs),)

    def _warn_of_narrow_loss(self, dtype: torch.dtype) -> None:
        """Warns once if the loss or the score has fewer than 32 bits."""
        if dtype.itemsize < 4 and not self._narrow_loss_logged:
            self._narrow_loss_logged = True
            logger.warning(
                f"ds_zo: ZO learns from the difference of two losses, and in {dtype} most such losses are equal, so no "
                "step would be made: compute the loss in float32 in the model's forward, or the score in the objective"
            )

    @contextmanager
    def scored_by(
        self, objective: Objective | None, *, minimise: bool, on_error: float | Literal["raise"]
    ) -> Iterator[None]:
        self._scoring = Scoring(objective, minimise=minimise, on_error=on_error, ranks=self.ranks)
        try:
            yield
            self.num_failed_scores += self._scoring.num_failed
        finally:
            self._scoring = None

    def _perturb_every_row(self, units: Sequence[Unit]) -> None:
        """Perturbs also the padding rows of these units. A weight that is used outside its module, such as a tied
        head's, has a gradient in every row."""
        for unit in units:
            for part in unit.parts:
                for p in (p for p in part.placed if any(p.still)):
                    self.store.materialiser.fold_now(unit)
                    p.still = (0, 0)
                    part.forget_tables()
                    if self.store.log.length or (self.recorder is not None and self.recorder.follows_a_checkpoint):
                        self._break_trajectory()

    @contextmanager
    def _step_settings(self, call: Mapping[str, Any]) -> Iterator[None]:
        """Sets the arithmetic that `compute_dtype` asks for, computes losses in chunks, and turns key-value caches
        off. `call`: the keywords of the forward."""
        with ExitStack() as stack:
            if self._members is None:
                stack.enter_context(self._causal_losses.in_chunks(call))
            else:
                stack.enter_context(self._causal_losses.of_rows(self._members.row_losses))
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
        if step != self.store.log.length:
            raise RuntimeError(
                f"a loss belongs to the noise of its own step, got one of step {step} in step "
                f"{self.store.log.length}: call engine.backward before the engine.step that follows its forward"
            )
        self._projected[self.ranks.own_directions] += differences / (2 * self.settings.zo_eps)

    def backward(self, loss: torch.Tensor, *, retain_graph: bool = False) -> None:
        self._activations.check(self._trained_parameters.check(loss))
        super().backward(loss, retain_graph=retain_graph)

    def zero_grad(self) -> None:
        self._projected.zero_()

    def step(self) -> StepOutcome:
        self._model_check.check_at_step(self.param_groups)
        g = self.ranks.average(self._projected)
        norm = g.norm()
        if self.settings.clip_projected_grad is not None:
            limit = self.settings.clip_projected_grad
            g = torch.where(g.isfinite(), g.clamp(-limit, limit), g)  # a step with an overflow is skipped, not clipped
        self.store.materialiser.fold_due()
        finite = self.store.log.append(
            g,
            lrs=[float(group["lr"]) for group in self.param_groups],
            weight_decays=[float(group.get("weight_decay", 0.0)) for group in self.param_groups],
        )
        if self.recorder is not None:
            self.recorder.append(self.store.log.last_row)
        self._projected = torch.zeros_like(g)
        self.store.fill_device()
        if self.store.must_choose_interval:
            self.store.choose_interval(num_uploads=self._passes.num_uploads, agree=self.ranks.broadcast_from_first)
        return StepOutcome(applied=DeferredScalar(finite), grad_norm=DeferredScalar(norm))

    # Changes that the user makes to the model or the optimizer

    def _break_trajectory(self) -> None:
        """Ends the recorded trajectory: the weights, or the set of trained parameters, changed by something other than
        a step."""
        if self.recorder is not None:
            self.recorder.end_log(self.store.log.length)

    # Saving, loading, describing

    def frozen_unread(self) -> AbstractContextManager[None]:
        return self.weights_by_name.frozen_undecoded()

    def snapshot(self, *, hold: bool, omit_frozen: bool = False) -> Snapshot:
        self.store.must_choose_interval = False  # the checkpoint holds the interval
        # A trajectory starts from a checkpoint with all weights.
        found = self._checkpoint.snapshot(hold=hold, omit_frozen=omit_frozen, omit_base=self.recorder is None)
        if self.recorder is None:
            return found
        return replace(found, is_as_replayed=self._checkpoint.is_as_replayed(self.recorder.first_step))

    def restore(self, saved: Saved, *, resume: bool, strict: bool = True) -> None:
        self._checkpoint.restore(saved, resume=resume, strict=strict)
        facts = self._checkpoint.facts()
        names = ("noise_version", "seed", "distribution", "num_directions")
        self._continues_noise = all(saved.backend_state[name] == facts[name] for name in names)
        self.weights_by_name.forget()
        if not resume:
            self._break_trajectory()

    @torch.no_grad()
    def replay_steps(self, rows: torch.Tensor) -> int:
        """Applies logged updates. Folds each unit where the original step did, so that the weights have the same bits.
        Returns the number of steps that were skipped."""
        for row in rows:
            self.store.materialiser.fold_due()
            self.store.log.append_row(row)
        self._projected.zero_()
        self.weights_by_name.forget()
        return self.store.log.num_skipped(rows)

    def weights(self, *, omitted: Collection[str] = ()) -> Stream:
        placed = [p for unit in self.store.blocks.placement.units for p in unit.placed if p.name not in omitted]
        buffers = dict(persistent_buffers(self.module))
        specs = [Spec(p.name, p.parameter.dtype, tuple(p.parameter.shape)) for p in placed]
        specs += [Spec(name, value.dtype, tuple(value.shape)) for name, value in buffers.items()]

        def read() -> Iterator[tuple[str, torch.Tensor]]:
            yield from ((p.name, self.weights_by_name.read(p.parameter).cpu()) for p in placed)
            yield from ((name, value.detach().cpu()) for name, value in buffers.items())

        return specs, read()

    @torch.no_grad()
    def load_weights(self, weights: Weights, *, strict: bool = True) -> None:
        aliases = self.aliases()
        with without_interception():
            here = {p.name: p.parameter.data for unit in self.store.blocks.placement.units for p in unit.placed}
        here |= dict(persistent_buffers(self.module))
        every = {**here, **{alias: here[name] for alias, name in aliases.items()}}
        check_weights(weights, every, aliases, strict=strict)
        names = {name: name for name in here} | {name: alias for alias, name in aliases.items() if name not in weights}
        parameters = dict(self.module.named_parameters())
        for name, value in here.items():
            if names[name] not in weights:
                continue
            if name in parameters:
                self.weights_by_name.store(parameters[name], weights[names[name]])
            else:
                value.copy_(weights[names[name]])

    def rank_state(self) -> dict[str, Any]:
        # As in `snapshot`, which only the first rank makes: all ranks must keep the same interval.
        self.store.must_choose_interval = False
        return {"projected": self._projected.cpu()}

    def check_rank_state(self, state: Mapping[str, Any]) -> None:
        if not isinstance(state["projected"], torch.Tensor):
            raise TypeError(f"projected gradients must be a tensor, got {type(state['projected']).__name__}")

    def load_rank_state(self, state: Mapping[str, Any]) -> None:
        self.zero_grad()
        if self._continues_noise and state["projected"].shape == self._projected.shape:
            self._projected.copy_(state["projected"])
        elif state["projected"].any():
            logger.warning(
                "ds_zo: the checkpoint was saved between the micro-batches of a step, and their projected gradients "
                "are along other noise than this run's, so they are dropped: load it with the same seed, distribution "
                "and num_directions to continue the step (optimizer.params)"
            )

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.store.log.length, "seed": self.settings.seed, "noise_version": ops.NOISE_VERSION}

    def describe(self) -> str:
        return f"{self.store.describe()}\nds_zo: {self._settings_text()}{self.ranks.describe()}"

    def _settings_text(self) -> str:
        number, noun = self.settings.all_directions, "direction" if self._members is None else "member"
        return (
            f"{number} {noun if number == 1 else noun + 's'} a step, zo_eps {self.settings.zo_eps:g}, "
            f"{self.store.perturbation.distribution} noise, seed {self.settings.seed}"
        )

    def startup_summary(self) -> StartupSummary:
        return replace(
            self.store.startup_summary(),
            settings=self._settings_text(),
            ranks=self.ranks.startup_text(),
        )

    def close(self) -> None:
        try:
            if self.recorder is not None:
                self.recorder.close()
        finally:
            self.weights_by_name.give_back()
            self._passes.close()
            if self._graphs is not None:
                self._graphs.close()
            if self.store.members is not None:
                self.store.members.close()
            self._trained_parameters.close()
            self.weights_by_name.close()
