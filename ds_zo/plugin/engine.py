"""`PluginEngine`: DeepSpeed's engine whose update is computed by one of our backends.

[Note: collected engines] Python's garbage collector destroys an engine that has no more references, in any thread that
allocates. Destroying an engine waits for threads of ours (Adam's, a checkpoint's). In such a thread it would wait for
itself, so a new thread destroys the engine. `super().__del__` runs in a copy of the context, for this reason: before
Python 3.12 the collector may run in the middle of `ContextVar.set`, during which the context must not change. Writing
the whole weights back to the module sets context variables (numpy's error state). A forked process, such as a data
loader's worker, has neither the engine's threads nor its device, and does not destroy the engine.
"""

from __future__ import annotations

import contextvars
import copy
import inspect
import os
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from typing import Any, Literal

import deepspeed.comm as dist
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.config import DeepSpeedConfig
from deepspeed.runtime.constants import ROUTE_TRAIN
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.torch_autocast import autocast_if_enabled
from deepspeed.runtime.utils import register_output_backward_hooks
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from deepspeed.utils import log_dist, logger
from deepspeed.utils.timer import ThroughputTimer
from torch import nn
from torch.utils.data.distributed import DistributedSampler
from torch.utils.hooks import RemovableHandle

from ds_zo import versions
from ds_zo.backends import Backend, StepOutcome
from ds_zo.backends.common.deferred_scalar import DeferredScalar
from ds_zo.backends.common.plain_copies import weakly
from ds_zo.checkpoint.files import hash_json
from ds_zo.checkpoint.writer import BackgroundWriter
from ds_zo.config import Resolved
from ds_zo.config.agreement import check_agreement, shared_settings
from ds_zo.config.schedulers import scheduler_warning
from ds_zo.logs import warn
from ds_zo.plugin import full_parameters
from ds_zo.plugin.checkpointing import CheckpointingEngine
from ds_zo.plugin.checks import check_optimizer
from ds_zo.plugin.gathered_parameters import refuse_to_train_inside, set_zero3_attributes
from ds_zo.plugin.rank_check import wait_for_all_ranks
from ds_zo.plugin.replaced_methods import refuse_resizing, replace_zero_grad
from ds_zo.plugin.startup import ModelFacts, log_start
from ds_zo.plugin.throughput import EventTimer
from ds_zo.records.environment import host_peak_gb
from ds_zo.streaming.interrupts import interrupts
from ds_zo.streaming.loading import read_all

ENGINE_SIGNATURE = inspect.signature(DeepSpeedEngine.__init__)
THREAD_PREFIX = "ds_zo"
"""The beginning of the name of every thread that this package starts."""
_live_engines: weakref.WeakSet[PluginEngine] = weakref.WeakSet()
"""Engines of ours that are made and not destroyed."""
_destroying_threads: list[threading.Thread] = []
"""Threads that destroy engines without references; see [Note: collected engines]."""


def has_live_engines() -> bool:
    return len(_live_engines) > 0


def destroy_engine_of(model: nn.Module | None) -> None:
    """Destroys the engine that has a parameter of `model`, before a new engine is made.

    Pending updates and hooks of the earlier engine would mix with those of the new one.
    """
    while _destroying_threads:
        _destroying_threads.pop().join()
    wanted = {id(p) for p in model.parameters()} if model is not None else set()
    for engine in list(_live_engines):
        if any(id(p) in wanted for p in engine.module.parameters()):
            log_dist("ds_zo: a new engine is made of this module, so its earlier engine is destroyed", ranks=[0])
            engine.destroy()


