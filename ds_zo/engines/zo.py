"""ZO: zeroth-order training. Two forward passes a direction, no backward; the update is a coefficient times noise that anyone can make again.

A training forward runs `2 * num_directions` passes in lockstep ([Note: twin forward]) over weights that are replayed, perturbed and, in turn, folded as they come by
([Note: replay instead of write-back], [Note: clean weights stay clean]). `backward` adds to the projected gradient ([Note: the chain rule does the bookkeeping]); `step`
logs the update, and the next visit of each unit applies it. Anything else that runs the module (evaluation, `generate`, saving) sees the weights of the current step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from deepspeed.utils import logger
from torch import nn
from torch.overrides import TorchFunctionMode

from ds_zo import ops
from ds_zo.config import Resolved
from ds_zo.engines.base import Backend, StepOutcome
from ds_zo.engines.module_state import ModuleState
from ds_zo.engines.outputs import floats_of, loss_of, tie, with_floats, with_loss
from ds_zo.engines.replay_log import CAPACITY, ReplayLog
from ds_zo.engines.twins import CannotInterleave, Lockstep
from ds_zo.engines.visits import Noise, Visits
from ds_zo.streaming.host_store import HostStore
from ds_zo.streaming.loading import reader_of
from ds_zo.streaming.placement import plan_units, settle, spread
from ds_zo.streaming.runtime import Runtime
from ds_zo.streaming.units import Unit

_WIRE = {
    "auto": None,
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp8": torch.float8_e4m3fn,
}
_STREAMED_INTERVAL = 8
"""`writeback_interval` where the user left it out and blocks stream: most of the downloads gone, few draws more."""


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
        stream = config.section.stream
        self._num_passes = 2 * self.settings.num_directions
        self.placement = plan_units(
            module, self.param_groups, block_paths=stream.blocks, wire=_WIRE[stream.wire_dtype or "auto"], split=stream.master == "split"
        )
        blocks = self.placement.blocks
        num_resident = len(blocks) if not config.stream else min(len(blocks), stream.resident_blocks or 0)
        resident = spread(len(blocks), num_resident)
        self.interval = _interval(stream.writeback_interval, fused=stream.fuse_update, streams=num_resident < len(blocks))
        self.store = HostStore(device, pin=config.pin_memory)
        settle(
            self.placement,
            self.store,
            device,
            resident=lambda unit: not unit.is_block or blocks.index(unit) in resident,
            read=reader_of(module),
        )
        _move_buffers(module, device)
        num_slots = stream.device_slots if stream.overlap else 1
        self.runtime = Runtime(
            blocks,
            device,
            num_slots=num_slots,
            num_low_slots=1 if self.interval > num_slots else num_slots,
            overlap=stream.overlap,
            reuse_buffers=stream.reuse_buffers,
        )
        self.log = ReplayLog(num_groups=len(self.param_groups), num_directions=self.settings.num_directions, device=device)
        self.visits = Visits(
            self.placement,
            self.runtime,
            self.log,
            noise=Noise(self.settings.seed, self.settings.zo_eps, self.settings.distribution, config.section.rounding),
            interval=self.interval,
            device=device,
        )
        self._configs = list({id(c): c for m in module.modules() if (c := getattr(m, "config", None)) is not None}.values())
        self._fuse_update = stream.fuse_update
        self._lockstep = Lockstep(device)
        self._lockstep.on_switch = self._bind_ambient
        self._interleave = True
        self._checked = False
        """The first training forward is run both ways, and watched for parameters used outside their unit."""
        self._training = False
        self._entered: set[int] = set()
        self._grad_modes: list[bool] = []
        self._ambient_copies: dict[int, list[torch.Tensor]] = {}
        self._anchor = torch.zeros((), device=device, requires_grad=True)
        self._projected = torch.zeros(self.settings.num_directions, device=device)
        self._tied_outputs_logged = False
        self._signature = self._groups_and_flags()
        self._handles = self._install_hooks()
        self.state = ModuleState(self.placement, self.visits, module)

    # The training forward

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if not (self.module.training and torch.is_grad_enabled()):
            return self.module(*args, **kwargs)
        if torch.is_inference_mode_enabled():
            raise RuntimeError("a ZO training forward can't run in torch.inference_mode(): use torch.no_grad() around evaluation only")
        self._check_model()
        calls = [partial(self._one_pass, i, args, kwargs) for i in range(self._num_passes)]
        with self._step_settings():
            if not self._checked:
                results = self._first_forward(calls)
                self._checked = True
            else:
                results = self._run(calls)
        output, passes = results[0][0], [tensors for _, tensors in results]
        tied = tie(passes, anchor=self._anchor, accumulate=self._accumulate)
        if loss_of(output) is not None:
            return with_loss(output, tied[0])
        if not self._tied_outputs_logged:
            self._tied_outputs_logged = True
            logger.info(
                f"ds_zo: the model returns no loss, so ZO differentiates its {len(tied)} floating outputs: exact for a loss that is linear "
                "in them, to first order in zo_eps otherwise; pass labels to the model to have its own loss measured"
            )
        return with_floats(output, tied)

    def _one_pass(self, index: int, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, list[torch.Tensor]]:
        """One pass's output (the first's only: the others would keep logits alive) and the tensors to difference."""
        with torch.no_grad():
            output = self.module(*args, **kwargs)
        loss = loss_of(output)
        # Cloned: callers multiply losses in place.
        kept = [loss.detach().clone()] if loss is not None else [t.detach().clone() for t in floats_of(output)]
        return (output if index == 0 else None), kept

    def _run(self, calls: Sequence[Callable[[], Any]]) -> list[Any]:
        """All passes, in lockstep where the forward allows it."""
        if self._interleave:
            try:
                with self._training_pass():
                    return self._lockstep.together(calls, self._ready)
            except CannotInterleave as reason:
                self._interleave = False
                logger.warning(f"ds_zo: this forward runs one pass after the other from now on (each uploads every block): {reason}")
        return self._one_by_one(calls)

    def _one_by_one(self, calls: Sequence[Callable[[], Any]]) -> list[Any]:
        def in_a_pass_of_its_own(call: Callable[[], Any]) -> Any:
            with self._training_pass():
                return call()

        return self._lockstep.one_by_one([partial(in_a_pass_of_its_own, call) for call in calls])

    def _first_forward(self, calls: Sequence[Callable[[], Any]]) -> list[Any]:
        """State that a model keeps on its modules would mix between passes in lockstep, and a weight used behind its module's back would
        miss its perturbation. Both are looked for once."""
        randomness = self._lockstep.snapshot()
        watch = _Watch(self.placement.units, self._entered)
        try:
            with watch:
                results = self._run(calls)
        except Exception:
            watch.raise_for_blocks()
            raise
        watch.raise_for_blocks()
        if watch.edges:
            self._make_ambient(watch.edges)
            self._lockstep.set_snapshot(randomness)
            results = self._run(calls)
        if self._interleave and self.placement.blocks:
            self._lockstep.set_snapshot(randomness)
            apart = self._one_by_one(calls)
            if not _agree(results, apart):
                self._interleave = False
                logger.warning(
                    "ds_zo: passes in lockstep give other losses than one after the other, so the model keeps state on its modules between "
                    "blocks; it runs one pass after the other from now on (each uploads every block)"
                )
                return apart
        return results

    @contextmanager
    def _training_pass(self) -> Iterator[None]:
        self._training = True
        self.visits.begin()
        self._fill_ambient()
        try:
            yield
        finally:
            self._training = False
            self.visits.end()
            for unit in self.placement.units:
                if id(unit) in self._entered or unit in self.placement.ambient:
                    unit.bind_home()
            self._entered.clear()

    @contextmanager
    def _step_settings(self) -> Iterator[None]:
        """No KV cache (two passes would keep two), and the arithmetic that `compute_dtype` asks for."""
        with ExitStack() as stack:
            for config in self._configs:
                if getattr(config, "use_cache", False) is True:
                    config.use_cache = False
                    stack.callback(setattr, config, "use_cache", True)
            compute = self.settings.compute_dtype
            if compute == "tf32" and self.device.type == "cuda":
                stack.callback(setattr, torch.backends.cuda.matmul, "allow_tf32", torch.backends.cuda.matmul.allow_tf32)
                torch.backends.cuda.matmul.allow_tf32 = True
            if compute in ("bf16", "fp16") and self.config.dtype is torch.float32:
                dtype = torch.bfloat16 if compute == "bf16" else torch.float16
                stack.enter_context(torch.autocast(self.device.type, dtype=dtype, cache_enabled=False))
            yield

    # Hooks

    def _install_hooks(self) -> list[Any]:
        handles = []
        for unit in self.placement.blocks:
            handles.append(unit.module.register_forward_pre_hook(partial(self._enter_block, unit), prepend=True))
            handles.append(unit.module.register_forward_hook(partial(self._leave_block, unit), always_call=True))
        for module in self.placement.entered_by:
            handles.append(module.register_forward_pre_hook(self._enter_edge, prepend=True))
            handles.append(module.register_forward_hook(self._leave_edge, always_call=True))
        for unit in self.placement.ambient:
            handles += self._ambient_hooks(unit)
        return handles

    def _ambient_hooks(self, unit: Unit) -> list[Any]:
        return [
            unit.module.register_forward_pre_hook(partial(self._enter_ambient, unit), prepend=True),
            unit.module.register_forward_hook(partial(self._leave_ambient, unit), always_call=True),
        ]

    def _enter_block(self, unit: Unit, module: nn.Module, args: Any) -> None:
        """Keeps: while a block runs, its parameters are the working copies of the pass that runs it."""
        if not self._training:
            self._enter_clean(unit, self.visits.scratch)
        elif self._lockstep.inside:
            self._lockstep.pause(unit)
        else:
            self._make_ready(unit, self._lockstep.current, last=True)
        self._entered.add(id(unit))

    def _leave_block(self, unit: Unit, module: nn.Module, args: Any, output: Any) -> None:
        if not self._training:
            self._leave_clean(unit)
        elif self._lockstep.inside and self._lockstep.current < self._num_passes - 1:
            return  # the other passes have still to run it
        else:
            self.visits.leave_block(unit)
        self._entered.discard(id(unit))

    def _ready(self, unit: Unit, index: int) -> None:
        self._make_ready(unit, index, last=index == self._num_passes - 1)

    def _make_ready(self, unit: Unit, index: int, *, last: bool) -> None:
        with torch.no_grad():
            views = self.visits.perturb_block(unit, index=index, last=last)
            if views is not None:
                unit.bind(views)

    def _enter_edge(self, module: nn.Module, args: Any) -> None:
        """Keeps: while a module outside the blocks runs, its own parameters are working copies."""
        scratch = self.visits.scratch[self.placement.nested_at.get(id(module), 0) :]
        for unit in self.placement.entered_by.get(module, ()):
            if self._training:
                with torch.no_grad():
                    unit.bind(self.visits.perturb_edge(unit, index=self._lockstep.current, scratch=scratch))
            else:
                self._enter_clean(unit, scratch)
            scratch = scratch[unit.scratch_nbytes :]
            self._entered.add(id(unit))

    def _leave_edge(self, module: nn.Module, args: Any, output: Any) -> None:
        for unit in reversed(self.placement.entered_by.get(module, [])):
            if self._training:
                unit.bind_home()
            else:
                self._leave_clean(unit)
            self._entered.discard(id(unit))

    def _enter_clean(self, unit: Unit, scratch: torch.Tensor) -> None:
        """A visit outside training. Without gradients: the working copy is gone when a backward would need it."""
        self._grad_modes.append(torch.is_grad_enabled())
        with torch.inference_mode(False), torch.no_grad():
            unit.bind(self.visits.clean(unit, scratch=scratch))
        torch.set_grad_enabled(False)

    def _leave_clean(self, unit: Unit) -> None:
        with torch.inference_mode(False), torch.no_grad():
            self.visits.leave_clean(unit)
        if self._grad_modes:
            torch.set_grad_enabled(self._grad_modes.pop())

    # Parameters that are alive through a whole forward

    def _fill_ambient(self) -> None:
        for unit in self.placement.ambient:
            if id(unit) not in self._ambient_copies:
                self._ambient_copies[id(unit)] = [
                    torch.empty(unit.scratch_nbytes, dtype=torch.uint8, device=self.device) for _ in range(self._num_passes)
                ]
            with torch.no_grad():
                for index, copy in enumerate(self._ambient_copies[id(unit)]):
                    self.visits.perturb_edge(unit, index=index, scratch=copy)

    def _bind_ambient(self, index: int) -> None:
        if not self._training:
            return
        for unit in self.placement.ambient:
            unit.bind(unit.views(unit.planes(unit.home), unit.outs(self._ambient_copies[id(unit)][index])))
            self._entered.add(id(unit))

    def _enter_ambient(self, unit: Unit, module: nn.Module, args: Any) -> None:
        if self._training:
            if not self._lockstep.inside:
                self._bind_ambient(self._lockstep.current)
            return
        self._enter_clean(unit, torch.empty(unit.scratch_nbytes, dtype=torch.uint8, device=self.device))
        self._entered.add(id(unit))

    def _leave_ambient(self, unit: Unit, module: nn.Module, args: Any, output: Any) -> None:
        if not self._training:
            self._leave_clean(unit)
            self._entered.discard(id(unit))

    def _make_ambient(self, units: Sequence[Unit]) -> None:
        """Their weights are used outside their own module's forward (a tied head by `F.linear`, say)."""
        for unit in units:
            self.placement.edges.remove(unit)
            self.placement.ambient.append(unit)
            for module, entering in list(self.placement.entered_by.items()):
                self.placement.entered_by[module] = [u for u in entering if u is not unit]
            unit.module = self.module  # from here on it is entered with the whole model
            self._handles += self._ambient_hooks(unit)
        logger.info(
            f"ds_zo: {', '.join(u.name for u in units)} is used outside its own module's forward: kept as {self._num_passes} copies during a step"
        )

    # backward and step

    def _accumulate(self, differences: torch.Tensor) -> None:
        self._projected += differences / (2 * self.settings.zo_eps)

    def zero_grad(self) -> None:
        self._projected.zero_()

    def step(self) -> StepOutcome:
        g = self._projected
        if dist.is_initialized() and dist.get_world_size(self.process_group) > 1:
            dist.all_reduce(g, group=self.process_group)
            g /= dist.get_world_size(self.process_group)
        if self.settings.clip_projected_grad is not None:
            g.clamp_(-self.settings.clip_projected_grad, self.settings.clip_projected_grad)
        norm = g.norm()
        finite = self.log.append(
            g,
            lrs=[float(group["lr"]) for group in self.param_groups],
            weight_decays=[float(group.get("weight_decay", 0.0)) for group in self.param_groups],
        )
        self._projected = torch.zeros_like(g)
        if not self._fuse_update:
            self._update_sweep()
        return StepOutcome(applied=finite, grad_norm=norm)

    def _update_sweep(self) -> None:
        """The ablation `fuse_update: false`: the update as a sweep of its own."""
        with torch.no_grad():
            for unit in self.placement.units:
                self.visits.fold_now(unit)

    # What may change under us

    def _groups_and_flags(self) -> list[tuple[int, bool]]:
        group_of = {id(p): index for index, group in enumerate(self.param_groups) for p in group["params"]}
        return [
            (group_of.get(id(p.parameter), 0), p.parameter.requires_grad and id(p.parameter) in group_of)
            for unit in self.placement.units
            for p in unit.placed
        ]

    def _check_model(self) -> None:
        """Frozen or regrouped parameters take effect; parameters that are not the ones that were placed can't."""
        signature = self._groups_and_flags()
        if signature == self._signature:
            return
        placed = [(part, p) for unit in self.placement.units for part in unit.parts for p in part.placed]
        for (part, p), (_, trainable) in zip(placed, signature, strict=True):
            if trainable and part.direct:
                raise ValueError(
                    f"parameter {p.name} was frozen when deepspeed.initialize ran and was laid out so; unfreeze it before initialize "
                    "(and give it to an optimizer group)"
                )
        if len(self.param_groups) != self.log.num_groups:
            raise ValueError(
                f"the optimizer had {self.log.num_groups} parameter groups when deepspeed.initialize ran and has {len(self.param_groups)} now: "
                "add groups before initialize"
            )
        with torch.no_grad():
            for unit in self.placement.units:
                self.visits.fold_now(unit)
        for (part, p), (group, trainable) in zip(placed, signature, strict=True):
            p.group, p.trainable = group, trainable
            part.forget_tables()
        for unit in self.placement.units:
            unit.version = self.log.length
        self._signature = signature

    # Saving, loading, describing

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.log.length, "seed": self.settings.seed, "noise_version": ops.NOISE_VERSION}

    def load_state_dict(self, state: Mapping[str, Any], *, load_optimizer_states: bool = True) -> None:
        """Called after the module's weights were loaded: those include every update, so nothing is pending."""
        if not load_optimizer_states:
            return
        if state["noise_version"] != ops.NOISE_VERSION:
            raise ValueError(
                f"the checkpoint's noise is version {state['noise_version']}, this ds_zo makes version {ops.NOISE_VERSION}: "
                "resume with the ds_zo that wrote it, or load the weights alone (load_optimizer_states=False)"
            )
        self.log.length = int(state["step"])
        for unit in self.placement.units:
            unit.version = self.log.length
        self.runtime.forget()

    def describe(self) -> str:
        gib = 2**30
        blocks = self.placement.blocks
        streamed = [u for u in blocks if u.streamed]
        wire = sorted({str(part.wire).removeprefix("torch.") for u in blocks for part in u.parts})
        device_nbytes = sum(u.nbytes for u in self.placement.units if not u.streamed)
        device_nbytes += sum(u.low_nbytes for u in self.placement.units if not u.low_streamed)
        slot_nbytes = sum(slot.buffer.numel() for slot in self.runtime.slots)
        lines = [
            f"ZO: {self.placement.numel:,} parameters in {len(blocks)} blocks and {len(self.placement.edges)} edge modules; "
            f"{len(streamed)} blocks stream, {len(blocks) - len(streamed)} stay",
            f"device: {device_nbytes / gib:.2f} GiB of weights, {len(self.runtime.slots)} slots of together {slot_nbytes / gib:.2f} GiB, "
            f"scratch {self.placement.scratch_nbytes / gib:.2f} GiB; host: {self.store.nbytes / gib:.2f} GiB, "
            f"{self.store.pinned_nbytes / gib:.2f} GiB of it pinned",
            f"stored as {'/'.join(wire) or 'n/a'}, master {self.config.section.stream.master}, folded every {self.interval} steps (at most "
            f"{CAPACITY} behind); {self.settings.num_directions} direction(s), zo_eps {self.settings.zo_eps:g}, seed {self.settings.seed}",
        ]
        return "\n".join(lines)

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self.state.close()
        if self.store.pinned_nbytes:
            torch.cuda.synchronize(self.device)
        self.store.close()


