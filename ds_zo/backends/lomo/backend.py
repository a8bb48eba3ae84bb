"""LOMO: full-parameter training that never holds the gradients of the whole model.

A hook on each parameter updates the parameter inside the backward pass and frees its gradient. One gradient is alive at
a time. `LOMOBackend.step` only reports the outcome.

[Note: two passes] The global gradient norm is known only after the last gradient, when all gradients have been freed.
Clipping by that norm, and fp16's check for overflow, need it before the first update. In these cases the same graph is
run backward twice. The first pass sums up the norm and drops the gradients. The second pass updates with the resulting
factor. If the norm is not finite, the second pass updates nothing and only frees the graph: the next forward would not
fit into memory beside it. There is one forward, and weights do not change between the passes. Both kinds of activation
checkpointing recompute the same values in both passes, dropout masks included. With a single pass, updates are skipped
per parameter ([Note: skipped updates]).

With `ds_zo.compile_blocks` autograd delivers all gradients of a block together, so the gradients of one block are alive
at a time (`compiled_blocks`).

With `offload_param` blocks are streamed, and each is recomputed in a backward of its own ([Note: recomputed blocks],
[Note: gradients in parts]). Passes, updates and rounding bits are the same as without streaming.

On several ranks a layer's gradients are averaged before its update ([Note: one order of buckets]). At stage 3 without
`offload_param`, blocks are gathered from the devices of all ranks instead of the host ([Note: device shards]).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from deepspeed.utils import logger
from torch import nn

from ds_zo.backends.common.backend import StepOutcome
from ds_zo.backends.common.caches import Caches
from ds_zo.backends.common.chunked_loss import CausalLosses
from ds_zo.backends.common.deferred_scalar import DeferredScalar
from ds_zo.backends.common.known_parameters import KnownParameters
from ds_zo.backends.common.startup import StartupSummary
from ds_zo.backends.lomo.buckets import GradientConsumer, buckets_of
from ds_zo.backends.lomo.foreign_leaves import ForeignLeaves
from ds_zo.backends.lomo.parameters import Residues, make_parameter_states
from ds_zo.backends.lomo.passes import BackwardPasses, BackwardPhase
from ds_zo.backends.lomo.reducer import GradientReducer, LocalReducer, Reducer
from ds_zo.backends.lomo.skipped_updates import SkippedUpdates
from ds_zo.backends.lomo.state import check_saved_states, load_saved_states, saved_states
from ds_zo.backends.lomo.updates import SGD, Updater, UpdateRule
from ds_zo.backends.lomo.window import AccumulationWindow
from ds_zo.backends.recompute.backend import RecomputedBackend
from ds_zo.backends.recompute.compiled_blocks import BlockCompiler, is_compiled, run_backward_twice
from ds_zo.config import LOMOParams, Resolved
from ds_zo.optim import LossScaler
from ds_zo.streaming.allocator import warn_of_fragmentation
from ds_zo.streaming.blocks import find_blocks
from ds_zo.streaming.node import use_world_timeout

_LARGE_LR_FOR_VALUE_CLIPPING = 1e-3


class LOMOBackend(RecomputedBackend):
    """Updates each parameter by SGD as soon as its gradient is complete. See this module's docstring."""

    accumulates: ClassVar[bool] = False
    rule: ClassVar[UpdateRule] = SGD
    settings: LOMOParams

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
        assert isinstance(config.optimizer, LOMOParams)
        self.settings = config.optimizer
        half = torch.float16 in (config.dtype, config.autocast)
        self._scaler = LossScaler(config.loss_scale) if half else None
        clips = config.gradient_clipping > 0
        self._clips_by_layer = clips and self.settings.norm_scope == "group"
        self._two_passes = half or (clips and not self._clips_by_layer)
        """See [Note: two passes]."""
        self._window = AccumulationWindow(
            SkippedUpdates(device), accumulation=self.settings.accumulation, params_at=config.params_at
        )
        self._causal_losses = CausalLosses(module, blocks=config.section.stream.blocks)
        self._caches = Caches(module)
        self._compiler = BlockCompiler(backward_twice=self._two_passes) if config.section.compile_blocks else None
        self.make_blocks(compiler=self._compiler)
        self._parameter_states = make_parameter_states(module, config, clips_by_layer=self._clips_by_layer)
        self._known_parameters = KnownParameters(module, (state.parameter for state in self._parameter_states))
        self._foreign_leaves = ForeignLeaves(module.parameters()) if self._two_passes else None
        self._updater = Updater(self.rule, config, optimizer=optimizer, window=self._window)
        self._passes = BackwardPasses(
            self._parameter_states,
            updater=self._updater,
            window=self._window,
            two_passes=self._two_passes,
            layer_clipping=config.gradient_clipping if self._clips_by_layer else None,
            blocks=self.blocks,
            make_reducer=self._make_reducer,
        )
        self._publish_scale(overflow=False)
        keeps_residues = config.section.rounding == "kahan" and not self.blocks.is_streamed
        self.access_weights(low_bits=Residues(self._parameter_states) if keeps_residues else None)
        self._warn()

    @classmethod
    def places_parameters(cls, config: Resolved) -> bool:
        several = dist.is_initialized() and dist.get_world_size() > 1
        return config.stream or (config.shards_device and several)

    @classmethod
    def prepare_optimizer(cls, optimizer: torch.optim.Optimizer, config: Resolved) -> None:
        if isinstance(config.optimizer, LOMOParams) and config.optimizer.adapter is not None:
            for group in optimizer.param_groups:  # under the name that torch's schedulers use, before one changes it
                group.setdefault("initial_lr", group["lr"])

    def _make_reducer(self, consumer: GradientConsumer) -> Reducer:
        if not dist.is_initialized() or dist.get_world_size(self.process_group) == 1:
            return LocalReducer(consumer)
        use_world_timeout(self.process_group, self.device)
        blocks = list(find_blocks(self.module, self.config.section.stream.blocks).values())
        in_shards = self.rule.is_elementwise and not self._clips_by_layer
        shards = self.blocks.shards if in_shards else None
        return GradientReducer(
            buckets_of(self.module, blocks, self._parameter_states, shards=shards),
            process_group=self.process_group,
            device=self.device,
            consumer=consumer,
            blocks_first=self.blocks.is_sharded,
        )

    def _warn(self) -> None:
        lrs = [float(group["lr"]) for group in self.param_groups]
        if dist.is_initialized() and dist.get_rank() != 0:
            return
        if self.settings.clip_grad_value is not None and max(lrs, default=0.0) >= _LARGE_LR_FOR_VALUE_CLIPPING:
            logger.warning(
                f"ds_zo: clipping by value changes the direction of large steps; at lr {max(lrs):g} (1e-3 or more) "
                f"prefer gradient_clipping ({self.config.params_at}.clip_grad_value)"
            )
        if self.blocks.is_streamed:
            warn_of_fragmentation(self.device, budget_gb=self.config.section.stream.device_memory_gb)
        if self.settings.adapter is None:
            return
        if any(state.parameter.requires_grad and not state.is_adapter for state in self._parameter_states):
            logger.warning(
                "ds_zo: PEFT's save_pretrained, which Trainer calls, saves adapters only: to save the other weights "
                f"that {self.config.backend} trains, save a checkpoint and run ds-zo export"
            )
        else:
            logger.warning(
                "ds_zo: only adapters are trainable, because PEFT freezes the weights that it wraps: to train these "
                f"weights by {self.config.backend}, call requires_grad_(True) on them before deepspeed.initialize"
            )

    # Forward and backward

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the module. A backward may follow also in evaluation mode: `from_pretrained` returns models in that
        mode, and a user may train them in it."""
        with self.plain_parameters():
            return self._forward(*args, **kwargs)

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self.module(*args, **kwargs)
        self._window.end_bare()
        num_tries = self._window.num_tries
        trains = self.module.training
        if trains:
            self._known_parameters.check()
            self._passes.reducer.drop()  # buckets of a direct `loss.backward()` that raised
        makes_no_caches = trains or self.blocks.is_streamed or self._compiler is not None
        with (
            run_backward_twice() if self._two_passes else nullcontext(),
            self._causal_losses.in_chunks(kwargs),
            self._caches.off() if makes_no_caches else nullcontext(),
            self.blocks.forward(),
        ):
            output = self.module(*args, **kwargs)
        self._passes.watch_graph((args, kwargs), output, num_tries=num_tries)
        if self._foreign_leaves is not None:
            self._foreign_leaves.record_forward((args, kwargs), output)
        return output

    def backward(self, loss: torch.Tensor, *, retain_graph: bool = False) -> None:
        """Runs the graph backward, once or twice, and updates the weights. See [Note: two passes]."""
        is_compiled_twice = self._two_passes and (self._compiler is not None or is_compiled(self.module))
        with self.plain_parameters(), run_backward_twice() if is_compiled_twice else nullcontext():
            self._backward(loss, retain_graph=retain_graph)

    def _backward(self, loss: torch.Tensor, *, retain_graph: bool) -> None:
        self._window.begin(loss)
        self._updater.follow_groups()
        passes = self._passes
        passes.scale = scale = 1.0 if self._scaler is None else self._scaler.scale
        scaled = loss if self._scaler is None else loss.float() * scale
        norm: float | DeferredScalar | None = None
        finite = True
        if self._foreign_leaves is not None:
            with (
                passes.run(BackwardPhase.MEASURE, frees_graph=False),
                self._foreign_leaves.gradients_restored(scaled),
            ):
                scaled.backward(retain_graph=True)
            norm = passes.reducer.norm() / scale
            finite = math.isfinite(norm)
            passes.set_factor(norm, limit=0.0 if self._clips_by_layer else self.config.gradient_clipping)
        with passes.run(BackwardPhase.UPDATE if finite else BackwardPhase.DISCARD, frees_graph=not retain_graph):
            scaled.backward(retain_graph=retain_graph)
        if (layer_norm := passes.pop_layer_norm()) is not None:
            norm = DeferredScalar(layer_norm)
        overflow = self._scaler is not None and not finite
        if self._scaler is not None:
            self._scaler.update(overflow=overflow)
            self._publish_scale(overflow=overflow)
        self._window.end(norm, finite=finite, overflow=overflow)

    # Step

    def _publish_scale(self, *, overflow: bool) -> None:
        if self._scaler is not None:
            self._scaler.publish(self.optimizer, overflow=overflow)

    def step(self) -> StepOutcome:
        outcome = self._window.step()
        self.blocks.fill_device()
        return outcome

    def zero_grad(self) -> None:
        """Permits another backward before the next step. There is no gradient to drop, because `backward` has made its
        update."""
        self._window.permit_backward()

    # Saving, loading, describing

    def state_dict(self) -> dict[str, Any]:
        self._window.read_skipped()
        scaler = None if self._scaler is None else self._scaler.state_dict()
        return {"step": self._window.num_updates, "scaler": scaler, **saved_states(self._parameter_states)}

    def check_state(self, state: Mapping[str, Any]) -> None:
        check_saved_states(self._parameter_states, state, self.config)
        int(state["step"])
        if state["scaler"] is not None:
            [float(state["scaler"][name]) for name in ("scale", "num_clean", "overflows_left")]

    def load_state_dict(self, state: Mapping[str, Any], *, load_optimizer_states: bool = True) -> None:
        kept = state if load_optimizer_states else {"step": 0, "scaler": None, "moments": {}, "residues": {}}
        self._window.restart(int(kept["step"]))
        if self._scaler is not None:
            self._scaler.restart()
            if kept["scaler"] is not None:
                self._scaler.load_state_dict(kept["scaler"])
            self._publish_scale(overflow=False)
        keeps_residues = self.config.section.rounding == "kahan"
        load_saved_states(self._parameter_states, kept, device=self.device, keeps_residues=keeps_residues)

    def rank_state(self) -> dict[str, Any]:
        """The outcome so far of an unfinished accumulation window."""
        return {"window": self._window.state_dict()}

    def check_rank_state(self, state: Mapping[str, Any]) -> None:
        if state.get("window") is not None:
            StepOutcome(**state["window"])

    def load_rank_state(self, state: Mapping[str, Any]) -> None:
        self._window.load_state_dict(state.get("window"))

    def _describe_passes(self) -> str:
        """Passes per step, clipping, loss scale and adapters."""
        if self._clips_by_layer:
            clipping = f"each layer's gradients clipped to norm {self.config.gradient_clipping:g}"
        elif self.config.gradient_clipping > 0:
            clipping = f"gradients clipped to norm {self.config.gradient_clipping:g} (0 saves a pass)"
        elif self.settings.clip_grad_value is not None:
            clipping = f"gradients clipped to values within {self.settings.clip_grad_value:g}"
        else:
            clipping = "gradients not clipped"
        scaling = f", loss scale {self._scaler.scale:g}" if self._scaler is not None else ""
        num_adapters = sum(state.is_adapter for state in self._parameter_states)
        adapters = f", {num_adapters} adapter tensors by AdamW" if num_adapters else ""
        passes = "two backward passes" if self._two_passes else "one backward pass"
        return f"{passes} per step, {clipping}{scaling}{adapters}"

    def describe(self) -> str:
        return "\n".join(
            [*self.blocks.describe(), f"ds_zo: {self._describe_passes()}", *self._passes.reducer.describe()]
        )

    def startup_summary(self) -> StartupSummary:
        base = self.blocks.startup_summary()
        added = ["activations", "gradients"]
        if self.rule.has_moments or any(state.is_adapter for state in self._parameter_states):
            added.append("moments")
        if self.config.section.rounding == "kahan":
            added.append("rounding residues")
        return replace(
            base,
            settings=self._describe_passes(),
            added_by_steps=f"{', '.join(added[:-1])} and {added[-1]}",
            ranks=self._passes.reducer.startup_text(),
        )

    def close(self) -> None:
        self._passes.close()
        self.blocks.close()
        self.weights_by_name.close()
