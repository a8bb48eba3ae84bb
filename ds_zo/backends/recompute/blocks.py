"""Blocks that keep nothing but their inputs, and are computed again when their gradient comes.

[Note: recomputed blocks] A block's weights are on the device only while it is visited, so the graph of its forward is
dropped at once. (It is made all the same, with nothing saved: without one, torch takes other kernels here and there,
whose results differ in the last bit.) In the backward pass the block is visited once more: it is run again from its
inputs ([Note: the same again]), and a backward of its own consumes its gradients while the weights are there. What a
user's checkpointing around a block would do is thereby done; checkpointing inside one still works.

[Note: gradients in parts] That inner backward ends with the visit. The gradient of a weight that is used elsewhere too
is handed to the outer graph, which adds up what comes from all its uses. A block that ran several times is visited as
often: the gradients of its weights are held until the last of these visits.

[Note: entries in mappings] A block may leave tensors for later blocks in a dict that it is given, as Gemma 3n's layers
share keys and values. It gets a copy; entries that it writes are outputs of its node, and then go to the caller's dict.
"""

from __future__ import annotations

import itertools
import weakref
from collections import UserDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from ds_zo.backends.common.interrupts import interrupts
from ds_zo.backends.common.plain_copies import StandIn
from ds_zo.backends.recompute.block_store import RecomputedBlockStore
from ds_zo.backends.recompute.compiled_blocks import BlockCompiler, CompiledForward
from ds_zo.backends.recompute.context import BlockProfile, ForwardContext
from ds_zo.config import ConfigError
from ds_zo.streaming.blocks import reached_elsewhere
from ds_zo.streaming.units import Unit

_numbers = itertools.count()


class Consumer(Protocol):
    """Who takes gradients."""

    def begin_block_backward(self, call: BlockCall) -> bool:
        """A block's gradient is about to be computed. False: nobody wants it."""

    def end_block_backward(self, block: RecomputedBlock) -> bool:
        """All gradients of a visit have come. True: weights were changed."""


