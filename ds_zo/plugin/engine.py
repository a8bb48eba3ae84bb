"""The one module that knows DeepSpeed's internals: it puts our engine where the JSON asks for one.

DeepSpeed has no registry of optimizers. `install` sets `DeepSpeedEngine.__new__`, which every route to an engine passes
(`deepspeed.initialize`, an early-bound copy of it, Accelerate, Trainer), and returns a `PluginEngine` when the JSON
names one of our backends. Python then calls `PluginEngine.__init__`. Deleting a `__new__` that was set on a class
breaks construction for good, so it stays and `uninstall` clears the flag it reads.

[Note: collected engines] An engine that is dropped is destroyed by Python's collector, in whatever thread happens to
allocate. Threads of ours are what the end of an engine waits for (Adam's, a checkpoint's), so in one of those it is
left to a new thread. It has a context of its own: leaving the module whole sets context variables (numpy's error
state), and before Python 3.12 the collector may come in the middle of `ContextVar.set`, whose context must not change.
A process that was forked meanwhile, a worker of a data loader say, leaves the engine alone: it has neither its threads
nor the device.
"""

from __future__ import annotations

import contextvars
import copy
import functools
import inspect
import logging
import os
import resource
import sys
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import deepspeed.comm as dist
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.config import DEEPSPEED_OPTIMIZERS, DeepSpeedConfig
from deepspeed.runtime.constants import ROUTE_TRAIN
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.tensor_parallel.init_utils import load_ds_config
from deepspeed.runtime.torch_autocast import autocast_if_enabled
from deepspeed.runtime.utils import register_output_backward_hooks
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from deepspeed.utils import log_dist, logger
from deepspeed.utils.timer import ThroughputTimer
from torch import nn
from torch.utils.data.distributed import DistributedSampler
from torch.utils.hooks import RemovableHandle

from ds_zo.backends import Backend, StepOutcome, backend_class
from ds_zo.backends.common.deferred_scalar import DeferredScalar
from ds_zo.backends.common.fixed_embeddings import FixedEmbeddings
from ds_zo.backends.common.interrupts import interrupts
from ds_zo.backends.common.weak_hooks import weakly
from ds_zo.checkpoint.files import SAFETENSORS_DTYPES, hash_json
from ds_zo.checkpoint.snapshot import persistent_buffers
from ds_zo.checkpoint.writer import Background
from ds_zo.config import ConfigError, Resolved, backend_of, resolve, with_section_on_top
from ds_zo.config.agreement import check_agreement, shared_settings
from ds_zo.config.errors import shown, suggestion
from ds_zo.config.registry import entries
from ds_zo.config.rules import LARGEST_ZO_LR, large_zo_lr, largest_zo_lr, scheduler_warning
from ds_zo.logs import show
from ds_zo.plugin import gathered_parameters, hf_trainer
from ds_zo.plugin.checkpointing import CheckpointingEngine, refuse_to_stock
from ds_zo.plugin.throughput import EventTimer
from ds_zo.plugin.zero_grad import ZeroGrads
from ds_zo.streaming.blocks import find_blocks
from ds_zo.streaming.loading import read_all

_stock_new = DeepSpeedEngine.__new__
_stock_config_init = DeepSpeedConfig.__init__
_stock_load_checkpoint = DeepSpeedEngine.load_checkpoint
_stock_signature = inspect.signature(DeepSpeedEngine.__init__)
_LR_KEYS = ("lr", "initial_lr", "max_lr")
"""Learning rates in a parameter group; torch's schedulers write the last two."""
_PEAKS = ("max_lrs", "org_lrs")
"""Attributes in which schedulers of DeepSpeed (and torch's CyclicLR) keep the rates that they climb to."""
_active = False
THREADS = "ds_zo"
"""What names of threads of ours begin with."""
_living: weakref.WeakSet[PluginEngine] = weakref.WeakSet()
"""Engines of ours that have not been destroyed."""
_ending: list[threading.Thread] = []
"""Those in which engines are being destroyed that were dropped."""


