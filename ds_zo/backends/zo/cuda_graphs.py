"""CUDA graphs of blocks that are too small to keep the GPU busy while Python launches their kernels.

Working copies made in pairs lie in the same two places for every step, so a block's forward of one pass is the same
list of kernels each time: recorded once, replayed by one launch. Inputs are copied to where the recording read them,
outputs are copied out. Recorded is only what was seen to be replayable: tensors in, tensors out, no random numbers
drawn, no number read back, no input changed. Whatever can't be recorded runs as it did.

[Note: tensors that modules keep] Kernels read masks and tables of positions where these were when they were recorded. A
module that makes a longer table for a longer batch lets the first one go, and its memory becomes something else's. So
each is looked at before a replay.
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

from ds_zo.backends.common.plain_copies import StandIn
from ds_zo.backends.zo.block_store import ZOBlockStore
from ds_zo.backends.zo.lockstep import Lockstep
from ds_zo.ops.recording import recorded
from ds_zo.planner.choices import MOST_RECORDED_FLOPS
from ds_zo.streaming.units import Unit

MOST_KINDS = 16
"""Shapes of inputs that are recorded: each keeps a graph a block and pass."""

Key = tuple[Any, ...]


class CaptureState:
    """What a block's forward depends on besides arguments, parameters and code; see [Note: tensors that modules
    keep]."""

    def __init__(self, block: nn.Module) -> None:
        self._hooks = [
            torch.nn.modules.module._global_forward_hooks,
            torch.nn.modules.module._global_forward_pre_hooks,
            *(hooks for m in block.modules() if m is not block for hooks in (m._forward_hooks, m._forward_pre_hooks)),
        ]
        """Of modules inside: the block's own run around its forward."""
        self._tensors = [
            (places, name, tensor, tensor.data_ptr())
            for m in block.modules()
            for places in (m._buffers, vars(m))
            for name, tensor in places.items()
            if isinstance(tensor, torch.Tensor)
        ]

    @property
    def has_hooks(self) -> bool:
        """A replay would not call them."""
        return any(self._hooks)

    @property
    def have_moved(self) -> bool:
        return any(
            places.get(name) is not tensor or tensor.data_ptr() != address
            for places, name, tensor, address in self._tensors
        )


@dataclass
class Recording:
    """One block's forward of one pass for inputs of one shape."""

    graph: torch.cuda.CUDAGraph
    surroundings: CaptureState
    inputs: list[torch.Tensor]
    outputs: list[torch.Tensor]
    spec: Any

    def replay(self, tensors: list[torch.Tensor]) -> Any:
        for static, tensor in zip(self.inputs, tensors, strict=True):
            static.copy_(tensor)
        self.graph.replay()
        return pytree.tree_unflatten([output.clone() for output in self.outputs], self.spec)