class _Watch(TorchFunctionMode):
    """Notes parameters that reach a torch function while their unit is not being visited."""

    def __init__(self, units: Sequence[Unit], entered: set[int]) -> None:
        super().__init__()
        self._unit_of = {id(p.parameter): (unit, p.name) for unit in units for p in unit.placed if p.trainable}
        self._entered = entered
        self.edges: list[Unit] = []
        self.blocks: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        for value in (*args, *kwargs.values()):
            if isinstance(value, nn.Parameter) and id(value) in self._unit_of and getattr(func, "__name__", "") not in _HARMLESS:
                unit, name = self._unit_of[id(value)]
                if id(unit) not in self._entered:
                    if unit.is_block:
                        self.blocks.append(name)
                    elif unit not in self.edges:
                        self.edges.append(unit)
        return func(*args, **kwargs)

    def raise_for_blocks(self) -> None:
        if self.blocks:
            raise ValueError(
                f"parameter {self.blocks[0]} was used outside the forward of the block that holds it, where its weights are not on the device: name "
                "the list whose entries are called whole, or [] for none (ds_zo.stream.blocks)"
            ) from None


_HARMLESS = {"__get__", "__set__", "size", "dim", "numel", "element_size", "is_floating_point", "is_complex", "data_ptr", "stride", "type", "__len__", "__hash__"}


def _agree(together: Sequence[Any], apart: Sequence[Any]) -> bool:
    for (_, ours), (_, theirs) in zip(together, apart, strict=True):
        for a, b in zip(ours, theirs, strict=True):
            tolerance = 1e-5 if a.dtype is torch.float32 else 1e-2
            if a.shape != b.shape or not torch.allclose(a.float(), b.float(), rtol=tolerance, atol=tolerance, equal_nan=True):
                return False
    return True


def _interval(asked: int | str | None, *, fused: bool, streams: bool) -> int:
    if not fused:
        return 1
    if isinstance(asked, int):
        return asked
    return _STREAMED_INTERVAL if streams else 1


def _move_buffers(module: nn.Module, device: torch.device) -> None:
    for m in module.modules():
        for name, buffer in m._buffers.items():
            if buffer is not None and buffer.device != device:
                m._buffers[name] = buffer.to(device)
