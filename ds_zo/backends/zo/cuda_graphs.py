"""Records CUDA graphs of blocks that are too small to keep the GPU busy while Python launches their kernels.

Working copies made in pairs lie at the same two addresses in every step. So do the one copy and the factors of members.
So a block's forward in one pass is the same list of kernels each time: it is recorded once and replayed by one launch.
Inputs are copied to the addresses that the recording reads, and outputs are copied out. A block is recorded only if one
run showed that it can be replayed. It must take and return tensors, draw no random numbers, read no value back to the
host, and change no input. Every other block runs as usual.

[Note: tensors that modules keep] Recorded kernels read masks and position tables at their addresses at recording time.
A module that makes a longer table for a longer batch frees the first table, and its memory is used for something else.
So the address of each such tensor is checked before a replay.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from deepspeed.utils import logger
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from ds_zo.backends.common.plain_copies import StandIn
from ds_zo.backends.zo.lockstep import Lockstep
from ds_zo.backends.zo.store import ZOStore
from ds_zo.ops.recording import recorded
from ds_zo.streaming.units import Unit

MOST_RECORDED_FLOPS = 0.5e12
"""FLOPs of a block's forward below which launching its kernels from Python takes longer than they take on an H200. ZO
replays such a block as a CUDA graph, where its copies have fixed addresses."""
MAX_INPUT_KINDS = 16
"""Kinds of inputs (shapes, dtypes, other arguments) that are recorded: each kind keeps one graph per block and pass."""

Key = tuple[Any, ...]


class CaptureState:
    """State that a block's forward depends on besides arguments, parameters and code. It consists of hooks and of
    tensors that modules keep ([Note: tensors that modules keep])."""

    def __init__(self, block: nn.Module) -> None:
        self._hooks = [
            torch.nn.modules.module._global_forward_hooks,
            torch.nn.modules.module._global_forward_pre_hooks,
            *(hooks for m in block.modules() if m is not block for hooks in (m._forward_hooks, m._forward_pre_hooks)),
        ]
        """Hooks of the modules inside the block. The block's own hooks run around its forward."""
        self._tensors = [
            (places, name, tensor, tensor.data_ptr())
            for m in block.modules()
            for places in (m._buffers, vars(m))
            for name, tensor in places.items()
            if isinstance(tensor, torch.Tensor)
        ]

    @property
    def has_hooks(self) -> bool:
        """Whether any hook is registered: a replay would not call it."""
        return any(self._hooks)

    @property
    def is_stale(self) -> bool:
        """Whether a module has replaced a tensor that it kept, or the tensor's memory has moved."""
        return any(
            places.get(name) is not tensor or tensor.data_ptr() != address
            for places, name, tensor, address in self._tensors
        )


