"""Records CUDA graphs of blocks that are too small to keep the GPU busy while Python launches their kernels.

Working copies made in pairs lie at the same two addresses in every step. So a block's forward in one pass is the same
list of kernels each time: it is recorded once and replayed by one launch. Inputs are copied to the addresses that the
recording reads, and outputs are copied out. A block is recorded only if one run showed that it can be replayed. It must
take and return tensors, draw no random numbers, read no value back to the host, and change no input. Every other block
runs as usual. Where all blocks are on the device, one graph may hold all of them: see [Note: one graph for all blocks].
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from deepspeed.utils import logger
from torch import nn
from torch.utils import _pytree as pytree

from ds_zo.backends.common.plain_copies import Hook, StandIn
from ds_zo.backends.zo.block_chain import BlockChains, Key
from ds_zo.backends.zo.block_store import ZOBlockStore
from ds_zo.backends.zo.capture_state import CaptureState, version_of
from ds_zo.backends.zo.lockstep import Lockstep
from ds_zo.ops.recording import recorded
from ds_zo.planner.choices import MOST_RECORDED_FLOPS
from ds_zo.streaming.units import Unit

MAX_INPUT_KINDS = 16
"""Kinds of inputs (shapes, dtypes, other arguments) that are recorded: each kind keeps one graph per block and pass."""


def can_record(device: torch.device) -> bool:
    """Whether the device has CUDA graphs."""
    return device.type == "cuda"


@dataclass
class Recording:
    """The CUDA graph of one block's forward in one pass, for one kind of inputs."""

    graph: torch.cuda.CUDAGraph
    capture_state: CaptureState
    inputs: list[torch.Tensor]
    outputs: list[torch.Tensor]
    spec: Any

    def replay(self, tensors: list[torch.Tensor]) -> Any:
        """Copies the inputs in, launches the graph, and returns copies of the outputs."""
        for static, tensor in zip(self.inputs, tensors, strict=True):
            static.copy_(tensor)
        self.graph.replay()
        return pytree.tree_unflatten([output.clone() for output in self.outputs], self.spec)