def install() -> None:
    """Makes our backends known to DeepSpeed. `import ds_zo` has done it; it undoes `uninstall`."""
    global _active
    _active = True
    if DeepSpeedEngine.__new__ is not _new:
        DeepSpeedEngine.__new__ = staticmethod(_new)
        DeepSpeedConfig.__init__ = _config_init
        DeepSpeedEngine.load_checkpoint = _load_checkpoint
        gathered_parameters.install()
        hf_trainer.install(lambda: _active)


def uninstall() -> None:
    """From now on every JSON gets DeepSpeed's own engine. Engines that exist keep working."""
    global _active
    _active = False


def _new(cls: type[DeepSpeedEngine], *args: Any, **kwargs: Any) -> DeepSpeedEngine:
    config = _ds_config(args, kwargs) if _active else None
    backend = backend_of(config) if config is not None else None
    if config is None or backend is None:
        if config is not None and config.get("ds_zo"):
            resolve(config)  # raises: the section would do nothing, and the run would not be the one that was meant
        if config is not None and _argument("optimizer", args, kwargs) is None:
            _check_optimizer_type(cls, config)
        model = _argument("model", args, kwargs)
        _let_go_of(model)
        if config is not None and model is not None:
            read_all(model)
        return _stock_new(cls) if _stock_new is object.__new__ else _stock_new(cls, *args, **kwargs)
    if not issubclass(PluginEngine, cls):
        raise ConfigError(
            f"backend {backend} replaces DeepSpeedEngine, and this model or JSON asks for {cls.__name__}: pass a plain "
            "nn.Module and leave hybrid_engine out",
            at="optimizer.type" if "optimizer" in config else "ds_zo.backend",
        )
    engine = object.__new__(PluginEngine)
    engine.__dict__["_process"] = os.getpid()
    # Here, not in __init__: a refused JSON leaves no half-made engine, and nothing has been moved or allocated yet.
    engine.__dict__["resolved"] = resolve(config, client_optimizer=_argument("optimizer", args, kwargs) is not None)
    engine.__dict__["_backend_class"] = backend_class(engine.resolved.backend)
    _check_dtype(engine.resolved)
    model = _argument("model", args, kwargs)
    _let_go_of(model)
    _check_whole(model)
    _check_savable(model)
    return engine


def _check_dtype(resolved: Resolved) -> None:
    """DeepSpeed refuses it too, after the model was moved, and without a remedy."""
    if resolved.dtype is torch.float16 and not get_accelerator().is_fp16_supported():
        raise ConfigError(
            f"fp16 needs FP16 instructions, which this machine's {get_accelerator().device_name()} does not have; "
            "use bf16.enabled, or neither for float32, or a GPU",
            at="fp16.enabled",
        )


def _check_optimizer_type(cls: type[DeepSpeedEngine], config: Mapping[str, Any]) -> None:
    """A name that DeepSpeed is about to refuse may be one of ours, misspelt: its own error does not list them."""
    block = config.get("optimizer")
    written = block.get("type") if isinstance(block, dict) else None
    if not isinstance(written, str) or any(cls._is_supported_optimizer(cls, n) for n in (written, written.lower())):
        return
    names = (*(entry.optimizer_type for entry in entries()), *DEEPSPEED_OPTIMIZERS)
    text = f"neither DeepSpeed, torch.optim nor ds_zo has this optimizer, got {shown(written)}; "
    raise ConfigError(text + suggestion(written, names), at="optimizer.type")


@functools.wraps(_stock_load_checkpoint)
def _load_checkpoint(self: DeepSpeedEngine, load_dir: str, tag: str | None = None, *args: Any, **kwargs: Any) -> Any:
    """DeepSpeed's own engine finds none of its files in a checkpoint of ours, and asserts without a word."""
    if _active and load_dir is not None and not isinstance(self, PluginEngine):
        refuse_to_stock(Path(load_dir), tag)
    return _stock_load_checkpoint(self, load_dir, tag, *args, **kwargs)


def _let_go_of(model: nn.Module | None) -> None:
    """A module has one engine: what an earlier one has pending, and its hooks, would mix with the new one's."""
    while _ending:
        _ending.pop().join()
    wanted = {id(p) for p in model.parameters()} if model is not None else set()
    for engine in list(_living):
        if any(id(p) in wanted for p in engine.module.parameters()):
            log_dist("ds_zo: another engine is made of this module, so its first one is destroyed", ranks=[0])
            engine.destroy()