class HostTraffic(TorchDispatchMode):
    """Notes whether an operation reads values back to the host, or copies between host and device. Unlike torch's
    switch for such a search, it concerns this thread alone."""

    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Torch would never compile a function whose first call is under a mode that returns False."""
        return True

    def __init__(self) -> None:
        super().__init__()
        self.found = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.found = self.found or _reads_values(func, args) or _crosses_devices(func, args, result)
        return result


def _reads_values(func: Any, args: Any) -> bool:
    """Whether the host needs values on the device, to return them or to know a shape."""
    if not isinstance(func, torch._ops.OpOverload):  # an operator over functions, inside which the mode sees nothing
        return True
    if func.overloadpacket in _INDEXING:
        return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1])
    return not {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}.isdisjoint(func.tags)


def _crosses_devices(func: Any, args: Any, result: Any) -> bool:
    """Whether a tensor is copied to another device. What `torch.tensor` copies is not seen: recording it fails."""
    if func.overloadpacket in _INDEXING:  # indices on the host are copied
        return any(index is not None and index.device != args[0].device for index in args[1])
    if func.overloadpacket not in _COPIES:
        return False
    return len({t.device for t in (*args, result) if isinstance(t, torch.Tensor)}) > 1


_INDEXING = frozenset((torch.ops.aten.index, torch.ops.aten.index_put, torch.ops.aten.index_put_))
_COPIES = frozenset((torch.ops.aten.copy_, torch.ops.aten.copy, torch.ops.aten._to_copy))


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

    def __init__(self, store: ZOStore, lockstep: Lockstep, *, device: torch.device) -> None:
        self._store = store
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
        self._stream = torch.cuda.Stream(device)
        self._stand_ins: list[StandIn] = []
        self._excluded: set[int] = set()
        """Units that are blocks no more, by id."""
        entered = {id(module) for module in store.blocks.placement.entered_by}
        for unit in store.blocks.placement.blocks:
            has_hooks_inside = any(id(m) in entered for m in unit.module.modules())
            if not has_hooks_inside and not any(part.frozen for part in unit.parts):
                call = partial(self._forward, unit, tuple(unit.module.modules()), unit.module.forward)
                self._stand_ins.append(StandIn.put(unit.module, "forward", call))

    def close(self) -> None:
        """Drops all recordings and restores the modules' forwards."""
        self.forget()
        self._static_tensors.clear()
        while self._stand_ins:
            self._stand_ins.pop().remove()

    def exclude(self, units: Sequence[Unit]) -> None:
        """Runs these units, which are blocks no more, as usual from now on."""
        self._excluded |= {id(unit) for unit in units}

    def forget(self) -> None:
        """Drops all recordings: the modules have changed, or the working copies or factors have other addresses."""
        self._recordings.clear()
        self._outputs.clear()
        self._rerecorded.clear()

    @property
    def _pool(self) -> Any:
        """The memory pool that recordings share, which is safe because they run one after the other. None before the
        first recording, which then makes a pool. A pool and its id end with its last recording, so the id is asked of a
        live recording."""
        return next((r.graph.pool() for r in self._recordings.values() if r is not None), None)

    def _forward(
        self, unit: Unit, modules: Sequence[nn.Module], forward: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        """Replaces a block's forward: replays its recording, records it, or runs it as usual. `modules`: the block and
        those inside it."""
        if torch.compiler.is_compiling() or torch.is_grad_enabled() or id(unit) in self._excluded:
            return forward(*args, **kwargs)
        members, materialiser = self._store.members, self._store.materialiser
        addresses = materialiser, 0 if members is None else members.num_moves
        if self._recorded_for != addresses:  # working copies or factors have other addresses
            self.forget()
            self._recorded_for = addresses
        state = () if members is None else members.state
        if self._disabled or state is None or not (self._lockstep.inside and materialiser.has_fixed_copies):
            return forward(*args, **kwargs)
        leaves, spec = pytree.tree_flatten((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        others = tuple("tensor" if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves)
        if not self._is_small(unit, tensors) or not all(_is_plain(leaf) for leaf in others):
            return forward(*args, **kwargs)
        shapes = tuple((t.shape, t.stride(), t.dtype, t.device) for t in tensors)
        autocast = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
        trains = modules[0].training
        flags = trains if all(m.training is trains for m in modules) else tuple(m.training for m in modules)
        kind = (flags, autocast, len(args), tuple(kwargs), others, shapes, state)
        if not self._admits(kind):
            return forward(*args, **kwargs)
        key = (id(unit), self._lockstep.current, *kind)
        if key not in self._recordings:
            capture_state = CaptureState(unit.module)
            if self._calls_hooks(capture_state):
                return forward(*args, **kwargs)
            if key not in self._outputs:
                return self._run_checked(key, kind, tensors, partial(forward, *args, **kwargs))
            self._recordings[key] = self._record(forward, leaves, spec, capture_state, key=key, kind=kind)
        recording = self._recordings[key]
        if recording is None or self._calls_hooks(recording.capture_state):
            return forward(*args, **kwargs)
        if recording.capture_state.is_stale:
            self._drop(key)
            return forward(*args, **kwargs)
        if members is not None:
            members.note_tokens(next(filter(_has_tokens, tensors)))
        return recording.replay(tensors)

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
        num_tokens = max((t.shape[0] * t.shape[1] for t in filter(_has_tokens, tensors)), default=0)
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

    def _run_checked(self, key: Key, kind: Key, tensors: list[torch.Tensor], call: Callable[[], Any]) -> Any:
        """Runs the block as usual, and notes whether it can be replayed. Libraries also set themselves up in this run.
        A recording must not fail: it would leave the allocator in recording mode."""
        generator = torch.cuda.default_generators[self._device.index or 0]
        before = generator.get_offset()
        versions = [_version(t) for t in tensors]
        with HostTraffic() as traffic:
            result = call()
        leaves, _ = pytree.tree_flatten(result)
        draws = generator.get_offset() != before
        writes = versions != [_version(t) for t in tensors]  # a replay would write to copies of the inputs
        if traffic.found or draws or writes or not all(isinstance(leaf, torch.Tensor) for leaf in leaves):
            self._recordings[key] = None
            return result
        self._outputs[key] = self._static_like(("out", kind, *((t.shape, t.dtype) for t in leaves)), leaves)
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
            graph = recorded(work, stream=self._stream, pool=self._pool)
        except Exception as error:
            self._disabled = True
            logger.warning(f"ds_zo: from now on blocks run without CUDA graphs, because recording failed: {error}")
            return None
        if capture_state.is_stale:  # the forward itself replaced a tensor: its next run would read another one
            return None
        return Recording(graph, capture_state, inputs, self._outputs[key], output_spec)


def _has_tokens(tensor: torch.Tensor) -> bool:
    """Whether an input of a block may be [row, token, feature]. Blocks take hidden states first, and attention masks
    have four dimensions."""
    return tensor.dim() == 3 and tensor.is_floating_point()


def _version(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _is_plain(leaf: Any) -> bool:
    """Whether the value alone determines its effect on a forward. A cache, for example, changes its contents."""
    return leaf is None or isinstance(leaf, (bool, int, float, str, torch.dtype, torch.device))
