"""Adapter: the script's own optimizer trains a few parameters, such as LoRA's, over a frozen base that is streamed.

With `offload_param` the frozen parameters of blocks are in host memory, in the format of `ds_zo.stream.frozen_dtype`. A
block is on the device during its forward, and again in the backward pass, which recomputes it from its inputs ([Note:
recomputed blocks]). Trained parameters, their gradients and the optimizer's states stay on the device. Nothing is
copied back to the host. Without `offload_param` the whole model is on the device, and blocks are not recomputed.

On several ranks the gradients are averaged in `step`. At ZeRO stage 3 the ranks of a machine share one host copy of the
base ([Note: sharded blocks]).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ds_zo.backends.adapter.base import FrozenBase
from ds_zo.backends.adapter.streamed import StreamedBase
from ds_zo.backends.adapter.trained import (
    AdapterParameters,
    check_names,
    check_shapes_by_index,
    in_own_order,
    resident_ids,
)
from ds_zo.backends.common.backend import StepOutcome
from ds_zo.backends.common.caches import Caches
from ds_zo.backends.common.chunked_loss import CausalLosses
from ds_zo.backends.common.startup import StartupSummary
from ds_zo.backends.recompute.backend import RecomputedBackend
from ds_zo.backends.recompute.model_blocks import ModelBlocks, OneBackward
from ds_zo.checkpoint.errors import CheckpointError, reading_content
from ds_zo.checkpoint.reader import Saved
from ds_zo.checkpoint.snapshot import Snapshot
from ds_zo.config import AdamWParams, Resolved
from ds_zo.logs import warn
from ds_zo.optim import LossScaler
from ds_zo.streaming.allocator import warn_of_fragmentation
from ds_zo.streaming.node import use_world_timeout


class AdapterBackend(RecomputedBackend):
    """Calls `step()` of a real optimizer. See this module's docstring."""

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
        _refuse_foreign_quantisation(module)
        half = torch.float16 in (config.dtype, config.autocast)
        self._scaler = LossScaler(config.loss_scale) if half else None
        self.scales_loss = half
        if self._scaler is not None:
            self._scaler.publish(optimizer, overflow=False)
        self._num_applied = 0
        """Steps that this engine has not skipped."""
        self._caches = Caches(module)
        self._causal_losses = CausalLosses(module, blocks=config.section.stream.blocks)
        chosen = resident_ids(module, self.param_groups)
        self.blocks: ModelBlocks = ModelBlocks(module, device=device)
        if self.places_parameters(config):
            self.blocks = StreamedBase(
                module, config, param_groups=self.param_groups, device=device, process_group=process_group
            )
        self._passes = OneBackward(self.blocks)
        self.blocks.wrap(self._passes)
        self._trained = AdapterParameters(module, optimizer, chosen=chosen, process_group=process_group)
        self.access_weights(low_bits=self._trained)
        self._frozen_base = FrozenBase(module, self.blocks)
        if dist.is_initialized() and dist.get_world_size(process_group) > 1:
            use_world_timeout(process_group, device)
        self._warn()

    @classmethod
    def make_optimizer(cls, params: Any, config: Resolved) -> torch.optim.Optimizer:
        """AdamW of the parameters that require gradients."""
        settings = config.optimizer
        assert isinstance(settings, AdamWParams)
        given = list(params)
        groups = given if given and isinstance(given[0], dict) else [{"params": given}]
        chosen = [{**group, "params": [p for p in group["params"] if p.requires_grad]} for group in groups]
        is_cuda = torch.cuda.is_available()
        return torch.optim.AdamW(
            chosen,
            lr=settings.lr,
            betas=settings.betas,
            eps=settings.eps,
            weight_decay=settings.weight_decay,
            fused=True if is_cuda else None,
        )

    def _warn(self) -> None:
        if self.blocks.is_streamed and not self.blocks.units and self.config.trains:
            warn(
                "no block has a frozen parameter, so no block is streamed and the whole model is on the device: freeze "
                "the base model (PEFT does), or remove zero_optimization.offload_param"
            )
        if not dist.is_initialized() or dist.get_rank() == 0:
            warn_of_fragmentation(self.device, budget_gb=self.config.section.stream.device_memory_gb)

    # Forward and backward

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the module. A backward may follow also in evaluation mode, as for a model of `from_pretrained`."""
        with self.plain_parameters(), self.blocks.forward():
            if not torch.is_grad_enabled():
                return self.module(*args, **kwargs)
            with (
                self._causal_losses.in_chunks(kwargs),
                self._caches.off() if self.module.training or self.blocks.is_streamed else nullcontext(),
            ):
                return self.module(*args, **kwargs)

    def backward(self, loss: torch.Tensor, *, retain_graph: bool = False) -> None:
        self._trained.check_groups()
        self._trained.share_gradients()
        scaled = loss if self._scaler is None else loss.float() * self._scaler.scale
        with self.plain_parameters(), self._passes.run(retain_graph=retain_graph):
            scaled.backward(retain_graph=retain_graph)
        self._trained.share_gradients()

    # Step

    def step(self) -> StepOutcome:
        """Averages, unscales and clips the gradients, and calls `step()` of the optimizer. A gradient that is not
        finite skips the step."""
        self._trained.share_gradients()
        self._trained.adopt_changes()
        self._trained.average_gradients()
        scale = 1.0 if self._scaler is None else self._scaler.scale
        norm = self._trained.unscale_and_clip(scale=scale, clipping=self.config.gradient_clipping)
        finite = math.isfinite(norm)
        if finite:
            self.optimizer.step()
            self._trained.round_masters()
        self._trained.drop_gradients()
        overflow = self._scaler is not None and not finite
        if self._scaler is not None:
            self._scaler.update(overflow=overflow)
            self._scaler.publish(self.optimizer, overflow=overflow)
        self._num_applied += finite
        self.blocks.settle_tiles()
        # The first step makes the optimizer's states, which only later backward passes have beside them.
        if self._num_applied > 1:
            self.blocks.fill_device()
        return StepOutcome(applied=finite, grad_norm=norm, advance_schedule=not overflow)

    def zero_grad(self) -> None:
        super().zero_grad()
        self._trained.drop_gradients()

    # State

    def state_dict(self) -> dict[str, Any]:
        """The optimizer's own state is part of the engine's."""
        scaler = None if self._scaler is None else self._scaler.state_dict()
        return {"masters": self._trained.masters(), "scaler": scaler}

    def check_state(self, state: Mapping[str, Any]) -> None:
        self._trained.check_masters(state["masters"])
        if state["scaler"] is not None:
            [float(state["scaler"][name]) for name in ("scale", "num_clean", "overflows_left")]

    def load_state_dict(self, state: Mapping[str, Any], *, load_optimizer_states: bool = True) -> None:
        self._trained.load_masters(state["masters"] if load_optimizer_states else {})
        if not load_optimizer_states:
            self.optimizer.state.clear()
        if self._scaler is not None:
            self._scaler.restart()
            if load_optimizer_states and state["scaler"] is not None:
                self._scaler.load_state_dict(state["scaler"])
            self._scaler.publish(self.optimizer, overflow=False)

    def rank_state(self) -> dict[str, Any]:
        return self._trained.gradients()

    def check_rank_state(self, state: Mapping[str, Any]) -> None:
        self._trained.check_gradients(state)

    def load_rank_state(self, state: Mapping[str, Any]) -> None:
        self._trained.load_gradients(state)

    # Checkpoints and weights

    def snapshot(self, *, hold: bool, omit_frozen: bool = False) -> Snapshot:
        """A snapshot without frozen parameters. It has a description of the base, the optimizer's class and the names
        of its parameters, which a resumed run must have too."""
        found = super().snapshot(hold=hold, omit_frozen=True)
        own = {"optimizer": type(self.optimizer).__name__, "parameters": self._trained.names}
        state = {**found.state(), "base": self._frozen_base.description(), **own}
        return Snapshot(found.weights_files, lambda: state)

    def restore(self, saved: Saved, *, resume: bool, strict: bool = True) -> None:
        with reading_content(saved.folder, "its state"):
            optimizer = saved.engine_state["common"]["optimizer"]
            names: list[list[str]] | None = saved.backend_state.get("parameters")
            base, kind = saved.backend_state["base"], type(self.optimizer).__name__
            saved_kind = saved.backend_state.get("optimizer", kind)
            if resume and names is None:
                check_shapes_by_index(optimizer, self.optimizer)
        if resume and names is not None:
            check_names(names, self._trained.names)
            with reading_content(saved.folder, "its state"):
                optimizer = in_own_order(optimizer, self.optimizer, there=names, here=self._trained.names)
        if resume and saved_kind != kind:
            raise CheckpointError(
                f"a resumed optimizer is of the class of the saved one, {saved_kind}, got {kind}: make the same, or "
                "call load_checkpoint(load_optimizer_states=False)"
            )
        with reading_content(saved.folder, "its state"):
            self._frozen_base.check(base, folder=saved.folder)
        super().restore(saved, resume=resume, strict=strict)
        if resume and names is None:
            warn(
                f"checkpoint {saved.folder} has no names of the optimizer's parameters: states are given to parameters "
                "by their order in the optimizer, which must be that of the saved run"
            )
        if resume:
            self.optimizer.load_state_dict(optimizer)

    # Description

    def _describe_step(self) -> str:
        clipping = self.config.gradient_clipping
        clips = f"gradients clipped to norm {clipping:g}" if clipping > 0 else "gradients not clipped"
        scaling = f", loss scale {self._scaler.scale:g}" if self._scaler is not None else ""
        return f"{len(self._trained)} trained tensors by {type(self.optimizer).__name__}, {clips}{scaling}"

    def describe(self) -> str:
        return "\n".join([*self.blocks.describe(), f"ds_zo: {self._describe_step()}"])

    def startup_summary(self) -> StartupSummary:
        base = self.blocks.startup_summary()
        device_bytes = {**base.device_bytes}
        if self._trained.nbytes:
            device_bytes["float32 masters"] = self._trained.nbytes
        added = "activations, gradients and optimizer states"
        return replace(base, settings=self._describe_step(), added_by_steps=added, device_bytes=device_bytes)

    def close(self) -> None:
        self._trained.return_to_optimizer()
        self.blocks.close()
        self.weights_by_name.close()


def _refuse_foreign_quantisation(module: nn.Module) -> None:
    """Raises for weights that bitsandbytes has quantised in memory, which it cannot use from another place."""
    for name, p in module.named_parameters():
        if hasattr(p, "quant_state") or hasattr(p, "SCB"):  # in 4 or 8 bits
            raise ValueError(
                f"weights must not be quantised when deepspeed.initialize runs, got {name} quantised by bitsandbytes: "
                'load the model with ds_zo.load_pretrained(..., frozen_dtype="nf4"), or without quantization_config'
            )