def _config_init(self: DeepSpeedConfig, config: Any, *args: Any, **kwargs: Any) -> None:
    """DeepSpeed reads the JSON before it makes an engine, and refuses a `ds_zo` section inside `zero_optimization`.

    Where it refuses a JSON of ours for another reason, our error says why."""
    if _active and isinstance(config, (str, os.PathLike)):
        config = load_ds_config(os.fspath(config))
    if _active and isinstance(config, dict):
        config = with_section_on_top(config)
    try:
        _stock_config_init(self, config, *args, **kwargs)
    except Exception:
        if _active and isinstance(config, dict):
            try:
                if backend_of(config) is not None or isinstance(config.get("optimizer"), str):
                    resolve(config)
            except ConfigError as error:
                raise error from None
        raise


def _argument(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    return _stock_signature.bind_partial(None, *args, **kwargs).arguments.get(name)


def _ds_config(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any] | None:
    """The JSON an engine is being made from; None where `__new__` is called bare, as copying and unpickling do."""
    config = _argument("config", args, kwargs)
    if not isinstance(config, dict):
        config = getattr(_argument("config_class", args, kwargs), "_param_dict", None)
    return with_section_on_top(config) if isinstance(config, dict) else None


def _check_whole(model: nn.Module) -> None:
    for name, p in model.named_parameters():
        if getattr(p, "_ds_zo_left", False) and not p.numel():
            raise RuntimeError(
                f"an engine is made of whole weights, got {name} with none: each rank had a piece (LOMO at stage 3) in "
                "an engine that is destroyed. Save them before that and load them into a new model; with Trainer, make "
                "a new one for each train() and evaluate before it by eval_on_start=True"
            )
        if p.numel() > 1 and not any(p.stride()):
            raise RuntimeError(
                f"an engine is made of whole weights, got {name} without memory: an engine that was being made of this "
                "model failed when it had stored them in another form. Load the model again"
            )


def _check_savable(model: nn.Module) -> None:
    """Before hours of training that no checkpoint could hold."""
    for name, tensor in (*model.named_parameters(), *persistent_buffers(model)):
        if tensor.dtype not in SAFETENSORS_DTYPES or tensor.layout is not torch.strided:
            raise ValueError(
                f"a checkpoint holds dense tensors of the dtypes that safetensors has, got {name} of {tensor.dtype}, "
                f"{tensor.layout}: give it another dtype, or register it by register_buffer(persistent=False) ({name})"
            )


class PluginEngine(CheckpointingEngine):
    """DeepSpeed's engine with the update path handed to a `Backend`.

    Accumulation, schedulers, monitors, timers, data loading and checkpoint files stay DeepSpeed's. Placement is ours,
    so the engine is made as if the JSON had no `zero_optimization`, and no optimizer is wrapped.
    """

    resolved: Resolved
    backend: Backend
    _backend_class: type[Backend]
    _unmanaged_backward_count: int
    _outcome: StepOutcome | None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        bound = _stock_signature.bind(self, *args, **kwargs).arguments
        model: nn.Module = bound["model"]
        self._places_parameters = self._backend_class.places_parameters(self.resolved)
        _undo_zero_init(model, to_host=self._places_parameters)
        if not self._places_parameters:
            read_all(model)
        bound.pop("self")
        bound["config_class"] = _without_zero(bound["config_class"])
        bound["dont_change_device"] = bound.get("dont_change_device", False) or self._places_parameters
        self._window_loss: torch.Tensor | None = None
        self._window_has_sums = False
        """A backward pass of this accumulation window waits for the step."""
        self._window_began: float | None = None
        """When the first forward of this accumulation window began, while a monitor wants to know."""
        self._background = Background()
        super().__init__(**bound)
        # Made for fp16 autocast without ZeRO; it asserts on the gradients that our backends never produce.
        self.torch_autocast_z0_gradscaler = None
        self._check_ranks_agree()
        self.backend = self._backend_class(
            self.module,
            self.resolved,
            optimizer=self.optimizer,
            device=self.device,
            process_group=self.data_parallel_group,
        )
        self._zero_grads = ZeroGrads(self.optimizer, self.module, forget=weakly(self.zero_grad))
        self._fixed_embeddings = FixedEmbeddings(self.module)
        self._log_start()
        _living.add(self)

    def _check_ranks_agree(self) -> None:
        """Once, by a hash; where hashes differ, the settings say which one does."""
        mine = shared_settings(
            self.resolved,
            param_groups=self.optimizer.param_groups,
            scheduler={"type": self.scheduler_name(), "params": self.scheduler_params()},
        )
        if len(set(self._of_all_ranks(hash_json(mine)))) > 1:
            check_agreement(self._of_all_ranks(mine))

    # What DeepSpeed asks while it builds the engine.

    @property
    def tput_timer(self) -> ThroughputTimer:
        return self._throughput

    @tput_timer.setter
    def tput_timer(self, timer: ThroughputTimer) -> None:
        """Set before DeepSpeed makes a data loader, which starts it with every batch."""
        self._throughput = EventTimer.instead_of(timer)

    def optimizer_name(self) -> str:
        return super().optimizer_name() or self.resolved.backend

    def _is_supported_optimizer(self, optimizer_name: str) -> bool:
        return True

    def _configure_basic_optimizer(self, model_parameters: list[Any]) -> torch.optim.Optimizer:
        return self._backend_class.make_optimizer(model_parameters, self.resolved)

    def _configure_optimizer(self, client_optimizer: Any, model_parameters: list[Any]) -> None:
        super()._configure_optimizer(client_optimizer, model_parameters)
        for index, group in enumerate(self.optimizer.param_groups):
            group.setdefault("weight_decay", 0.0)
            if group.get("lr") is None:
                raise ConfigError(
                    f"every parameter group needs a learning rate, got {group.get('lr')!r}: give one to the optimizer "
                    "passed to deepspeed.initialize",
                    at=f"{type(self.optimizer).__name__}.param_groups[{index}]['lr']",
                )
        self._check_parameters()
        if self.resolved.params_at == "ds_zo.params" and self.client_lr_scheduler is None:
            lr = max(float(group["lr"]) for group in self.optimizer.param_groups)
            for text in scheduler_warning(self._config._param_dict, lr, at="the script's own"):
                log_dist(f"ds_zo: {text}", ranks=[0], level=logging.WARNING)
        self._backend_class.prepare_optimizer(self.optimizer, self.resolved)

    def _check_parameters(self) -> None:
        """An optimizer that was built of another model, or before parameters were replaced, would train in silence."""
        given = [p for group in self.optimizer.param_groups for p in group["params"]]
        own = {id(p) for p in self.module.parameters()}
        foreign = sum(id(p) not in own for p in given)
        where = f"{type(self.optimizer).__name__}.param_groups"
        remedy = "make the optimizer of model.parameters() after the model's last change (adapters, resized embeddings)"
        if given and foreign == len(given):
            raise ConfigError(f"an optimizer trains parameters of its model, got none of them; {remedy}", at=where)
        if foreign:
            text = f"ds_zo: {foreign} of {len(given)} parameters are not the model's and are not trained: {remedy}"
            log_dist(f"{text} ({where})", ranks=[0], level=logging.WARNING)
        if not any(p.requires_grad for p in given):
            text = "ds_zo: no parameter requires a gradient, so nothing is trained: call requires_grad_(True) on some"
            log_dist(f"{text} ({where})", ranks=[0], level=logging.WARNING)

    def _do_optimizer_sanity_check(self, basic_optimizer: torch.optim.Optimizer) -> None:
        """None: no ZeRO, fp16 or bf16 wrapper, none of which can hold what a backend updates."""

    def _create_module_forward_pre_hook(self) -> RemovableHandle:
        """Nothing on the module: a backend may call it several times a step, and `forward` keeps the timers instead."""
        return RemovableHandle(OrderedDict())

    def _create_module_forward_post_hook(self) -> RemovableHandle:
        return RemovableHandle(OrderedDict())

    def _broadcast_model(self) -> None:
        # DeepSpeed's takes neither scalars nor transposed parameters.
        if not self._places_parameters and all(p.ndim and p.is_contiguous() for p in self.module.parameters()):
            super()._broadcast_model()
        elif self.dist_backend is not None and dist.get_world_size(self.seq_data_parallel_group) > 1:
            source = dist.get_global_rank(self.seq_data_parallel_group, 0)
            for parameter in self.module.parameters():
                if parameter.is_meta:
                    continue  # every rank reads it from the same source
                # One at a time, through the device: NCCL does not read the host, and the whole model need not fit.
                on_device = parameter.data.to(self.device).contiguous()
                dist.broadcast(on_device, source, group=self.seq_data_parallel_group)
                parameter.data.copy_(on_device)

    def _log_start(self) -> None:
        config = self.resolved
        trainable = sum(p.numel() for p in self.module.parameters() if p.requires_grad)
        groups = self.optimizer.param_groups
        rates = {key: [group[key] for group in groups] for key in ("lr", "weight_decay")}  # a client's are its own
        lines = [
            f"ds_zo: backend {config.backend}, {trainable:,} trainable parameters in {len(groups)} group(s), model "
            f"dtype {config.dtype}, autocast {config.autocast or 'off'}, ZeRO stage {config.zero_stage}, streaming "
            f"{'on' if config.stream else 'off'}, device {self.device}",
            f"ds_zo: optimizer {config.optimizer.model_dump() | rates}"
            f"{' (lr as its scheduler starts)' if self.lr_scheduler is not None else ''}, ds_zo section "
            f"{config.section.model_dump(exclude={'params'})}",
            *self.backend.describe().splitlines(),
        ]
        show("\n".join(lines))
        if config.ignored:
            names = ", ".join(config.ignored)
            log_dist(f"ds_zo: backend {config.backend} ignores {names}", ranks=[0], level=logging.WARNING)
        if not config.entry.clips_gradients and config.gradient_clipping > 0:
            own = ": clip_projected_grad is ZO's own" if config.entry.zeroth_order else ""
            text = f"gradient_clipping {config.gradient_clipping:g} does not alter {config.entry.optimizer_type}{own}"
            log_dist(f"ds_zo: {text}", ranks=[0], level=logging.WARNING if config.clipping_explicit else logging.INFO)
        if config.stream and not find_blocks(self.module, config.section.stream.blocks):
            text = "ds_zo: offload_param streams nothing: the model has no list of like modules and stays on the device"
            remedy = "name its blocks in ds_zo.stream.blocks, or remove offload_param"
            log_dist(f"{text}; {remedy}", ranks=[0], level=logging.WARNING)
        peak = self._peak_lr()
        told = config.params_at == "optimizer.params" and config.optimizer.lr > LARGEST_ZO_LR  # by config.warnings
        if config.entry.zeroth_order and peak > largest_zo_lr(trainable) and not told:
            given = "optimizer.params.lr" if config.params_at == "optimizer.params" else "the script's own optimizer"
            text = large_zo_lr(peak, at=given if self.lr_scheduler is None else f"{given} and its scheduler")
            log_dist(f"ds_zo: {text}", ranks=[0], level=logging.WARNING)
        for warning in config.warnings:
            log_dist(f"ds_zo: {warning}", ranks=[0], level=logging.WARNING)

    def _peak_lr(self) -> float:
        """The largest learning rate that a schedule reaches, as far as it tells: most begin at a smaller one."""
        told = [group[key] for group in self.optimizer.param_groups for key in _LR_KEYS if key in group]
        told += [lr for name in _PEAKS for lr in getattr(self.lr_scheduler, name, ())]
        return max(map(float, told), default=0.0)

    def deepspeed_io(
        self, dataset: Any, batch_size: int | None = None, route: str = ROUTE_TRAIN, *args: Any, **kwargs: Any
    ) -> Any:
        """The engine's own loader deals ranks that share a batch (ZO's `direction_parallel`) the same."""
        sharing = getattr(self.resolved.optimizer, "direction_parallel", 1)
        if sharing > 1 and route == ROUTE_TRAIN and self.is_map_style_dataset(dataset) and len(args) < 2:
            num_replicas = max(1, self.dp_world_size // sharing)
            dealt: Any = DistributedSampler(dataset, num_replicas=num_replicas, rank=self.global_rank // sharing)
            kwargs["data_sampler"] = kwargs.get("data_sampler") or dealt
        return super().deepspeed_io(dataset, batch_size, route, *args, **kwargs)

    # A training step.

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        interrupts.release()
        if self.module.training and torch.is_grad_enabled():
            self._check_living()
        if self.monitor.enabled and self._window_began is None and self.module.training:
            self._window_began = time.perf_counter()
        replaced = self._forward_prologue(inputs, kwargs)
        if replaced is not None:
            inputs, kwargs = replaced
        modes = torch.is_grad_enabled(), torch.is_autocast_cache_enabled()
        try:
            with autocast_if_enabled(self):
                outputs = self.backend.forward(*inputs, **kwargs)
        except BaseException:  # Ctrl-C on the way out of a context leaves torch's modes as they are inside
            torch._C._set_grad_enabled(modes[0])
            torch.set_autocast_cache_enabled(modes[1])
            raise
        finally:
            self._forward_epilogue()
        if torch.is_grad_enabled():
            register_output_backward_hooks(outputs, preprocess_once_fn=self._check_bare_backward)
        return outputs

    def _check_bare_backward(self) -> None:
        """`loss.backward()` without the engine is right only where there is no accumulation to divide by."""
        steps = self.gradient_accumulation_steps()
        if not self._running_engine_backward and steps != 1:
            raise RuntimeError(
                f"loss.backward() needs gradient_accumulation_steps 1, since it does not divide by them, got {steps}: "
                "call engine.backward(loss)"
            )

    def _check_living(self) -> None:
        if self not in _living:
            raise RuntimeError(
                "an engine trains until it is destroyed, and this one was, by engine.destroy(), by Accelerator's "
                "free_memory() or by a later engine of its module: train with the later one, or make one by "
                "deepspeed.initialize, or by Accelerator.prepare after free_memory()"
            )

    def backward(self, loss: torch.Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True) -> torch.Tensor:
        self._check_living()
        if not (isinstance(loss, torch.Tensor) and loss.numel() == 1 and loss.requires_grad):
            found = f"shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else type(loss).__name__
            raise ValueError(
                f"engine.backward takes one scalar loss with a graph, got {found}, requires_grad "
                f"{getattr(loss, 'requires_grad', None)}: reduce it, call the engine in train mode, outside no_grad, "
                "and where the model returns a loss of its own, start from that one"
            )
        self._unmanaged_backward_count += not self.managed_gradient_accumulation()
        scaled = loss / self.gradient_accumulation_steps() if scale_wrt_gas else loss
        if self.monitor.enabled:
            self._window_loss = scaled.detach().float() + (0.0 if self._window_loss is None else self._window_loss)
        self.backend.is_last_micro_batch = self.is_gradient_accumulation_boundary()
        interrupts.hold()  # until it is counted: see [Note: whole steps]
        try:
            with self._inside_backward():
                self.backend.backward(scaled, retain_graph=retain_graph)
        except BaseException:
            interrupts.release()
            raise
        self._window_has_sums = True
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
        """A backend averages over ranks what it accumulates, which need not be a gradient."""

    def clip_fp32_gradients(self) -> None:
        """Clipping is the backend's: it alone knows what the norm of an update is."""

    def zero_grad(self) -> None:
        """Also called by `zero_grad` of the optimizer and of the module."""
        if self._window_has_sums and self.gradient_accumulation_steps() > 1 and self.backend.accumulates:
            logger.warning_once(
                "ds_zo: zero_grad() inside an accumulation window drops the micro-batches before it: engine.step() "
                "zeroes by itself at the window's end, so loops need not call it"
            )
        self._window_has_sums = False
        self.backend.zero_grad()

    def step(self, lr_kwargs: Mapping[str, Any] | None = None) -> None:
        with interrupts.deferred():
            interrupts.release()
            # Before DeepSpeed sets "not applied" for this call: the last boundary's outcome must not overwrite it.
            self._settle_outcome()
            super().step(lr_kwargs)
            self._surface_checkpoint_error()

    def _take_model_step(self, lr_kwargs: Mapping[str, Any] | None) -> None:
        outcome = self.backend.step()
        self._window_has_sums = False
        self._global_grad_norm = outcome.grad_norm
        self._outcome = outcome
        if isinstance(outcome.applied, bool):
            self._settle_outcome()
        # torch's schedulers, the engine's or the user's own, warn unless optimizer.step() came first: ours did.
        self.optimizer._opt_called = True
        if outcome.advance_schedule and self.lr_scheduler is not None:
            self.lr_scheduler.step(**(lr_kwargs or {}))
        self.global_steps += 1
        num_samples_before = self.global_samples
        if self.managed_gradient_accumulation():
            self.global_samples += self.train_batch_size()
        else:
            micro_batch = self.train_batch_size() // self.gradient_accumulation_steps()
            self.global_samples += micro_batch * self._unmanaged_backward_count
            self._unmanaged_backward_count = 0
        if self.steps_per_print() and self.global_steps % self.steps_per_print() == 0:
            self._report_progress(self.global_steps)
        self._write_events(self.global_samples - num_samples_before)

    def _write_events(self, num_samples: int) -> None:
        """The mean loss of the window, its speed, and memory; DeepSpeed's own `step` writes the learning rate."""
        loss, self._window_loss = self._window_loss, None
        began, self._window_began = self._window_began, None
        if loss is None:
            return
        if self.dp_world_size > 1:
            dist.all_reduce(loss, group=self.data_parallel_group)
        if self.global_rank == 0:
            values = {"train_loss": loss.item() / self.dp_world_size}  # waits for the step, so the clock is right
            if began is not None:
                values["samples_per_s"] = num_samples / (time.perf_counter() - began)
            values["peak_device_gb"] = get_accelerator().max_memory_allocated() / 1e9
            values["peak_host_gb"] = _peak_host_bytes() / 1e9
            events = [(f"Train/Samples/{name}", value, self.global_samples) for name, value in values.items()]
            self.monitor.write_events(events)

    def _settle_outcome(self) -> None:
        """Counts the last step if it was skipped. What is learnt on the device is read a step late, or when asked."""
        outcome, self._outcome = self._outcome, None
        if outcome is None:
            return
        applied = outcome.applied
        self._step_applied = bool(applied.get() if isinstance(applied, DeferredScalar) else applied)
        if not self._step_applied:
            self._skipped_steps += 1
            log_dist(
                f"ds_zo: step skipped, its loss or gradient was not finite ({self._skipped_steps} so far)",
                ranks=[0],
                level=logging.WARNING,
            )

    @property
    def skipped_steps(self) -> int:
        self._settle_outcome()
        return self._skipped_steps

    @skipped_steps.setter
    def skipped_steps(self, value: int) -> None:
        self._outcome = None
        self._skipped_steps = value

    def was_step_applied(self) -> bool:
        self._settle_outcome()
        return bool(self._step_applied)

    def get_global_grad_norm(self) -> float | None:
        if isinstance(self._global_grad_norm, DeferredScalar):
            self._global_grad_norm = self._global_grad_norm.get()
        return self._global_grad_norm

    def offload_states(self, *args: Any, **kwargs: Any) -> None:
        self._refuse_moving_states("offload_states")

    def reload_states(self, *args: Any, **kwargs: Any) -> None:
        self._refuse_moving_states("reload_states")

    def _refuse_moving_states(self, name: str) -> None:
        raise RuntimeError(
            f"engine.{name} moves ZeRO's optimizer states, and backend {self.resolved.backend} keeps none of those: "
            'to keep parameters on the host set zero_optimization.offload_param.device to "cpu"'
        )

    # Weights in and out by DeepSpeed's names; our checkpoints are in `checkpointing`.

    def module_state_dict(
        self,
        destination: dict[str, Any] | None = None,
        prefix: str = "",
        keep_vars: bool = False,
        exclude_frozen_parameters: bool = False,
    ) -> dict[str, Any]:
        state = self.backend.module_state_dict(destination=destination, prefix=prefix, keep_vars=keep_vars)
        if exclude_frozen_parameters:
            for name, parameter in self.module.named_parameters():
                if not parameter.requires_grad:
                    state.pop(prefix + name, None)
        return state

    def _zero3_consolidated_16bit_state_dict(self, exclude_frozen_parameters: bool = False) -> dict[str, Any] | None:
        """Accelerate and Trainer ask for it whenever the JSON says stage 3."""
        with self.backend.readable_on_rank_0():
            if dist.get_rank() != 0:
                return None
            state = self.module_state_dict(exclude_frozen_parameters=exclude_frozen_parameters)
        return {name: v.detach().cpu() if isinstance(v, torch.Tensor) else v for name, v in state.items()}

    def load_module_state_dict(
        self,
        checkpoint: Mapping[str, Any],
        strict: bool = True,
        custom_load_fn: Any = None,
        **zero3: Any,
    ) -> None:
        if custom_load_fn is None:
            self.backend.load_module_state_dict(checkpoint["module"], strict=strict)
        else:
            custom_load_fn(src=checkpoint["module"], dst=self.module)

    def _load_checkpoint(
        self,
        load_dir: str,
        tag: str,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: Any = None,
    ) -> tuple[str | None, dict[str, Any] | None]:
        # Asked for no optimizer states, DeepSpeed returns them unread: a client's own optimizer could not take the
        # keyword that it passes in bf16 and fp16.
        path, rest = super()._load_checkpoint(
            load_dir,
            tag,
            load_module_strict=load_module_strict,
            load_optimizer_states=False,
            load_lr_scheduler_states=load_lr_scheduler_states,
            load_module_only=load_module_only,
            custom_load_fn=custom_load_fn,
        )
        if path is None or rest is None:
            return path, rest
        if not load_module_only:
            log_dist(
                f"ds_zo: the checkpoint was written by another optimizer, not by {self.resolved.backend}: weights and "
                f"counters are loaded, the backend starts afresh ({path})",
                ranks=[0],
                level=logging.WARNING,
            )
        return path, rest

    def destroy(self) -> None:
        """Waits for a checkpoint that is being written; raises at the end if that failed."""
        _living.discard(self)
        self._background.wait()
        backend = self.__dict__.get("backend")
        try:
            if backend is not None:
                backend.close()
        finally:
            for name in ("_zero_grads", "_fixed_embeddings"):
                if name in self.__dict__:
                    self.__dict__[name].close()
            super().destroy()
            interrupts.release()
        self._background.raise_error()

    def __del__(self) -> None:
        """See [Note: collected engines]."""
        if self.__dict__.get("_process", os.getpid()) != os.getpid():
            return
        if not threading.current_thread().name.startswith(THREADS):
            contextvars.copy_context().run(super().__del__)
            return
        thread = threading.Thread(target=self._end_elsewhere, name=f"{THREADS}-end", daemon=False)
        with suppress(RuntimeError):  # the interpreter ends, and everything with it
            thread.start()
            _ending.append(thread)

    def _end_elsewhere(self) -> None:
        device = self.__dict__.get("device")
        if device is not None and device.type == "cuda":
            torch.cuda.set_device(device)  # a thread begins with the first
        super().__del__()


def _peak_host_bytes() -> int:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _without_zero(config_class: DeepSpeedConfig) -> DeepSpeedConfig:
    """The same configuration as if ZeRO were off, which every `zero_*` question of the engine then answers."""
    config_class = copy.copy(config_class)
    # Under a stage 3 JSON, Trainer and Accelerate save weights only from an engine that says it gathers them.
    config_class.zero_config = DeepSpeedZeroConfig(stage3_gather_16bit_weights_on_model_save=True)
    config_class.zero_optimization_stage = 0
    config_class.zero_enabled = False
    return config_class


def _undo_zero_init(model: nn.Module, *, to_host: bool) -> None:
    """Gives whole tensors back to parameters that `deepspeed.zero.Init` has partitioned, one at a time.

    Under a stage 3 JSON, transformers builds every model in that context, long before it is known who will train it.
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