class BlockCall:
    """One run of a block, to be made again. Lives as long as the graph that it is a node of."""

    def __init__(
        self,
        block: RecomputedBlock,
        leaves: Sequence[Any],
        spec: TreeSpec,
        *,
        user_dicts: Sequence[bool],
        device: torch.device,
    ) -> None:
        """`user_dicts`: which of the arguments are of that class, and stand here as plain dicts."""
        self.block = block
        self.number = next(_numbers)
        """In the order that blocks run in."""
        self.last_pass = 0
        """The backward pass that it was last computed again in."""
        self.graph_freed = False
        """Its graph is freed: it cannot be computed again."""
        self.output_spec: TreeSpec | None = None
        self.output_leaves: list[Any] = []
        self._output_tensor_indices: list[int] = []
        self._leaves = [None if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        self._tensor_indices = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
        self._spec = spec
        self._user_dicts = list(user_dicts)
        self._mappings: list[tuple[Any, dict[Any, Any]]] = []
        """Those that the block is given while it runs, with what stood in them; see [Note: entries in mappings]."""
        self._context = ForwardContext(block.profile, device)
        self._weights: list[int] = []

    @property
    def num_inputs(self) -> int:
        return len(self._tensor_indices)

    def arguments(self, tensors: Sequence[torch.Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        leaves = list(self._leaves)
        for i, tensor in zip(self._tensor_indices, tensors, strict=False):
            leaves[i] = tensor
        args, kwargs = tree_unflatten(leaves, self._spec)
        plain = (*args, *kwargs.values())
        given = [UserDict(v) if is_one else v for v, is_one in zip(plain, self._user_dicts, strict=True)]
        self._mappings = [(v, dict(v)) for v in given if _is_mapping(v)]
        return tuple(given[: len(args)]), dict(zip(kwargs, given[len(args) :], strict=True))

    def record_weight_versions(self) -> None:
        self._weights = self.block.weight_versions()

    def check_weight_versions(self) -> None:
        """Where a model stays on the device torch finds this out by itself."""
        if self._weights != self.block.weight_versions():
            raise RuntimeError(
                f"block {self.block.unit.name} is computed again with the weights of its forward, and they were "
                "changed since, by another engine.backward or by loading: call the engine after that, once for each "
                "backward (of several losses, add them up)"
            )

    def end_forward(self) -> None:
        self._context.end_forward()

    def restored_context(self) -> Any:
        """Context in which the block computes what it did."""
        return self._context.restored()

    def flatten_output(self, output: Any) -> list[torch.Tensor]:
        """The tensors of the output and of what the block wrote to mappings; the rest waits here for `output`."""
        written = [{k: v for k, v in m.items() if v is not before.get(k)} for m, before in self._mappings]
        self._mappings = []
        leaves, self.output_spec = tree_flatten((output, written))
        self.output_leaves = [None if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        self._output_tensor_indices = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
        for leaf in self.output_leaves:
            _refuse_hidden_tensors(leaf, self.block.unit.name)
        return [leaves[i] for i in self._output_tensor_indices]

    def unflatten_output(self, tensors: Sequence[torch.Tensor]) -> tuple[Any, list[dict[Any, Any]]]:
        """And what the block wrote to each mapping that it was given."""
        assert self.output_spec is not None
        leaves, self.output_leaves = self.output_leaves, []
        for i, tensor in zip(self._output_tensor_indices, tensors, strict=True):
            leaves[i] = tensor
        output, written = tree_unflatten(leaves, self.output_spec)
        return output, written


class RecomputedBlock:
    """Stands before one block's `forward`."""

    def __init__(
        self,
        unit: Unit,
        block_store: RecomputedBlockStore,
        *,
        consumer: Consumer,
        shared: Sequence[tuple[nn.Module, str]],
        compiler: BlockCompiler | None = None,
    ) -> None:
        self.unit = unit
        self.shared = list(shared)
        """Owners and names, inside the block, of parameters that are used outside it too."""
        self.parameter_states: list[Any] = []
        """What the consumer keeps of its other parameters."""
        self.last_pass = 0
        """The backward pass that last visited it."""
        self.profile = BlockProfile(unit.module, block_store.device)
        self._block_store = block_store
        self._consumer = weakref.ref(consumer)
        self._calls: list[weakref.ref[BlockCall]] = []
        self._anchor = torch.zeros((), device=block_store.device, requires_grad=True)
        """Makes the first block's output require gradients where its input does not."""
        before = unit.module.__dict__.get("forward")
        previous: RecomputedBlock | None = getattr(before, "_ds_zo_block", None)
        if previous is not None:
            previous.close()
            before = unit.module.__dict__.get("forward")
        self._replaced = before
        self._forward: Callable[..., Any] = unit.module.forward
        self._compute = self._forward if compiler is None else CompiledForward(compiler, unit.module, self._forward)
        wrapper: Any = StandIn(torch.compiler.disable(self._call), self._forward)
        wrapper._ds_zo_block = self
        self._wrapper = wrapper
        object.__setattr__(unit.module, "forward", wrapper)

    def close(self) -> None:
        if self.unit.module.__dict__.get("forward") is self._wrapper:
            if self._replaced is None:
                object.__delattr__(self.unit.module, "forward")
            else:
                object.__setattr__(self.unit.module, "forward", self._replaced)

    def calls(self) -> list[BlockCall]:
        """Those that may still be computed again, in the order they were made."""
        alive = [(ref, call) for ref in self._calls if (call := ref()) is not None and not call.graph_freed]
        self._calls = [ref for ref, _ in alive]
        return [call for _, call in alive]

    def has_pending_calls(self, pass_number: int) -> bool:
        return any(
            call is not None and not call.graph_freed and call.last_pass != pass_number
            for call in (ref() for ref in self._calls)
        )

    def weight_versions(self) -> list[int]:
        """Of its weights: a change of any makes another list."""
        return [p._version for p in self.profile.parameters]

    # Forward

    def _call(self, *args: Any, **kwargs: Any) -> Any:
        may_train = torch.is_grad_enabled() and self._consumer() is not None
        if may_train and not self._has_cache(args, kwargs):
            given = (*args, *kwargs.values())
            user_dicts = [type(v) is UserDict for v in given]
            plain = tuple(map(_plain, args)), {name: _plain(v) for name, v in kwargs.items()}
            leaves, spec = tree_flatten(plain)
            # A graph keeps no tensor that was made in inference mode, such as a mask.
            leaves = [x.clone() if isinstance(x, torch.Tensor) and x.is_inference() else x for x in leaves]
            tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
            trains = any(p.requires_grad for p in self.unit.module.parameters())
            if trains or any(t.requires_grad for t in tensors):
                for leaf in leaves:
                    _refuse_hidden_tensors(leaf, self.unit.name)
                call = BlockCall(self, leaves, spec, user_dicts=user_dicts, device=self._block_store.device)
                self._calls.append(weakref.ref(call))
                shared = [getattr(owner, name) for owner, name in self.shared]
                outputs = _Recompute.apply(call, self._anchor if trains else None, *tensors, *shared)
                output, written = call.unflatten_output(outputs)
                for mapping, entries in zip(filter(_is_mapping, given), written, strict=True):
                    mapping.update(entries)
                return output
        # [Note: whole steps] Ctrl-C on the way out of a context would leave torch's modes as they are inside.
        with (
            interrupts.deferred(),
            self._block_store.materialise(self.unit),
            torch.no_grad(),
            _no_autocast_cache(self._block_store.device),
        ):
            leaves, spec = tree_flatten(self._compute(*args, **kwargs))
            leaves = self._copy_own_weights(leaves)
        if may_train and self._has_cache(args, kwargs):
            leaves = [
                _RefuseBackward.apply(leaf, self._anchor, self.unit.name)
                if isinstance(leaf, torch.Tensor) and leaf.is_floating_point()
                else leaf
                for leaf in leaves
            ]
        return tree_unflatten(leaves, spec)

    def _copy_own_weights(self, leaves: Sequence[Any]) -> list[Any]:
        """Outputs that are the block's own weights (prompts, tables) as copies: where they are now is slot_storages."""
        slot_storages = {
            placed.parameter.untyped_storage().data_ptr() for placed in self.unit.placed if self.unit.streamed
        }
        return [
            leaf.clone() if isinstance(leaf, torch.Tensor) and _storage_ptr(leaf) in slot_storages else leaf
            for leaf in leaves
        ]

    def _has_cache(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        if not any(hasattr(v, "get_seq_length") for v in (*args, *kwargs.values())):
            return False
        if self.unit.module.training:
            raise ValueError(
                f"block {self.unit.name} got a key-value cache in training, which it would fill twice, got "
                "past_key_values: pass use_cache=False to the model"
            )
        return True

    def forward_without_graph(self, call: BlockCall, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Outputs without a graph; those that had one are leaves that require gradients."""
        versions = [t._version for t in tensors]
        args, kwargs = call.arguments([t.detach().requires_grad_(t.requires_grad) for t in tensors])
        with (
            interrupts.deferred(),  # as in `_call`
            self._block_store.materialise(self.unit),
            _no_autocast_cache(self._block_store.device),
            torch.enable_grad(),
            torch.autograd.graph.saved_tensors_hooks(partial(_pack_nothing, self.unit.name), _unpack_nothing),
        ):
            call.record_weight_versions()
            outputs = self._copy_own_weights(call.flatten_output(self._compute(*args, **kwargs)))
        call.end_forward()
        if versions != [t._version for t in tensors]:
            raise ValueError(
                f"block {self.unit.name} changes its input in place, so it cannot be computed again from it: make a "
                "copy there, or keep the model on the device (remove zero_optimization.offload_param)"
            )
        return [t.detach().requires_grad_(t.requires_grad) for t in outputs]

    # Backward

    def recompute_backward(
        self, call: BlockCall, tensors: Sequence[torch.Tensor], needed: Sequence[bool], grads: Sequence[Any]
    ) -> list[torch.Tensor | None]:
        """Gradients of the inputs, then of the shared weights."""
        consumer = self._consumer()
        is_wanted = consumer is not None and consumer.begin_block_backward(call)
        if consumer is None or all(grad is None for grad in grads):
            return [None] * len(needed)
        if not is_wanted:  # zeros without memory: hooks of a user's on what is before the block take no None
            before = (*tensors, *(getattr(owner, name) for owner, name in self.shared))
            return [t.new_zeros(()).expand(t.shape) if need else None for t, need in zip(before, needed, strict=True)]
        inputs = [t.detach().requires_grad_(need) for t, need in zip(tensors, needed, strict=False)]
        wanted = needed[len(inputs) :]
        with interrupts.deferred(), self._block_store.materialise(self.unit) as materialised:
            call.check_weight_versions()
            with torch.enable_grad(), call.restored_context(), self._shared_as_leaves(wanted) as shared_leaves:
                args, kwargs = call.arguments(inputs)
                outputs = call.flatten_output(self._compute(*args, **kwargs))
            reached = [(o, g) for o, g in zip(outputs, grads, strict=True) if g is not None and o.requires_grad]
            del args, kwargs, outputs
            if reached:
                torch.autograd.backward([o for o, _ in reached], [g for _, g in reached])
            materialised.changed = consumer.end_block_backward(self)
        return [t.grad for t in (*inputs, *shared_leaves)]

    @contextmanager
    def _shared_as_leaves(self, wanted: Sequence[bool]) -> Iterator[list[torch.Tensor]]:
        """Leaves in the place of shared weights, so that the inner backward does not complete their gradients."""
        parameters = [getattr(owner, name) for owner, name in self.shared]
        found = [p.detach().requires_grad_(want) for p, want in zip(parameters, wanted, strict=True)]
        try:
            for (owner, name), leaf in zip(self.shared, found, strict=True):
                owner._parameters[name] = leaf  # type: ignore[assignment]
            yield found
        finally:
            for (owner, name), p in zip(self.shared, parameters, strict=True):
                owner._parameters[name] = p


class _Recompute(torch.autograd.Function):
    """The one node that a block is in the outer graph."""

    @staticmethod
    def forward(
        ctx: Any, call: BlockCall, anchor: torch.Tensor | None, *tensors: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        inputs = tensors[: call.num_inputs]
        outputs = call.block.forward_without_graph(call, inputs)
        ctx.call = call
        ctx.save_for_backward(*inputs)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*(t for t in outputs if not t.requires_grad))
        return tuple(t.requires_grad_(False) for t in outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        call: BlockCall = ctx.call
        return None, None, *call.block.recompute_backward(call, ctx.saved_tensors, ctx.needs_input_grad[2:], grads)


class _RefuseBackward(torch.autograd.Function):
    """An output that was computed for evaluation alone: without a node of its own, a loss would train what is behind
    the block and nothing else, in silence."""

    @staticmethod
    def forward(ctx: Any, output: torch.Tensor, anchor: torch.Tensor, block: str) -> torch.Tensor:
        ctx.block = block
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise ValueError(
            f"block {ctx.block} got a key-value cache in evaluation, so it was not kept for a backward: pass "
            "use_cache=False to the model, or call engine.train() first"
        )


def _pack_nothing(block: str, tensor: Any) -> str:
    """What a graph saves that nobody goes back through: nothing here, nor in a checkpoint around the block."""
    return block


def _unpack_nothing(block: str) -> torch.Tensor:
    raise RuntimeError(
        f"a streamed block's gradients pass through its outputs alone, and the loss reaches into block {block} past "
        "them, by a tensor in an object that it returns or that a hook took from inside: return tensors in tuples, "
        "lists or dicts, or keep the model on the device (remove zero_optimization.offload_param)"
    )


def _is_mapping(value: Any) -> bool:
    return type(value) in (dict, UserDict)


def _plain(value: Any) -> Any:
    """A UserDict as a dict, which torch flattens."""
    return value.data if type(value) is UserDict else value


def _storage_ptr(tensor: torch.Tensor) -> int | None:
    return tensor.untyped_storage().data_ptr() if tensor.layout is torch.strided else None


@contextmanager
def _no_autocast_cache(device: torch.device) -> Iterator[None]:
    """It would keep a cast of every block, and of weights that are gone."""
    with torch.autocast(
        device.type,
        enabled=torch.is_autocast_enabled(device.type),
        dtype=torch.get_autocast_dtype(device.type),
        cache_enabled=False,
    ):
        yield


def _refuse_hidden_tensors(leaf: Any, block: str) -> None:
    inside = getattr(leaf, "__dict__", None)
    if inside and any(isinstance(v, torch.Tensor) and v.is_floating_point() for v in inside.values()):
        raise ValueError(
            f"block {block} passes tensors inside a {type(leaf).__name__}, where their gradients would be lost: pass "
            "tensors in tuples, lists or dicts, or keep the model on the device (remove "
            "zero_optimization.offload_param)"
        )


def refuse_router_logits(module: nn.Module, call: Mapping[str, Any] | None = None) -> None:
    """transformers' hooks take them from inside a block. `call`: keywords of a forward; without, the config is read."""
    configs = (getattr(m, "config", None) for m in module.modules())
    if call is not None and call.get("output_router_logits") is True:
        found = "output_router_logits=True in a call"
    elif call is None and any(getattr(config, "output_router_logits", False) is True for config in configs):
        found = "output_router_logits true in the model's config"
    else:
        return
    raise ConfigError(
        "router logits leave a block past its outputs, so a streamed block gives their loss no gradient, got "
        f"{found}: set it to false, or remove offload_param",
        at="zero_optimization.offload_param.device",
    )


def refuse_shared_modules(units: Sequence[Unit]) -> None:
    """A module that stands in two blocks has one home, and would be used where it is not brought up."""
    seen: dict[int, str] = {}
    for unit in units:
        for name, m in unit.module.named_modules():
            if id(m) in seen and next(m.parameters(), None) is not None:
                raise ValueError(
                    f"blocks {seen[id(m)]} and {unit.name} share the module {name}: share its parameters instead, or "
                    "keep the model on the device (remove zero_optimization.offload_param)"
                )
            seen[id(m)] = unit.name


def shared_parameters(module: nn.Module, blocks: Sequence[nn.Module]) -> list[list[tuple[nn.Module, str]]]:
    """For each block, owners and names in it of parameters that stand outside of it as well."""
    uses: dict[int, int] = {}
    for m in module.modules():
        for p in m._parameters.values():
            if p is not None:
                uses[id(p)] = uses.get(id(p), 0) + 1
    elsewhere = reached_elsewhere(module, blocks)
    found = []
    for block in blocks:
        inside = [(m, n, p) for m in block.modules() for n, p in m._parameters.items() if p is not None]
        count: dict[int, int] = {}
        for _, _, p in inside:
            count[id(p)] = count.get(id(p), 0) + 1
        found.append([(m, n) for m, n, p in inside if uses[id(p)] > count[id(p)] or id(m) in elsewhere])
    return found