class BlockGraphs:
    """Replaces the forward of each block by one that replays a recording where there is one."""

    def __init__(self, block_store: ZOBlockStore, lockstep: Lockstep, *, device: torch.device) -> None:
        self._block_store = block_store
        self._lockstep = lockstep
        self._device = device
        self._recordings: dict[Key, Recording | None] = {}
        """Recordings by unit, pass and kind of inputs. None for a block that cannot be replayed."""
        self._outputs: dict[Key, list[torch.Tensor]] = {}
        """Tensors to which the recordings write their outputs, for blocks that can be replayed."""
        self._static_tensors: dict[Key, list[torch.Tensor]] = {}
        self._rerecorded: set[Key] = set()
        """Keys that were recorded a second time because tensors inside had moved."""
        self._input_kinds: set[Key] = set()
        self._has_warned = self._has_warned_of_hooks = False
        self._recorded_for: object = None
        self._disabled = False
        self._stream: torch.cuda.Stream | None = None
        self._forwards: dict[int, Callable[..., Any]] = {}
        """The forwards that are replaced, by the unit's id."""
        self.chains = BlockChains(
            block_store,
            lockstep,
            device=device,
            forwards=self._forwards,
            static_like=self._static_like,
            capture=self._capture,
            forget_checks=self.forget,
        )
        self._first_block_hook: Any = None
        self._wrapped: list[tuple[nn.Module, Any]] = []
        """Modules whose forward is replaced, and the `forward` attribute that each had set on itself before, or
        None."""
        entered = {id(module) for module in block_store.placement.entered_by}
        for unit in block_store.placement.blocks:
            has_hooks_inside = any(id(m) in entered for m in unit.module.modules())
            if not has_hooks_inside and not any(part.frozen for part in unit.parts):
                self._wrapped.append((unit.module, vars(unit.module).get("forward")))
                method = self._forwards[id(unit)] = unit.module.forward
                unit.module.forward = StandIn(partial(self._forward, unit, method), method)

    def hook_first_block(self) -> None:
        """Hooks the first block, so that a pass notes its arguments before it pauses at the block. Call it after the
        hooks that pause are registered."""
        blocks = self._block_store.placement.blocks
        if blocks and id(blocks[0]) in self._forwards:
            hook = Hook(torch.compiler.disable(partial(self._note_arguments, blocks[0])))
            self._first_block_hook = blocks[0].module.register_forward_pre_hook(hook, prepend=True, with_kwargs=True)

    def _note_arguments(self, unit: Unit, module: nn.Module, args: Any, kwargs: Any) -> None:
        if self._lockstep.inside and self.chains.expects_arguments:
            leaves, _ = pytree.tree_flatten((args, kwargs))
            if (kind := self._kind(unit, leaves, args, kwargs)) is not None:
                self.chains.note_arguments(kind, leaves)

    def close(self) -> None:
        """Drops all recordings and restores the modules' forwards."""
        self.forget()
        self._static_tensors.clear()
        if self._first_block_hook is not None:
            self._first_block_hook.remove()
        while self._wrapped:
            _unwrap(*self._wrapped.pop())

    def exclude(self, units: Sequence[Unit]) -> None:
        """Restores the forwards of these units, which are blocks no more."""
        modules = {id(unit.module) for unit in units}
        leaving = [(module, before) for module, before in self._wrapped if id(module) in modules]
        self._wrapped = [(module, before) for module, before in self._wrapped if id(module) not in modules]
        for module, before in leaving:
            _unwrap(module, before)
        if leaving:
            self.chains.stop("weights of a block are used outside the block")

    def forget(self) -> None:
        """Drops all recordings: the modules have changed, or the working copies have other addresses."""
        self._recordings.clear()
        self._outputs.clear()
        self._rerecorded.clear()
        self.chains.forget()

    @property
    def _pool(self) -> Any:
        """The memory pool that recordings share, which is safe because they run one after the other. None before the
        first recording, which then makes a pool. A pool and its id end with its last recording, so the id is asked of a
        live recording."""
        graphs = (r.graph for r in self._recordings.values() if r is not None)
        return next((graph.pool() for graph in (*graphs, *self.chains.graphs)), None)

    def _capture(self, work: Callable[[], None]) -> Any:
        """Records the work as a CUDA graph."""
        if self._stream is None:
            self._stream = torch.cuda.Stream(self._device)
        return recorded(work, stream=self._stream, pool=self._pool)

    def _forward(self, unit: Unit, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Replaces a block's forward: replays its recording, records it, or runs it as usual."""
        if self._lockstep.blocks_launched:
            return self.chains.take_output(unit, *pytree.tree_flatten((args, kwargs)))
        if torch.compiler.is_compiling() or torch.is_grad_enabled():
            return forward(*args, **kwargs)
        if self._recorded_for is not self._block_store.materialiser:  # working copies have other addresses
            self.forget()
            self._recorded_for = self._block_store.materialiser
        if self._disabled or not (self._lockstep.inside and self._block_store.materialiser.in_one_launch):
            return forward(*args, **kwargs)
        leaves, spec = pytree.tree_flatten((args, kwargs))
        kind = self._kind(unit, leaves, args, kwargs)
        if kind is None or not self._admits(kind):
            return forward(*args, **kwargs)
        if self.chains.launch(unit, kind):
            return self.chains.take_output(unit, leaves, spec)
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        key = (id(unit), self._lockstep.current, *kind)
        if key not in self._recordings:
            capture_state = CaptureState(unit.module)
            if self._calls_hooks(capture_state):
                return forward(*args, **kwargs)
            if key not in self._outputs:
                return self._run_checked(unit, key, kind, leaves, spec, partial(forward, *args, **kwargs))
            self._recordings[key] = self._record(forward, leaves, spec, capture_state, key=key, kind=kind)
        recording = self._recordings[key]
        if recording is None or self._calls_hooks(recording.capture_state):
            return forward(*args, **kwargs)
        if recording.capture_state.is_stale:
            self._drop(key)
            return forward(*args, **kwargs)
        return recording.replay(tensors)

    def _kind(self, unit: Unit, leaves: Sequence[Any], args: Any, kwargs: Any) -> Key | None:
        """The kind of these inputs. None if the block is not recorded with such inputs."""
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        others = tuple("tensor" if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves)
        if not self._is_small(unit, tensors) or not all(_is_plain(leaf) for leaf in others):
            return None
        shapes = tuple((t.shape, t.stride(), t.dtype, t.device) for t in tensors)
        autocast = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
        return (unit.module.training, autocast, len(args), tuple(kwargs), others, shapes)

    def _calls_hooks(self, capture_state: CaptureState) -> bool:
        """Whether hooks inside the block must be called, so that it runs without a graph. Warns once."""
        if not capture_state.has_hooks:
            return False
        if not self._has_warned_of_hooks:
            self._has_warned_of_hooks = True
            logger.warning(
                "ds_zo: CUDA graphs do not call forward hooks on modules inside blocks, so blocks with such hooks run "
                "without CUDA graphs: remove the hooks after use"
            )
        return True

    def _drop(self, key: Key) -> None:
        """Drops a recording whose tensors have moved, to record it anew. After the second time, the block is not
        recorded again."""
        if key in self._rerecorded:
            self._recordings[key] = None
        else:
            self._rerecorded.add(key)
            del self._recordings[key]

    def _is_small(self, unit: Unit, tensors: list[torch.Tensor]) -> bool:
        """Whether the block has so few floating-point operations for these inputs that launching its kernels takes
        longer."""
        num_tokens = max(
            (t.shape[0] * t.shape[1] for t in tensors if t.dim() == 3 and t.is_floating_point()), default=0
        )
        on_device = all(t.device == self._device for t in tensors)
        return on_device and 0 < 2 * num_tokens * sum(part.numel for part in unit.parts) < MOST_RECORDED_FLOPS

    def _admits(self, kind: Key) -> bool:
        """Whether inputs of this kind are recorded. Warns once when there are too many kinds."""
        if kind in self._input_kinds:
            return True
        if len(self._input_kinds) < MAX_INPUT_KINDS:
            self._input_kinds.add(kind)
            return True
        if not self._has_warned:
            self._has_warned = True
            logger.warning(
                f"ds_zo: CUDA graphs are recorded for at most {MAX_INPUT_KINDS} shapes of inputs, and this run has "
                "more, which run without CUDA graphs: pad batches to a multiple of some length, or set "
                "ds_zo.cuda_graphs to false"
            )
        return False

    def _run_checked(
        self, unit: Unit, key: Key, kind: Key, leaves: list[Any], spec: Any, call: Callable[[], Any]
    ) -> Any:
        """Runs the block as usual, and notes whether it can be replayed. Libraries also set themselves up in this run.
        A recording must not fail: it would leave the allocator in recording mode."""
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        versions = [version_of(t) for t in tensors]
        result, obstacle = _run_watched(call, self._device)
        results, result_spec = pytree.tree_flatten(result)
        if versions != [version_of(t) for t in tensors]:
            obstacle = "changes its inputs"  # a replay would write to copies of the inputs
        elif not all(isinstance(leaf, torch.Tensor) for leaf in results):
            obstacle = "returns other values than tensors"
        if obstacle is not None:
            self._recordings[key] = None
            self.chains.refuse(f"block {unit.name} {obstacle}")
            return result
        self._outputs[key] = self._static_like(("out", kind, *((t.shape, t.dtype) for t in results)), results)
        self.chains.observe(unit, kind, leaves, spec, results, result_spec)
        return result

    def _static_like(self, key: Key, like: list[torch.Tensor]) -> list[torch.Tensor]:
        """Tensors at fixed addresses, shaped like `like`. Blocks and passes run one after the other, so all with the
        same key share them."""
        if key not in self._static_tensors:
            self._static_tensors[key] = [torch.empty_like(t) for t in like]
        return self._static_tensors[key]

    def _record(
        self,
        forward: Callable[..., Any],
        leaves: list[Any],
        spec: Any,
        capture_state: CaptureState,
        *,
        key: Key,
        kind: Key,
    ) -> Recording | None:
        """Records the block's forward on static inputs. Returns None if the block cannot be replayed."""
        inputs = self._static_like(("in", kind), [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)])
        rest = iter(inputs)
        args, kwargs = pytree.tree_unflatten([next(rest) if isinstance(x, torch.Tensor) else x for x in leaves], spec)
        output_spec: Any = None

        def work() -> None:
            nonlocal output_spec
            results, output_spec = pytree.tree_flatten(forward(*args, **kwargs))
            for static, result in zip(self._outputs[key], results, strict=True):
                static.copy_(result)

        try:
            graph = self._capture(work)
        except Exception as error:
            self._disabled = True
            logger.warning(f"ds_zo: from now on blocks run without CUDA graphs, because recording failed: {error}")
            return None
        if capture_state.is_stale:  # the forward itself replaced a tensor: its next run would read another one
            return None
        return Recording(graph, capture_state, inputs, self._outputs[key], output_spec)


def _unwrap(module: nn.Module, before: Any) -> None:
    vars(module).pop("forward", None)
    if before is not None:
        module.forward = before


def _run_watched(call: Callable[[], Any], device: torch.device) -> tuple[Any, str | None]:
    """Makes the call. Returns its result, and what it does that a CUDA graph cannot repeat, or None."""
    generator = torch.cuda.default_generators[device.index or 0]
    before, mode = generator.get_offset(), torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            result = call()
    finally:
        torch.cuda.set_sync_debug_mode(mode)
    if any("synchronizing" in str(warning.message) for warning in seen):
        return result, "reads values back to the host"
    return result, "draws random numbers" if generator.get_offset() != before else None


def _is_plain(leaf: Any) -> bool:
    """Whether the value alone determines its effect on a forward. A cache, for example, changes its contents."""
    return leaf is None or isinstance(leaf, (bool, int, float, str, torch.dtype, torch.device))
