"""Blocks that save only their inputs in the forward pass and are recomputed in the backward pass.

[Note: recomputed blocks] A streamed block's weights are on the device only while the block is materialised, so the
graph of its forward cannot be kept. The forward builds a graph that saves no tensors, and frees it at once. Without a
graph, torch would select other kernels for some operations, whose results differ in the last bit. In the backward pass
the block is materialised again and recomputed from its inputs ([Note: the context of a forward]). An inner backward,
over this block alone, computes the gradients, which are consumed while the weights are on the device. This replaces
activation checkpointing around a block; checkpointing inside a block still works.

[Note: gradients in parts] The inner backward covers one call of one block. The gradient of a weight that is also used
outside of the block is returned to the outer graph, which sums the gradients of all uses. If a block was called several
times, its weights get one part of their gradients from each call. The parts are summed, and the sums are held until the
last call.

[Note: entries in containers] A block may write tensors for later blocks to a dict or list that it is passed: the layers
of Gemma 3n share keys and values so. The block gets a copy of the container. The entries that it writes are outputs of
its autograd node, and are then written to the caller's container.
"""

from __future__ import annotations

import itertools
import weakref
from collections import Counter, OrderedDict, UserDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, Protocol

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from ds_zo.backends.common.plain_copies import StandIn
from ds_zo.backends.recompute.compiled_blocks import BlockCompiler, CompiledForward
from ds_zo.backends.recompute.context import BlockProfile, ForwardContext
from ds_zo.backends.recompute.output_check import OutputSummary
from ds_zo.backends.recompute.recomputation import Recomputation
from ds_zo.backends.recompute.recorded_outputs import Recorded, add_recorded, recorded_names, recording
from ds_zo.backends.recompute.tile_number import SavedBytes
from ds_zo.backends.recompute.tiles import WHOLE, Outputs, Tiles, TileSearch, Untiled
from ds_zo.streaming.blocks import reached_elsewhere
from ds_zo.streaming.budget import reset_peak_memory
from ds_zo.streaming.units import Unit, UnitState
from ds_zo.streaming.use import Use

_numbers = itertools.count()
_IN_PLACE = "leaf Variable that requires grad is being used in an in-place operation"
"""In torch's error for a change of a block's input, which is a leaf of the block's own graph."""
_MAPPINGS = (dict, OrderedDict, defaultdict)
_SEQUENCES = (list, deque)


class BlockConsumer(Protocol):
    """The backend, which consumes the gradients of blocks by hooks on their parameters."""

    def begin_block_backward(self, call: BlockCall) -> bool:
        """Called before a block is materialised and recomputed in the backward pass. Returns False if its gradients are
        not needed: the block is then not recomputed."""

    def end_block_backward(self, block: RecomputedBlock) -> bool:
        """Called when the inner backward of a block has ended, while its weights are on the device. Returns whether its
        weights were changed."""