class BlockGraphs:
    """Stands before the forward of each block and replays it where it can."""

    def __init__(self, block_store: ZOBlockStore, lockstep: Lockstep, *, device: torch.device) -> None:
        self._block_store = block_store
        self._lockstep = lockstep
        self._device = device
        self._recordings: dict[Key, Recording | None] = {}
        """None: seen not to be replayable."""
        self._outputs: dict[Key, list[torch.Tensor]] = {}
        """Where the replayable put their outputs."""
        self._statics: dict[Key, list[torch.Tensor]] = {}
        self._moved: set[Key] = set()
        """Recorded once more because tensors inside had moved."""
        self._kinds: set[Key] = set()
        self._has_warned = self._has_warned_of_hooks = False
        self._made_for: object = None
        self._gave_up = False
        self._stream = torch.cuda.Stream(device)
        self._wrapped: list[tuple[nn.Module, Any]] = []
        """Modules, and a forward of their own that they had before."""
        entered = {id(module) for module in block_store.placement.entered_by}
        for unit in block_store.placement.blocks:
            has_hooks_inside = any(id(m) in entered for m in unit.module.modules())
            if not has_hooks_inside and not any(part.direct for part in unit.parts):
                self._wrapped.append((unit.module, vars(unit.module).get("forward")))
                method = unit.module.forward
                unit.module.forward = StandIn(partial(self._forward, unit, method), method)

    def close(self) -> None:
        self.forget()
        self._statics.clear()
        while self._wrapped:
            _unwrap(*self._wrapped.pop())

    def leave(self, units: Sequence[Unit]) -> None:
        """They are no longer visited as blocks."""
        modules = {id(unit.module) for unit in units}
        leaving = [(module, before) for module, before in self._wrapped if id(module) in modules]
        self._wrapped = [(module, before) for module, before in self._wrapped if id(module) not in modules]
        for module, before in leaving:
            _unwrap(module, before)

    def forget(self) -> None:
        """Modules or working copies are others now."""
        self._recordings.clear()
        self._outputs.clear()
        self._moved.clear()

    @property
    def _pool(self) -> Any:
        """Memory that recordings share, since they run one after the other; None: one of its own for the first. It
        goes with the last of them, and its name with it, so those that live are asked."""
        return next((r.graph.pool() for r in self._recordings.values() if r is not None), None)

    def _forward(self, unit: Unit, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or torch.is_grad_enabled():
            return forward(*args, **kwargs)
        if self._made_for is not self._block_store.materialiser:  # working copies have moved
            self.forget()
            self._made_for = self._block_store.materialiser
        if self._gave_up or not (self._lockstep.inside and self._block_store.materialiser.in_one_launch):
            return forward(*args, **kwargs)
        leaves, spec = pytree.tree_flatten((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        others = tuple("tensor" if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves)
        if not self._pays(unit, tensors) or not all(_is_plain(leaf) for leaf in others):
            return forward(*args, **kwargs)
        shapes = tuple((t.shape, t.stride(), t.dtype, t.device) for t in tensors)
        autocast = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
        same = (unit.module.training, autocast, len(args), tuple(kwargs), others, shapes)
        if not self._is_one_of_few(same):
            return forward(*args, **kwargs)
        key = (id(unit), self._lockstep.current, *same)
        if key not in self._recordings:
            surroundings = CaptureState(unit.module)
            if self._calls_hooks(surroundings):
                return forward(*args, **kwargs)
            if key not in self._outputs:
                return self._watched(key, same, tensors, partial(forward, *args, **kwargs))
            self._recordings[key] = self._record(forward, leaves, spec, surroundings, key=key, same=same)
        recording = self._recordings[key]
        if recording is None or self._calls_hooks(recording.surroundings):
            return forward(*args, **kwargs)
        if recording.surroundings.have_moved:
            self._drop(key)
            return forward(*args, **kwargs)
        return recording.replay(tensors)

    def _calls_hooks(self, surroundings: CaptureState) -> bool:
        if not surroundings.has_hooks:
            return False
        if not self._has_warned_of_hooks:
            self._has_warned_of_hooks = True
            logger.warning(
                "ds_zo: forward hooks on modules inside blocks are called, so while there are any, blocks run without "
                "CUDA graphs: remove them after use"
            )
        return True

    def _drop(self, key: Key) -> None:
        """To be recorded anew, once: what moves again and again is better not."""
        if key in self._moved:
            self._recordings[key] = None
        else:
            self._moved.add(key)
            del self._recordings[key]

    def _pays(self, unit: Unit, tensors: list[torch.Tensor]) -> bool:
        num_tokens = max(
            (t.shape[0] * t.shape[1] for t in tensors if t.dim() == 3 and t.is_floating_point()), default=0
        )
        on_device = all(t.device == self._device for t in tensors)
        return on_device and 0 < 2 * num_tokens * sum(part.numel for part in unit.parts) < MOST_RECORDED_FLOPS

    def _is_one_of_few(self, same: Key) -> bool:
        if same in self._kinds:
            return True
        if len(self._kinds) < MOST_KINDS:
            self._kinds.add(same)
            return True
        if not self._has_warned:
            self._has_warned = True
            logger.warning(
                f"ds_zo: inputs came in more than {MOST_KINDS} shapes; further ones run without CUDA graphs: pad "
                "batches to a multiple of some length, or set ds_zo.cuda_graphs to false"
            )
        return False

    def _watched(self, key: Key, same: Key, tensors: list[torch.Tensor], call: Callable[[], Any]) -> Any:
        """A run as usual, in which libraries set themselves up and it is seen whether replaying could do the same: a
        recording that fails would leave the allocator recording."""
        generator = torch.cuda.default_generators[self._device.index or 0]
        before, mode = generator.get_offset(), torch.cuda.get_sync_debug_mode()
        versions = [_version(t) for t in tensors]
        torch.cuda.set_sync_debug_mode("warn")
        try:
            with warnings.catch_warnings(record=True) as seen:
                warnings.simplefilter("always")
                result = call()
        finally:
            torch.cuda.set_sync_debug_mode(mode)
        leaves, _ = pytree.tree_flatten(result)
        waits = any("synchronizing" in str(warning.message) for warning in seen)
        draws = generator.get_offset() != before
        writes = versions != [_version(t) for t in tensors]  # a replay would write to copies
        if waits or draws or writes or not all(isinstance(leaf, torch.Tensor) for leaf in leaves):
            self._recordings[key] = None
            return result
        self._outputs[key] = self._shared(("out", same, *((t.shape, t.dtype) for t in leaves)), leaves)
        return result

    def _shared(self, key: Key, like: list[torch.Tensor]) -> list[torch.Tensor]:
        """Blocks and passes run one after the other, so those with tensors of one shape share them."""
        if key not in self._statics:
            self._statics[key] = [torch.empty_like(t) for t in like]
        return self._statics[key]

    def _record(
        self,
        forward: Callable[..., Any],
        leaves: list[Any],
        spec: Any,
        surroundings: CaptureState,
        *,
        key: Key,
        same: Key,
    ) -> Recording | None:
        inputs = self._shared(("in", same), [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)])
        rest = iter(inputs)
        args, kwargs = pytree.tree_unflatten([next(rest) if isinstance(x, torch.Tensor) else x for x in leaves], spec)
        output_spec: Any = None

        def work() -> None:
            nonlocal output_spec
            results, output_spec = pytree.tree_flatten(forward(*args, **kwargs))
            for static, result in zip(self._outputs[key], results, strict=True):
                static.copy_(result)

        try:
            graph = recorded(work, stream=self._stream, pool=self._pool)
        except Exception as error:
            self._gave_up = True
            logger.warning(f"ds_zo: blocks run without CUDA graphs from now on, for one can't be recorded: {error}")
            return None
        if surroundings.have_moved:  # by the forward itself: its next run would start from other ones
            return None
        return Recording(graph, surroundings, inputs, self._outputs[key], output_spec)


def _unwrap(module: nn.Module, before: Any) -> None:
    vars(module).pop("forward", None)
    if before is not None:
        module.forward = before


def _version(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _is_plain(leaf: Any) -> bool:
    """Values that decide what a forward does by being what they are; a cache, say, changes."""
    return leaf is None or isinstance(leaf, (bool, int, float, str, torch.dtype, torch.device))