class PluginEngine(CheckpointingEngine):
    """DeepSpeed's engine that leaves forward, backward, the update and the placement of weights to a `Backend`.

    Accumulation, schedulers, monitors, timers and data loading stay DeepSpeed's. Because the backend places weights,
    DeepSpeed makes the engine as if the JSON had no `zero_optimization`, and wraps no optimizer.
    """

    resolved: Resolved
    backend: Backend
    _backend_class: type[Backend]
    _unmanaged_backward_count: int
    _outcome: StepOutcome | None
    """Outcome of the last step, until it is counted; None after that."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        bound = ENGINE_SIGNATURE.bind(self, *args, **kwargs).arguments
        model: nn.Module = bound["model"]
        wait_for_all_ranks(model)
        self._places_parameters = self._backend_class.places_parameters(self.resolved)
        _undo_zero_init(model, to_host=self._places_parameters)
        if not self._places_parameters:
            read_all(model)
        bound.pop("self")
        bound["config_class"] = _without_zero(bound["config_class"])
        bound["dont_change_device"] = bound.get("dont_change_device", False) or self._places_parameters
        self._window_loss: torch.Tensor | None = None
        """Sum of this accumulation window's scaled losses; None before its first backward, and without a monitor."""
        self._window_has_sums = False
        """Whether the backend has accumulated sums since the last step."""
        self._window_began: float | None = None
        """`time.perf_counter()` at the first forward of this accumulation window; None before it, and without a
        monitor."""
        self._background = BackgroundWriter()
        self._undo = ExitStack()
        """Removes what this engine has set on the module and the optimizer."""
        versions.add_engine_attributes(self)
        super().__init__(**bound)
        # DeepSpeed makes this scaler for fp16 autocast without ZeRO. It asserts on gradients, which our backends do not
        # produce.
        self.torch_autocast_z0_gradscaler = None
        self._check_ranks_agree()
        model_facts = ModelFacts.of(self.module)
        self.backend = self._backend_class(
            self.module,
            self.resolved,
            optimizer=self.optimizer,
            device=self.device,
            process_group=self.data_parallel_group,
        )
        self.backend.is_writer, self.backend.has_several_writers = self._writes, self.use_node_local_storage()
        self._undo.callback(full_parameters.attach(self.module))
        replaced = replace_zero_grad(self.optimizer, self.module, drop_sums=weakly(self.zero_grad))
        for stand_in in (*replaced, *refuse_resizing(self.module)):
            self._undo.callback(stand_in.remove)
        if self.resolved.zero_stage == 3:
            self._undo.callback(set_zero3_attributes(self.optimizer, self.module))
        log_start(self, model_facts)
        _live_engines.add(self)

    def _check_ranks_agree(self) -> None:
        """Compares a hash of the settings between ranks. Where hashes differ, compares the settings themselves, so
        that the error names the one that differs."""
        mine = shared_settings(
            self.resolved,
            param_groups=self.optimizer.param_groups,
            names={id(p): name for name, p in self.module.named_parameters()},
            scheduler={"type": self.scheduler_name(), "params": self.scheduler_params()},
        )
        if len(set(self._gather_from_ranks(hash_json(mine)))) > 1:
            check_agreement(self._gather_from_ranks(mine))

    # Methods that DeepSpeed calls while it makes the engine.

    @property
    def tput_timer(self) -> ThroughputTimer:
        return self._throughput

    @tput_timer.setter
    def tput_timer(self, timer: ThroughputTimer) -> None:
        """Replaces DeepSpeed's timer before DeepSpeed gives it to a data loader, which starts it with every batch."""
        self._throughput = EventTimer.instead_of(timer)

    def optimizer_name(self) -> str:
        return super().optimizer_name() or self.resolved.backend

    def _is_supported_optimizer(self, optimizer_name: str) -> bool:
        return True

    def _configure_basic_optimizer(self, model_parameters: list[Any]) -> torch.optim.Optimizer:
        return self._backend_class.make_optimizer(model_parameters, self.resolved)

    def _configure_optimizer(self, client_optimizer: Any, model_parameters: list[Any]) -> None:
        super()._configure_optimizer(client_optimizer, model_parameters)
        for group in self.optimizer.param_groups:
            group.setdefault("weight_decay", 0.0)
        check_optimizer(self.optimizer, self.module, self.resolved)
        if self.resolved.trains and self.resolved.params_at == "ds_zo.params" and self.client_lr_scheduler is None:
            lr = max(float(group["lr"]) for group in self.optimizer.param_groups)
            for text in scheduler_warning(self._config._param_dict, lr, at="the script's own"):
                warn(text)
        self._backend_class.prepare_optimizer(self.optimizer, self.resolved)

    def _do_optimizer_sanity_check(self, basic_optimizer: torch.optim.Optimizer) -> None:
        """Does nothing: DeepSpeed checks its ZeRO, fp16 and bf16 wrappers here, and this engine has none of them."""

    def _create_module_forward_pre_hook(self) -> RemovableHandle:
        """Registers no hook: a backend may call the module several times a step. `forward` starts the timers."""
        return RemovableHandle(OrderedDict())

    def _create_module_forward_post_hook(self) -> RemovableHandle:
        return RemovableHandle(OrderedDict())

    def _broadcast_model(self) -> None:
        # DeepSpeed's method accepts neither scalars nor transposed parameters.
        if not self._places_parameters and all(p.ndim and p.is_contiguous() for p in self.module.parameters()):
            super()._broadcast_model()
        elif self.dist_backend is not None and dist.get_world_size(self.seq_data_parallel_group) > 1:
            source = dist.get_global_rank(self.seq_data_parallel_group, 0)
            for parameter in self.module.parameters():
                if parameter.is_meta:
                    continue  # every rank reads its value from the same files
                # One at a time through the device: NCCL does not read host memory, and the device may be too small for
                # the whole model.
                on_device = parameter.data.to(self.device).contiguous()
                dist.broadcast(on_device, source, group=self.seq_data_parallel_group)
                parameter.data.copy_(on_device)

    def deepspeed_io(
        self, dataset: Any, batch_size: int | None = None, route: str = ROUTE_TRAIN, *args: Any, **kwargs: Any
    ) -> Any:
        """Gives ranks that train on one batch (ZO's `direction_parallel`) the same samples."""
        num_sharing = self.resolved.optimizer.ranks_per_batch
        if num_sharing > 1 and route == ROUTE_TRAIN and self.is_map_style_dataset(dataset) and len(args) < 2:
            num_replicas = max(1, self.dp_world_size // num_sharing)
            sampler: Any = DistributedSampler(dataset, num_replicas=num_replicas, rank=self.global_rank // num_sharing)
            kwargs["data_sampler"] = kwargs.get("data_sampler") or sampler
        return super().deepspeed_io(dataset, batch_size, route, *args, **kwargs)

    # A training step.

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        interrupts.release()
        if self.module.training and torch.is_grad_enabled():
            self._check_trains("a training forward")
            self._check_can_train()
        if self.monitor.enabled and self._window_began is None and self.module.training:
            self._window_began = time.perf_counter()
        replaced = self._forward_prologue(inputs, kwargs)
        if replaced is not None:
            inputs, kwargs = replaced
        modes = torch.is_grad_enabled(), torch.is_autocast_cache_enabled()
        try:
            # ZO would perturb the weights in eval mode too, if the module has never been in train mode.
            no_graph = nullcontext() if self.resolved.trains else torch.no_grad()
            with autocast_if_enabled(self), no_graph:
                outputs = self.backend.forward(*inputs, **kwargs)
        except BaseException:  # Ctrl-C inside a context manager's __exit__ would leave torch's modes as they are inside
            torch._C._set_grad_enabled(modes[0])
            torch.set_autocast_cache_enabled(modes[1])
            raise
        finally:
            self._forward_epilogue()
        if torch.is_grad_enabled():
            register_output_backward_hooks(outputs, preprocess_once_fn=self._check_bare_backward)
        return outputs

    def _check_bare_backward(self) -> None:
        """Refuses `loss.backward()` under accumulation and loss scaling: only `engine.backward` divides the loss by the
        window and multiplies it by the scale."""
        if self._running_engine_backward:
            return
        if self.backend.scales_loss:
            raise RuntimeError(
                "fp16 needs the loss scale of engine.backward(loss), got loss.backward(): call engine.backward(loss), "
                "or use bf16"
            )
        steps = self.gradient_accumulation_steps()
        if steps != 1:
            raise RuntimeError(
                "loss.backward() needs gradient_accumulation_steps 1, because it does not divide the loss by them, got "
                f"{steps}: call engine.backward(loss)"
            )

    def _check_trains(self, what: str) -> None:
        if not self.resolved.trains:
            raise RuntimeError(
                f"{what} needs an optimizer, got a JSON with a ds_zo section and without one: name a backend in "
                "optimizer.type, or in ds_zo.backend and pass an optimizer to deepspeed.initialize; to evaluate, call "
                "engine.eval() first (optimizer)"
            )

    def _check_can_train(self) -> None:
        refuse_to_train_inside(self.module)
        if self not in _live_engines:
            raise RuntimeError(
                "a destroyed engine cannot train, got one that was destroyed by engine.destroy(), by Accelerator's "
                "free_memory() or by a later engine of its module: train with the later engine, or make one by "
                "deepspeed.initialize, or by Accelerator.prepare after free_memory()"
            )

    def backward(self, loss: torch.Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True) -> torch.Tensor:
        self._check_trains("engine.backward")
        self._check_can_train()
        if not (isinstance(loss, torch.Tensor) and loss.numel() == 1 and loss.requires_grad):
            found = f"shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else type(loss).__name__
            raise ValueError(
                f"engine.backward needs one scalar loss with a graph, got {found}, requires_grad "
                f"{getattr(loss, 'requires_grad', None)}: reduce it to one number, call the engine in train mode and "
                "outside no_grad, and compute the loss from the one that the model returns, if it returns one"
            )
        scaled = loss / self.gradient_accumulation_steps() if scale_wrt_gas else loss
        self.backend.is_last_micro_batch = self.is_gradient_accumulation_boundary()
        interrupts.hold()  # `step` releases it: see [Note: whole steps]
        try:
            with self._inside_backward():
                self.backend.backward(scaled, retain_graph=retain_graph)
        except BaseException:
            interrupts.release()
            raise
        self._unmanaged_backward_count += not versions.manages_accumulation(self)
        if self.monitor.enabled:
            self._window_loss = scaled.detach().float() + (0.0 if self._window_loss is None else self._window_loss)
        self._window_has_sums = self.backend.accumulates
        return scaled

    @contextmanager
    def _inside_backward(self) -> Iterator[None]:
        timers = [*self.engine_timers.backward_timers, *self.engine_timers.backward_inner_timers]
        self._start_timers(timers)
        with self._running_engine_backward_lock:
            self._running_engine_backward_count += 1
            self._running_engine_backward = True
        try:
            yield
        finally:
            with self._running_engine_backward_lock:
                self._running_engine_backward_count -= 1
                self._running_engine_backward = self._running_engine_backward_count > 0
            self._stop_timers(timers)

    def allreduce_gradients(self, bucket_size: int = 0) -> None:
        """Does nothing: the backend averages its own sums over ranks, and these need not be gradients."""

    def clip_fp32_gradients(self) -> None:
        """Does nothing: the backend clips its own updates."""

    def zero_grad(self) -> None:
        """Drops the backend's sums of this accumulation window. `zero_grad` of the optimizer and of the module call
        it too."""
        if self._window_has_sums and self.gradient_accumulation_steps() > 1:
            logger.warning_once(
                "ds_zo: zero_grad() inside an accumulation window drops the micro-batches before it: remove the call, "
                "because engine.step() zeroes by itself at the end of the window"
            )
        self._window_has_sums = False
        if self.backend.accumulates:
            self._window_loss = None
        self.backend.zero_grad()

    def step(self, lr_kwargs: Mapping[str, Any] | None = None) -> None:
        with interrupts.deferred():
            interrupts.release()
            self._check_trains("engine.step")
            # First, because DeepSpeed then sets "not applied" for this call, which the last outcome must not overwrite.
            self._count_outcome()
            super().step(lr_kwargs)
            self._raise_background_error()

    def zo_step(
        self,
        batch: Mapping[str, Any] | Sequence[Any],
        objective: Callable[[Any, Any], Any] | None = None,
        *,
        minimise: bool = False,
        on_error: float | Literal["raise"] = "raise",
    ) -> torch.Tensor:
        """Makes one step of ZO: forward, `backward` and `step` in one call. Returns the mean score of the forward's
        passes on this rank, or their mean loss.

        `batch`: the model's keywords, or a tuple of its positional arguments. `objective(outputs, batch)` returns one
        number, or one for each sequence, which are averaged. ZO maximises it, or minimises it with `minimise`. It needs
        no gradient. It is called for every pass, inside which the outputs are valid. Without it, ZO minimises the loss
        that the model returns. `on_error`: if the objective raises or returns NaN, this number is the score; "raise":
        no step is made, and an error is raised.
        """
        self._check_trains("engine.zo_step")
        if not isinstance(batch, (Mapping, tuple, list)):
            raise TypeError(
                "engine.zo_step needs a batch that is a mapping of keywords or a tuple of arguments, got "
                f"{type(batch).__name__}: put it into a tuple"
            )
        args, kwargs = ((), dict(batch)) if isinstance(batch, Mapping) else (tuple(batch), {})
        with torch.enable_grad():
            with self.backend.scored_by(objective, minimise=minimise, on_error=on_error):
                loss: torch.Tensor = self(*args, **kwargs)
            self.backward(loss)
            self.step()
        return loss.detach() if objective is None or minimise else -loss.detach()

    @property
    def failed_scores(self) -> int:
        """Number of scores, on all ranks, for which `on_error` of `zo_step` has stood in this engine."""
        return self.backend.num_failed_scores

    def _take_model_step(self, lr_kwargs: Mapping[str, Any] | None) -> None:
        loss = self._window_loss  # taken first, because a backend's step may call `zero_grad` of the module
        outcome = self.backend.step()
        self._window_has_sums, self._window_loss = False, None
        self._global_grad_norm = outcome.grad_norm
        self._outcome = outcome
        if isinstance(outcome.applied, bool):
            self._count_outcome()
        # torch's schedulers warn unless optimizer.step() was called before them. The backend's step stands for it.
        self.optimizer._opt_called = True
        if outcome.advance_schedule and self.lr_scheduler is not None:
            self.lr_scheduler.step(**(lr_kwargs or {}))
        self.global_steps += 1
        num_samples_before = self.global_samples
        if versions.manages_accumulation(self):
            self.global_samples += self.train_batch_size()
        else:
            micro_batch = self.train_batch_size() // self.gradient_accumulation_steps()
            self.global_samples += micro_batch * self._unmanaged_backward_count
            self._unmanaged_backward_count = 0
        if self.steps_per_print() and self.global_steps % self.steps_per_print() == 0:
            self._report_progress(self.global_steps)
        self._write_events(loss, self.global_samples - num_samples_before)

    def _write_events(self, loss: torch.Tensor | None, num_samples: int) -> None:
        """Writes the window's mean loss, its speed and memory peaks to the monitors. `loss`: None if this rank has
        none. DeepSpeed's own `step` writes the learning rate."""
        began, self._window_began = self._window_began, None
        if not self.monitor.enabled:
            return
        # A rank without a loss takes part too: its backward may have raised, and the other ranks would wait for it.
        total = torch.zeros(2, device=self.device)
        """The sum of the ranks' losses, and the number of ranks that have one."""
        if loss is not None:
            total[0], total[1] = loss, 1.0
        if self.dp_world_size > 1:
            dist.all_reduce(total, group=self.data_parallel_group)
        if self.global_rank == 0:
            sum_of_losses, num_losses = total.tolist()  # waits for the step, before the clock is read
            if not num_losses:
                return
            values = {"train_loss": sum_of_losses / num_losses}
            if began is not None:
                values["samples_per_s"] = num_samples / (time.perf_counter() - began)
            values["peak_device_gb"] = get_accelerator().max_memory_allocated() / 1e9
            values["peak_host_gb"] = host_peak_gb()
            events = [(f"Train/Samples/{name}", value, self.global_samples) for name, value in values.items()]
            self.monitor.write_events(events)

    def _count_outcome(self) -> None:
        """Counts the last step if it was skipped. An outcome on the device is read at the next step, or when a caller
        asks for it. So a step does not wait for the device."""
        outcome, self._outcome = self._outcome, None
        if outcome is None:
            return
        applied = outcome.applied
        self._step_applied = bool(applied.get() if isinstance(applied, DeferredScalar) else applied)
        if not self._step_applied:
            self._skipped_steps += 1
            warn(f"step skipped, its loss or gradient was not finite ({self._skipped_steps} so far)")

    @property
    def skipped_steps(self) -> int:
        self._count_outcome()
        return self._skipped_steps

    @skipped_steps.setter
    def skipped_steps(self, value: int) -> None:
        self._outcome = None
        self._skipped_steps = value

    def was_step_applied(self) -> bool:
        self._count_outcome()
        return bool(self._step_applied)

    def get_global_grad_norm(self) -> float | None:
        if isinstance(self._global_grad_norm, DeferredScalar):
            self._global_grad_norm = self._global_grad_norm.get()
        return self._global_grad_norm

    def offload_states(self, *args: Any, **kwargs: Any) -> None:
        raise RuntimeError(
            "engine.offload_states and engine.reload_states need ZeRO's optimizer states, got backend "
            f"{self.resolved.backend}, which has none: to keep parameters on the host set "
            'zero_optimization.offload_param.device to "cpu"'
        )

    reload_states = offload_states

    def destroy(self) -> None:
        """Ends the engine. Waits for a checkpoint that is being written, and raises last if writing it failed."""
        _live_engines.discard(self)
        self._background.wait()
        backend = self.__dict__.get("backend")
        try:
            if backend is not None:
                backend.close()
        finally:
            self._undo.close()
            super().destroy()
            interrupts.release()
        self._background.raise_error()

    def __del__(self) -> None:
        """See [Note: collected engines]."""
        if self.__dict__.get("_process", os.getpid()) != os.getpid():
            return
        if not threading.current_thread().name.startswith(THREAD_PREFIX):
            contextvars.copy_context().run(super().__del__)
            return
        thread = threading.Thread(target=self._destroy_in_thread, name=f"{THREAD_PREFIX}-destroy", daemon=False)
        with suppress(RuntimeError):  # the interpreter is ending and starts no thread
            thread.start()
            _destroying_threads.append(thread)

    def _destroy_in_thread(self) -> None:
        device = self.__dict__.get("device")
        if device is not None and device.type == "cuda":
            torch.cuda.set_device(device)  # a new thread's current device is the first
        super().__del__()


def _without_zero(config_class: DeepSpeedConfig) -> DeepSpeedConfig:
    """A copy of the configuration with ZeRO off, which the engine's `zero_*` methods then report."""
    config_class = copy.copy(config_class)
    # Under a stage 3 JSON, Trainer and Accelerate save weights only if this setting of the engine is True.
    config_class.zero_config = DeepSpeedZeroConfig(stage3_gather_16bit_weights_on_model_save=True)
    config_class.zero_optimization_stage = 0
    config_class.zero_enabled = False
    return config_class


def _undo_zero_init(model: nn.Module, *, to_host: bool) -> None:
    """Gathers parameters that `deepspeed.zero.Init` has partitioned, one at a time, and makes them plain again.

    Under a stage 3 JSON, transformers makes every model in that context, before it knows which engine will train it.
    """
    partitioned: list[Any] = [parameter for parameter in model.parameters() if hasattr(parameter, "ds_id")]
    for parameter in partitioned:
        if parameter.ds_status is not ZeroParamStatus.AVAILABLE:
            parameter.all_gather()
        whole = parameter.data.cpu() if to_host else parameter.data
        for name, value in list(vars(parameter).items()):
            added = name.startswith("ds_") or name in ("is_external_param", "nvme_swapper")
            if added or getattr(value, "__qualname__", "").startswith("Init."):
                delattr(parameter, name)
        parameter.data = whole