class _Structure:
    """A flattened structure without its tensors."""

    def __init__(self, leaves: Sequence[Any], spec: TreeSpec) -> None:
        self.others = [None if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        self.tensor_indices = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
        self.spec = spec

    def filled(self, tensors: Sequence[torch.Tensor]) -> Any:
        """The structure with `tensors` for its own."""
        leaves = list(self.others)
        for i, tensor in zip(self.tensor_indices, tensors, strict=True):
            leaves[i] = tensor
        return tree_unflatten(leaves, self.spec)


class BlockCall:
    """One call of a block in a forward pass, with all that is needed to recompute it except the input tensors, which
    its autograd node saves. It lives as long as that node."""

    def __init__(self, block: RecomputedBlock, inputs: _Structure, *, user_dicts: Sequence[bool]) -> None:
        """`inputs`: the arguments. `user_dicts`: for each argument, whether the caller passed a `UserDict`, which is a
        plain dict in `inputs`."""
        self.block = block
        self.number = next(_numbers)
        """Position in the order in which blocks were called."""
        self.last_pass = 0
        """Number of the last backward pass that recomputed it; zero before the first."""
        self.graph_freed = False
        """Its autograd node is freed, or will be at the end of this pass: it is not recomputed again."""
        self.inputs = inputs
        self.tiles = WHOLE
        """How the forward has sliced the batch. The recomputation does the same."""
        self.context: ForwardContext
        """Set by the forward."""
        self.recorded_names = recorded_names()
        """See [Note: recorded outputs]."""
        self.weight_versions: list[int | None] = []
        """Version counters of the block's parameters in the forward. None: the forward itself changes the counter, as
        PEFT's adapters on parameters do (`target_parameters`), so that it does not show other changes."""
        self.first_outputs: list[OutputSummary] = []
        """Of each tile."""
        self._output: _Structure | None = None
        self._has_written = False
        """Whether the last run of the block has written to a container."""
        self._user_dicts = list(user_dicts)
        self._containers: list[tuple[Any, dict[Any, Any]]] = []
        """While the block runs: the containers in its arguments, each with its entries before the call. See
        [Note: entries in containers]."""

    def arguments(self, tensors: Sequence[torch.Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The positional and keyword arguments of the call, with `tensors` for its input tensors."""
        args, kwargs = self.inputs.filled(tensors)
        plain = (*args, *kwargs.values())
        given = [UserDict(v) if is_one else v for v, is_one in zip(plain, self._user_dicts, strict=True)]
        self._containers = [(container, _entries(container)) for container in _containers(given)]
        return tuple(given[: len(args)]), dict(zip(kwargs, given[len(args) :], strict=True))

    def check_weight_versions(self) -> None:
        """Raises if weights have changed between the forward and the recomputation. Without streaming, autograd makes
        the same check on saved tensors."""
        here = self.block.weight_versions()
        if any(v is not None and v != now for v, now in zip(self.weight_versions, here, strict=True)):
            raise RuntimeError(
                f"block {self.block.unit.name} is computed again with the weights of its forward, and they were "
                "changed since, by another engine.backward or by loading: after such a change call the engine again, "
                "once for each backward (if there are several losses, add them up)"
            )

    def run_in_trial(self, forward: Callable[..., Any], tensors: Sequence[torch.Tensor]) -> Outputs:
        """Runs the block to find its tiles. Raises `Untiled` if it writes to a container."""
        args, kwargs = self.arguments(tensors)
        with recording(self.recorded_names) as recorded:
            output = forward(*args, **kwargs)
        found = self.flatten_output(output, recorded)
        assert self._output is not None
        if self._has_written:
            raise Untiled("it writes to a dict or list that it is passed", is_final=True)
        return found, self._output.others

    def flatten_output(self, output: Any, recorded: Recorded) -> list[torch.Tensor]:
        """Returns the tensors of the output, of the entries that the block wrote to containers, and of the recorded
        outputs. The other leaves are kept for `unflatten_output`."""
        written = [_changes(before, _entries(container)) for container, before in self._containers]
        self._has_written = any(changed or removed for changed, removed in written)
        self._containers = []
        leaves, spec = tree_flatten((output, written, recorded))
        self._output = _Structure(leaves, spec)
        for leaf in self._output.others:
            _refuse_hidden_tensors(leaf, self.block.unit.name)
        return [leaves[i] for i in self._output.tensor_indices]

    def unflatten_output(self, tensors: Sequence[torch.Tensor]) -> tuple[Any, list[_Changes], Recorded]:
        """Returns the output of the call with `tensors` in it, the changes that the block made to each container, and
        the recorded outputs."""
        structure, self._output = self._output, None
        assert structure is not None
        output, written, recorded = structure.filled(tensors)
        return output, written, recorded


class RecomputedBlock:
    """Replaces the `forward` of one block until `close`."""

    def __init__(
        self,
        unit: Unit,
        recomputation: Recomputation,
        *,
        consumer: BlockConsumer,
        shared: Sequence[tuple[nn.Module, str]],
        compiler: BlockCompiler | None = None,
    ) -> None:
        self.unit = unit
        self.shared = list(shared)
        """Parameters of the block that are also used outside of it: the module inside the block, and the name there."""
        self.parameter_states: list[Any] = []
        """The consumer's states of the block's other parameters."""
        self.last_pass = 0
        """Number of the last backward pass that materialised the block; zero before the first."""
        self.profile = BlockProfile(unit.module, recomputation.device)
        self._recomputation = recomputation
        self._consumer = weakref.ref(consumer)
        self._calls: list[weakref.ref[BlockCall]] = []
        self._anchor = torch.zeros((), device=recomputation.device, requires_grad=True)
        """An input of each trained block's autograd node. It makes the first block's output require gradients, whose
        input does not."""
        if isinstance(left := vars(unit.module).get("forward"), StandIn):  # by an engine that could not be made
            left.remove()
        self._forward: Callable[..., Any] = unit.module.forward
        self._compute = self._forward if compiler is None else CompiledForward(compiler, unit.module, self._forward)
        self._tile_search = TileSearch(
            self.profile,
            report=lambda reason: recomputation.report_untiled(unit, reason),
        )
        self._stand_in = StandIn.put(unit.module, "forward", torch.compiler.disable(self._call))

    def close(self) -> None:
        self._stand_in.remove()

    def use(self) -> AbstractContextManager[Use]:
        """Context in which the block's weights are on the device."""
        return self._recomputation.use(self.unit)

    def updating_shard(self) -> AbstractContextManager[torch.Tensor]:
        """Context in which this rank's shard of the block's weights may be changed. Yields its bytes."""
        return self._recomputation.store.updating_shard(self.unit)

    def calls(self) -> list[BlockCall]:
        """The calls that may still be recomputed, in the order in which they were made."""
        alive = [(ref, call) for ref in self._calls if (call := ref()) is not None and not call.graph_freed]
        self._calls = [ref for ref, _ in alive]
        return [call for _, call in alive]

    def has_pending_calls(self, pass_number: int) -> bool:
        """Whether this backward pass may still recompute a call of the block."""
        return any(
            call is not None and not call.graph_freed and call.last_pass != pass_number
            for call in (ref() for ref in self._calls)
        )

    def weight_versions(self) -> list[int]:
        """The version counters of its parameters, which a change in place increases."""
        return [p._version for p in self.profile.parameters]

    # Forward

    def _call(self, *args: Any, **kwargs: Any) -> Any:
        """The block's `forward`: one autograd node if the call may be trained, else a forward without a graph."""
        may_train = torch.is_grad_enabled() and self._consumer() is not None
        if may_train and not self._has_cache(args, kwargs):
            given = (*args, *kwargs.values())
            user_dicts = [type(v) is UserDict for v in given]
            plain = tuple(map(_plain, args)), {name: _plain(v) for name, v in kwargs.items()}
            leaves, spec = tree_flatten(plain)
            # Autograd cannot save a tensor that was made in inference mode, as masks may be.
            leaves = [x.clone() if isinstance(x, torch.Tensor) and x.is_inference() else x for x in leaves]
            tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
            trains = any(p.requires_grad for p in self.unit.module.parameters())
            if trains or any(t.requires_grad for t in tensors):
                for leaf in leaves:
                    _refuse_hidden_tensors(leaf, self.unit.name)
                structure = _Structure(leaves, spec)
                call = BlockCall(self, structure, user_dicts=user_dicts)
                self._calls.append(weakref.ref(call))
                shared = [getattr(owner, name) for owner, name in self.shared]
                with self._recomputation.saving_inputs(tensors):
                    outputs = _Recompute.apply(call, self._anchor if trains else None, *tensors, *shared)
                output, written, recorded = call.unflatten_output(outputs)
                add_recorded(recorded)
                for container, changes in zip(list(_containers(given)), written, strict=True):
                    _change(container, *changes)
                return output
        with (
            self.use(),
            torch.no_grad(),
            _no_autocast_cache(self._recomputation.device),
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

    def _compute_flat(self, call: BlockCall, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
        """Runs the block with the arguments of a call. Returns the tensors of all its outputs."""
        with recording(call.recorded_names) as recorded:
            output = self._compute(*args, **kwargs)
        return call.flatten_output(output, recorded)

    def _copy_own_weights(self, leaves: Sequence[Any]) -> list[Any]:
        """Replaces outputs that are weights of the block (prompts, tables) by copies, because the next block will
        overwrite the memory that holds these weights."""
        if self.unit.state is not UnitState.MATERIALISED:
            return list(leaves)
        storages = {placed.parameter.untyped_storage().data_ptr() for placed in self.unit.placed}

        def is_weight(leaf: Any) -> bool:
            is_dense = isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided
            return is_dense and leaf.untyped_storage().data_ptr() in storages

        return [leaf.clone() if is_weight(leaf) else leaf for leaf in leaves]

    def _has_cache(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether an argument is a key-value cache of transformers. Raises in training mode."""
        if not any(hasattr(v, "get_seq_length") for v in (*args, *kwargs.values())):
            return False
        if self.unit.module.training:
            raise ValueError(
                "a recomputed block takes no key-value cache in training, because it would fill the cache twice, got "
                f"past_key_values in block {self.unit.name}: pass use_cache=False to the model, or take prompt tuning "
                "in place of prefix tuning"
            )
        return True

    def forward_without_graph(self, call: BlockCall, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Runs the block for a training forward. Returns the tensors of its output, detached; those that had a graph
        require gradients."""
        versions = [t._version for t in tensors]
        with self.use(), _no_autocast_cache(self._recomputation.device), torch.enable_grad():
            before = self.weight_versions()
            try:
                wholes = self._forward_in_fewest_tiles(call, tensors)
            except RuntimeError as error:
                if _IN_PLACE in str(error):
                    raise self._changed_input() from error
                raise
            call.weight_versions = [
                v if v == now else None for v, now in zip(before, self.weight_versions(), strict=True)
            ]
        call.context.end_forward()
        if versions != [t._version for t in tensors]:
            raise self._changed_input()
        return [t.detach().requires_grad_(t.requires_grad) for t in wholes]

    def _forward_in_fewest_tiles(self, call: BlockCall, tensors: Sequence[torch.Tensor]) -> list[Any]:
        """See [Note: the number of tiles]."""
        number = self._recomputation.tile_number
        tiles = self._tiles(call, tensors, num_tiles=number.value)
        if not number.is_open:
            return self._forward_in_tiles(call, tensors, tiles)
        random = self.profile.random.get_state()
        while True:
            error: torch.OutOfMemoryError | None = None
            saved = SavedBytes((*self.profile.parameters, *tensors))
            try:
                wholes = self._forward_in_tiles(call, tensors, tiles, saved)
                trained = [p for p in self.profile.parameters if p.requires_grad]
                wanted = number.fitting(saved, wholes, trained, num_tiles=tiles.num_tiles)
            except torch.OutOfMemoryError as found:
                error, wholes = found.with_traceback(None), []  # frames of a traceback would hold tensors
                wanted = 2 * tiles.num_tiles
            more = tiles if wanted == tiles.num_tiles else self._tiles(call, tensors, num_tiles=wanted)
            if more.num_tiles <= tiles.num_tiles:
                if error is not None:
                    raise error
                return wholes
            tiles, wholes = more, []
            number.value = max(number.value, tiles.num_tiles)
            self.profile.random.set_state(random)
            reset_peak_memory(self._recomputation.device)

    def _tiles(self, call: BlockCall, tensors: Sequence[torch.Tensor], *, num_tiles: int) -> Tiles:
        run = partial(call.run_in_trial, self._forward)
        return self._tile_search.tiles(
            run, tensors, others=call.inputs.others, spec=call.inputs.spec, num_tiles=num_tiles
        )

    def _forward_in_tiles(
        self, call: BlockCall, tensors: Sequence[torch.Tensor], tiles: Tiles, saved: SavedBytes | None = None
    ) -> list[Any]:
        """Returns the whole outputs. `saved` counts what autograd would save for the first tile."""
        call.tiles, call.first_outputs = tiles, []
        call.context = ForwardContext(self.profile, self._recomputation.device)
        inputs = [t.detach() for t in tensors]
        rows_of_inputs = tiles.rows_of_inputs(inputs)
        wholes: list[Any] = []
        with torch.autograd.graph.saved_tensors_hooks(partial(_pack_nothing, self.unit.name, saved), _unpack_nothing):
            for tile in tiles:
                call.context.begin_tile()
                cut = [tile.cut(t, rows).detach() for t, rows in zip(inputs, rows_of_inputs, strict=True)]
                own = [part.requires_grad_(t.requires_grad) for part, t in zip(cut, tensors, strict=True)]
                args, kwargs = call.arguments(own)
                outputs = self._copy_own_weights(self._compute_flat(call, args, kwargs))
                call.first_outputs.append(self._recomputation.output_check.summarise(outputs))
                wholes = tiles.put_outputs(self.unit.name, tile, wholes, outputs)
                if saved is not None:
                    saved.end()
        return wholes

    def _changed_input(self) -> ValueError:
        return ValueError(
            f"block {self.unit.name} changes its input in place, so it cannot be computed again from that input: copy "
            "the input in the block's forward, or keep the model on the device (remove zero_optimization.offload_param)"
        )

    # Backward

    def recompute_backward(
        self, call: BlockCall, tensors: Sequence[torch.Tensor], needed: Sequence[bool], grads: Sequence[Any]
    ) -> list[torch.Tensor | None]:
        """Recomputes the block and runs its inner backward. `tensors`: the inputs. `needed`: for each input, then for
        each shared weight, whether its gradient is needed. `grads`: the gradients of the outputs. Returns the gradients
        of the inputs, then of the shared weights."""
        consumer = self._consumer()
        is_wanted = consumer is not None and consumer.begin_block_backward(call)
        if consumer is None or all(grad is None for grad in grads):
            return [None] * len(needed)
        if not is_wanted:  # expanded zeros, which take no memory: a user's hooks before the block do not accept None
            before = (*tensors, *(getattr(owner, name) for owner, name in self.shared))
            return [t.new_zeros(()).expand(t.shape) if need else None for t, need in zip(before, needed, strict=True)]
        with self.use() as use:
            call.check_weight_versions()
            with self._as_leaves(call, needed[len(tensors) :]) as leaves:
                of_inputs = self._backward_by_tiles(call, tensors, needed, grads)
            leaves.deliver()
            if consumer.end_block_backward(self):
                use.commit()
        return [*of_inputs, *leaves.of_shared()]

    def _backward_by_tiles(
        self, call: BlockCall, tensors: Sequence[torch.Tensor], needed: Sequence[bool], grads: Sequence[Any]
    ) -> list[torch.Tensor | None]:
        """Returns the gradients of the inputs."""
        tiles = call.tiles
        rows = tiles.rows_of_inputs(tensors)
        whole = [t.detach().requires_grad_(need) for t, need in zip(tensors, needed, strict=False)]
        for t, k in zip(whole, rows, strict=True):
            if tiles.are_several and t.requires_grad and not k:
                _sum_wide(t)
        found: list[torch.Tensor | None] = [None] * len(tensors)
        for i, (tile, first_output) in enumerate(zip(tiles, call.first_outputs, strict=True)):
            inputs = [
                tile.cut(t.detach(), k).requires_grad_(t.requires_grad) if k else t
                for t, k in zip(whole, rows, strict=True)
            ]
            with torch.enable_grad(), call.context.restored(tile=i):
                args, kwargs = call.arguments(inputs)
                outputs = self._compute_flat(call, args, kwargs)
                self._recomputation.output_check.compare(self.unit.name, self.unit.module, first_output, outputs)
            parts = [
                None if g is None else tile.cut(g, k)
                for g, k in zip(grads, tiles.rows_of_gradients(grads), strict=True)
            ]
            reached = [(o, g) for o, g in zip(outputs, parts, strict=True) if g is not None and o.requires_grad]
            del args, kwargs, outputs
            if reached:
                torch.autograd.backward([o for o, _ in reached], [g for _, g in reached])
            del reached, parts
            found = [tile.put(whole_grad, t.grad, k) for whole_grad, t, k in zip(found, inputs, rows, strict=True)]
        return [None if grad is None else grad.to(t.dtype) for grad, t in zip(found, tensors, strict=True)]

    @contextmanager
    def _as_leaves(self, call: BlockCall, wanted: Sequence[bool]) -> Iterator[_Leaves]:
        """Context in which detached leaves replace the shared weights, so that the inner backward does not run the
        hooks of these weights. With several tiles, leaves replace the other trained weights too. `wanted`: which shared
        weights need gradients."""
        several = call.tiles.are_several
        places = list(self.shared)
        parameters = [getattr(owner, name) for owner, name in places]
        leaves = [_leaf(p, trains=want, sums=several) for p, want in zip(parameters, wanted, strict=True)]
        own = [p for p, trained in zip(self.profile.parameters, call.context.trained, strict=True) if trained]
        shared = set(map(id, parameters))
        leaf_of = {id(p): (p, _leaf(p, trains=True, sums=True)) for p in own if several and id(p) not in shared}
        for owner in self.profile.modules:
            for name, p in owner._parameters.items():
                if id(p) in leaf_of:
                    places.append((owner, name))
                    parameters.append(p)
                    leaves.append(leaf_of[id(p)][1])
        try:
            for (owner, name), leaf in zip(places, leaves, strict=True):
                owner._parameters[name] = leaf
            yield _Leaves(leaves[: len(self.shared)], list(leaf_of.values()))
        finally:
            for (owner, name), p in zip(places, parameters, strict=True):
                owner._parameters[name] = p


class _Leaves:
    """The leaves that replace weights of a block in its inner backward, and hold their gradients."""

    def __init__(self, shared: Sequence[nn.Parameter], own: list[tuple[nn.Parameter, nn.Parameter]]) -> None:
        """`shared`: leaves of weights that are also used outside of the block. `own`: other weights, and their
        leaves."""
        self._shared, self._own = shared, own

    def deliver(self) -> None:
        """Gives each of the block's own weights its gradient, which runs the weight's hooks, and frees that gradient.
        The last weights come first, as in a backward pass."""
        while self._own:
            p, leaf = self._own.pop()
            grad, leaf.grad = leaf.grad, None
            if grad is not None:
                trains = p.requires_grad
                p.requires_grad_(True)  # a user may have frozen it after the forward
                try:
                    torch.autograd.backward([p], [grad])
                finally:
                    p.requires_grad_(trains)

    def of_shared(self) -> list[torch.Tensor | None]:
        """The gradients of the shared weights."""
        return [None if leaf.grad is None else leaf.grad.to(leaf.dtype) for leaf in self._shared]


def _leaf(p: torch.Tensor, *, trains: bool, sums: bool) -> nn.Parameter:
    """A detached leaf for a weight. `sums`: it gets gradients of several tiles."""
    leaf = nn.Parameter(p.detach(), requires_grad=trains)  # compiled code expects this class
    if sums and trains:
        _sum_wide(leaf)
    return leaf


def _sum_wide(leaf: torch.Tensor) -> None:
    """Makes autograd sum the gradients of a leaf in float32."""
    leaf.grad_dtype = torch.promote_types(leaf.dtype, torch.float32)


class _Recompute(torch.autograd.Function):
    """The one autograd node that represents a block's call in the outer graph. Its inputs are the call, the anchor, the
    input tensors and the shared weights."""

    @staticmethod
    def forward(
        ctx: Any, call: BlockCall, anchor: torch.Tensor | None, *tensors: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        inputs = tensors[: len(call.inputs.tensor_indices)]
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
    """The autograd node of an output that was computed without a graph; its backward raises. Without such a node a loss
    would silently train only the modules after the block."""

    @staticmethod
    def forward(ctx: Any, output: torch.Tensor, anchor: torch.Tensor, block: str) -> torch.Tensor:
        ctx.block = block
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise ValueError(
            f"block {ctx.block} got a key-value cache in evaluation, so its inputs were not saved for a backward: pass "
            "use_cache=False to the model, or call engine.train() first"
        )


def _pack_nothing(block: str, saved: SavedBytes | None, tensor: torch.Tensor) -> str:
    """Saves the block's name in place of a tensor of the forward's graph, which is never run backward. Hooks of a
    checkpoint around the block do not see the tensor either."""
    if saved is not None:
        saved.add(tensor)
    return block


def _unpack_nothing(block: str) -> torch.Tensor:
    raise RuntimeError(
        "a streamed block's gradients pass through its outputs alone, and the loss uses another tensor of block "
        f"{block}, which is inside an object that the block returns or was taken by a hook: return tensors in tuples, "
        "lists or dicts, take router logits by transformers 5.2 or later, or keep the model on the device (remove "
        "zero_optimization.offload_param)"
    )


_Changes = tuple[dict[Any, Any], list[Any]]
"""The entries of a container that were written, and the keys or indices that were removed."""


def _containers(arguments: Iterable[Any], *, nested: bool = False) -> Iterator[Any]:
    """The dicts and lists in a block's arguments, of the kinds of which a block gets a copy."""
    for value in arguments:
        is_mapping = type(value) in _MAPPINGS or (type(value) is UserDict and not nested)
        is_sequence = type(value) in _SEQUENCES
        if is_mapping or is_sequence:
            yield value
        if is_mapping or is_sequence or isinstance(value, tuple):
            yield from _containers(value.values() if is_mapping else value, nested=True)


def _entries(container: Any) -> dict[Any, Any]:
    """The entries by key, or by index."""
    return dict(enumerate(container) if type(container) in _SEQUENCES else container)


def _changes(before: Mapping[Any, Any], after: Mapping[Any, Any]) -> _Changes:
    written = {key: value for key, value in after.items() if key not in before or value is not before[key]}
    return written, [key for key in before if key not in after]


def _change(container: Any, written: Mapping[Any, Any], removed: Sequence[Any]) -> None:
    """Makes the changes that `_changes` has found in a copy of the container."""
    for key in reversed(removed):  # from the end of a list
        del container[key]
    for key, value in written.items():
        if type(container) in _SEQUENCES and key == len(container):
            container.append(value)
        else:
            container[key] = value


def _plain(value: Any) -> Any:
    """A UserDict as a dict, which torch flattens."""
    return value.data if type(value) is UserDict else value


def _no_autocast_cache(device: torch.device) -> torch.autocast:
    """Context in which autocast caches no casts: the cache would keep the cast weights of every block, also after the
    slot holds another block."""
    enabled, dtype = torch.is_autocast_enabled(device.type), torch.get_autocast_dtype(device.type)
    return torch.autocast(device.type, enabled=enabled, dtype=dtype, cache_enabled=False)


def _refuse_hidden_tensors(leaf: Any, block: str) -> None:
    """Raises if a leaf of the flattened arguments or outputs is an object with tensors among its attributes."""
    inside = getattr(leaf, "__dict__", None)
    if inside and any(isinstance(v, torch.Tensor) and v.is_floating_point() for v in inside.values()):
        raise ValueError(
            f"block {block} passes tensors inside a {type(leaf).__name__}, where their gradients would be lost: pass "
            "tensors in tuples, lists or dicts, or keep the model on the device (remove "
            "zero_optimization.offload_param)"
        )


def shared_parameters(module: nn.Module, blocks: Sequence[nn.Module]) -> list[list[tuple[nn.Module, str]]]:
    """For each block, the parameters that are also used outside of it: the module inside the block, and the name."""
    uses = Counter(id(p) for m in module.modules() for p in m._parameters.values())
    elsewhere = reached_elsewhere(module, blocks)
    found = []
    for block in blocks:
        inside = [(m, n, p) for m in block.modules() for n, p in m._parameters.items() if p is not None]
        count = Counter(id(p) for _, _, p in inside)
        found.append([(m, n) for m, n, p in inside if uses[id(p)] > count[id(p)] or id(m) in elsewhere])
    return found
