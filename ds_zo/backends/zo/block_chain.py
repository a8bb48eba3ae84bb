"""Launches the forwards of all blocks, in both passes, as one CUDA graph.

[Note: one graph for all blocks] With a graph for each block, Python still makes two pauses, a launch and several copies
per block. A small model on a slow host waits for them. One graph of all blocks is possible where every block is on the
device, and takes no tensors but the output of the block before it and arguments of the first block. The graph holds
the kernels that make the perturbed copies, and the blocks' forwards. It is launched when both passes have reached the
first block. The model's own code still runs between the blocks, so it may draw random numbers or read its inputs. The
blocks' forwards return at once: the last block's returns its output, the others return a `PendingOutput`. The model's
code may only give this to the next block. Any other use raises `ChainBroken`. Then the passes run again, and blocks
are launched one by one from then on.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from ds_zo.backends.common.interrupts import interrupts
from ds_zo.backends.common.plain_copies import Hook
from ds_zo.backends.zo.block_store import ZOBlockStore
from ds_zo.backends.zo.capture_state import CaptureState, version_of
from ds_zo.backends.zo.lockstep import Lockstep
from ds_zo.logs import show
from ds_zo.streaming.intercepted import is_harmless, without_interception
from ds_zo.streaming.units import Unit

Key = tuple[Any, ...]
_NUM_PASSES = 2
_MAX_GRAPHS = 4
"""Graphs of one chain. A run needs two: with a pending update of each block, and with none (accumulation)."""


class ChainBroken(RuntimeError):
    """Raised in a pass that uses the blocks in another way than the recorded passes. The passes give the right result
    if they run again without the graph of all blocks."""


class PendingOutput(torch.Tensor):
    """Stands for a block's output that only the next block reads. It has the output's shape, dtype and device. Its
    values are NaN, and torch functions refuse to read them."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        if not is_harmless(func) or getattr(func, "__name__", "") == "__set__":
            raise ChainBroken(
                f"the output of a block is used outside the next block, by {getattr(func, '__name__', func)}; to use "
                "it after the step, set ds_zo.cuda_graphs to false"
            )
        with without_interception():
            return func(*args, **(kwargs or {}))

    @classmethod
    def like(cls, shape: torch.Size, dtype: torch.dtype, device: torch.device) -> PendingOutput:
        return torch.full((), math.nan, dtype=dtype, device=device).expand(shape).as_subclass(cls)


@dataclass(frozen=True)
class Link:
    """One block of a chain."""

    unit: Unit
    spec: Any
    """Structure of its arguments."""
    sources: tuple[tuple[str, Any], ...]
    """For each argument: ("output", i) for an output of the block before, ("input", i) for an argument of the first
    block, or ("value", v) for a number, string or None."""
    outputs: tuple[tuple[torch.Size, torch.dtype, torch.device], ...]
    output_spec: Any


class ObservedPass:
    """The blocks that one pass has called, with the source of each argument."""

    def __init__(self, kind: Key, leaves: Sequence[Any]) -> None:
        self.kind = kind
        """Kind of the first block's arguments."""
        self.inputs = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        self.links: list[Link] = []
        self._inputs = _numbered(leaves)
        self._outputs: dict[int, tuple[int, torch.Tensor, int]] = {}

    def add(
        self, unit: Unit, leaves: Sequence[Any], spec: Any, results: Sequence[torch.Tensor], result_spec: Any
    ) -> bool:
        """Adds a block that has run. Returns False if one of its arguments has another source, or an output is not of
        a floating-point dtype."""
        sources = [self._source(leaf) for leaf in leaves]
        if None in sources or not all(t.is_floating_point() for t in results):
            return False
        outputs = tuple((t.shape, t.dtype, t.device) for t in results)
        self.links.append(Link(unit, spec, tuple(s for s in sources if s is not None), outputs, result_spec))
        self._outputs = _numbered(results)
        return True

    def _source(self, leaf: Any) -> tuple[str, Any] | None:
        if not isinstance(leaf, torch.Tensor):
            return "value", leaf
        if isinstance(leaf, nn.Parameter):  # its memory differs between the passes
            return None
        for name, held in (("output", self._outputs), ("input", self._inputs)):
            if id(leaf) in held and held[id(leaf)][2] == version_of(leaf):
                return name, held[id(leaf)][0]
        return None


def _numbered(leaves: Sequence[Any]) -> dict[int, tuple[int, torch.Tensor, int]]:
    """By id: each tensor's number among the leaves, the tensor, and its version counter."""
    return {id(x): (i, x, version_of(x)) for i, x in enumerate(leaves) if isinstance(x, torch.Tensor)}


@dataclass
class Chain:
    """All blocks in the order of a forward, for one kind of arguments of the first block."""

    links: list[Link]
    inputs: list[list[torch.Tensor]]
    """For each pass, the tensors that the graph reads in place of the first block's arguments."""
    outputs: list[list[torch.Tensor]]
    """For each pass, the tensors to which the graph writes the last block's outputs."""
    capture_states: list[CaptureState]
    pending_outputs: list[list[PendingOutput]]
    graphs: dict[tuple[int, ...], Any] = field(default_factory=dict)
    """Graphs by the number of pending updates of each block but the first. None: the kernels have run once without a
    graph, so they are compiled and can be recorded."""
    num_moved: int = 0
    """How often tensors that modules keep have moved; see [Note: tensors that modules keep]."""

    @property
    def units(self) -> list[Unit]:
        return [link.unit for link in self.links]


class BlockChains:
    """Finds out whether a model's blocks form a chain, and launches the chain."""

    def __init__(
        self,
        block_store: ZOBlockStore,
        lockstep: Lockstep,
        *,
        device: torch.device,
        forwards: dict[int, Callable[..., Any]],
        static_like: Callable[[Key, list[torch.Tensor]], list[torch.Tensor]],
        capture: Callable[[Callable[[], None]], Any],
        forget_checks: Callable[[], None],
    ) -> None:
        """`forwards`: the blocks' own forwards, by the unit's id. `static_like` makes tensors at fixed addresses.
        `capture` records work as a CUDA graph. `forget_checks` has blocks checked, and observed, again."""
        self._block_store = block_store
        self._lockstep = lockstep
        self._forwards = forwards
        self._static_like = static_like
        self._capture = capture
        self._forget_checks = forget_checks
        self._step = torch.zeros(1, dtype=torch.int32, device=device)
        """The step, which the graph's noise kernels read."""
        self.enabled = True
        """False: blocks are launched one by one."""
        self._has_explained = False
        self._allowed = False
        """Whether the passes that run may use a chain."""
        self._chains: dict[Key, Chain] = {}
        self._observed: dict[int, ObservedPass] = {}
        """By pass: the blocks that it has called in this forward, while each is its kind's first call."""
        self._noted: dict[int, tuple[Key, list[Any]]] = {}
        """By pass: kind and leaves of the first block's arguments."""
        self._running: Chain | None = None
        """The chain that was launched in this forward."""
        self._arguments: dict[int, list[tuple[Any, int]]] = {}
        """By pass: arguments of the first block in the launched chain, with their version counters."""
        self._positions: dict[int, int] = {}
        """By pass: number of blocks of the launched chain that it has called."""

    @property
    def graphs(self) -> Iterator[Any]:
        """The recorded graphs."""
        return (graph for chain in self._chains.values() for graph in chain.graphs.values() if graph is not None)

    def forget(self) -> None:
        """Drops all chains."""
        self._chains.clear()

    def stop(self, reason: object) -> None:
        """Launches blocks one by one from now on, and says why."""
        self.enabled = False
        self.forget()
        self.refuse(reason)

    def refuse(self, reason: object) -> None:
        """Says once why blocks that are on the device are launched one by one."""
        if not self._has_explained and not self._streams:
            self._has_explained = True
            show(f"ds_zo: the blocks of a step are launched one by one, not as one CUDA graph, because {reason}")

    @property
    def _streams(self) -> bool:
        return any(unit.streamed or unit.low_streamed for unit in self._block_store.placement.blocks)

    @contextmanager
    def passes(self, *, allowed: bool) -> Iterator[None]:
        """Context around the passes of one forward. Without `allowed`, blocks are launched one by one in them."""
        self._allowed = allowed and self.enabled
        try:
            yield
        except BaseException:
            if self._observed:
                self._forget_checks()  # else blocks that have been checked would not be observed again
            raise
        finally:
            self._allowed = False
            self._running = None
            self._observed, self._noted, self._arguments = {}, {}, {}  # frees activations

    # Which blocks form a chain

    def observe(
        self, unit: Unit, kind: Key, leaves: Sequence[Any], spec: Any, results: Sequence[torch.Tensor], result_spec: Any
    ) -> None:
        """Notes a block that has run in a forward that can be recorded. Makes a chain when both passes have run all
        blocks."""
        index, blocks = self._lockstep.current, self._block_store.placement.blocks
        if not self.enabled or self._streams:
            return
        if unit is blocks[0]:
            self._observed[index] = ObservedPass(kind, leaves)
        observed = self._observed.get(index)
        if observed is None:
            return
        if not observed.add(unit, leaves, spec, results, result_spec):
            self._observed.clear()
            self.refuse(f"block {unit.name} takes other tensors than the output of the block before it")
            return
        if index == _NUM_PASSES - 1 and len(observed.links) == len(blocks):
            self._make_chain([self._observed.get(i) for i in range(_NUM_PASSES)], results)
            self._observed.clear()

    def _make_chain(self, observed: Sequence[ObservedPass | None], results: Sequence[torch.Tensor]) -> None:
        first, last = observed[0], observed[-1]
        assert last is not None
        order = {id(link.unit) for link in last.links}
        if first is None or (first.kind, first.links) != (last.kind, last.links) or len(order) != len(last.links):
            self.refuse("the two passes do not call each block once with the same kinds of arguments")
            return
        self._chains[last.kind] = Chain(
            last.links,
            [self._static_like(("in", last.kind, i), last.inputs) for i in range(_NUM_PASSES)],
            [self._static_like(("out", last.kind, i), list(results)) for i in range(_NUM_PASSES)],
            [CaptureState(link.unit.module) for link in last.links],
            [[PendingOutput.like(*output) for output in link.outputs] for link in last.links],
        )

    # The launch

    @property
    def expects_arguments(self) -> bool:
        """Whether a chain may be launched in this forward, which needs the arguments of both passes."""
        return self._allowed and bool(self._chains)

    def note_arguments(self, kind: Key, leaves: list[Any]) -> None:
        """Notes the arguments with which a pass calls the first block, before the pass pauses."""
        self._noted[self._lockstep.current] = (kind, leaves)

    def launch(self, unit: Unit, kind: Key) -> bool:
        """Launches the chain that begins with this block in both passes. Returns False if there is none, or it cannot
        be launched now. The first pass calls it when all passes have reached the first block, whose perturbed copies
        are made."""
        chain = self._chains.get(kind) if self._allowed and self._lockstep.current == 0 else None
        if chain is None or unit is not chain.links[0].unit:
            return False
        noted = [self._noted.get(index) for index in range(_NUM_PASSES)]
        if any(found is None or found[0] != kind for found in noted) or not self._can_launch(kind, chain):
            return False
        materialiser = self._block_store.materialiser
        num_pending = tuple(materialiser.pending(u) for u in chain.units[1:])
        if len(chain.graphs) == _MAX_GRAPHS and num_pending not in chain.graphs:
            return False
        if any(pending > 1 for pending in num_pending) or not materialiser.repeats_launches:
            self.refuse("ds_zo.stream.writeback_interval is not 1, or some blocks were not used in each step")
            return False
        if num_pending in chain.graphs and chain.graphs[num_pending] is None:
            try:
                chain.graphs[num_pending] = self._capture(partial(self._run, chain, num_pending, stored=_ignore))
            except Exception as error:
                self.stop(f"recording failed: {error}")
                self._lockstep.on_switch(0)
                unit.bind(materialiser.pair_views(unit)[0])
                return False
        self._start(chain, num_pending, [found[1] for found in noted if found is not None])
        return True

    def _can_launch(self, kind: Key, chain: Chain) -> bool:
        """Whether hooks and the tensors that modules keep allow a launch."""
        if any(_has_hooks(unit.module) for unit in chain.units) or any(s.has_hooks for s in chain.capture_states):
            self.refuse("forward hooks are registered on blocks or inside them")
            return False
        if any(state.is_stale for state in chain.capture_states):
            chain.num_moved += 1
            chain.graphs.clear()
            chain.capture_states = [CaptureState(unit.module) for unit in chain.units]
            if chain.num_moved > 1:
                del self._chains[kind]
                self.refuse("modules replace tensors that they keep")
                return False
        return True

    def _start(self, chain: Chain, num_pending: tuple[int, ...], arguments: Sequence[list[Any]]) -> None:
        """Launches the chain, by its graph if it is recorded."""
        materialiser = self._block_store.materialiser
        step = materialiser.log.length
        for statics, leaves in zip(chain.inputs, arguments, strict=True):
            tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
            for static, tensor in zip(statics, tensors, strict=True):
                static.copy_(tensor)
        self._step.fill_(step)
        graph = chain.graphs.setdefault(num_pending, None)
        with interrupts.deferred():  # see [Note: whole steps]
            if graph is None:
                self._run(chain, num_pending, stored=lambda unit: unit.folded(step))
            else:
                graph.replay()
                for unit, pending in zip(chain.units[1:], num_pending, strict=True):
                    if pending:
                        unit.folded(step)
        materialiser.release_block(chain.links[0].unit)
        self._running = chain
        self._positions = dict.fromkeys(range(_NUM_PASSES), 0)
        self._arguments = {i: [(leaf, _version(leaf)) for leaf in leaves] for i, leaves in enumerate(arguments)}
        self._lockstep.blocks_launched = True

    def _run(self, chain: Chain, num_pending: tuple[int, ...], *, stored: Callable[[Unit], None]) -> None:
        """Makes the perturbed copies of each block but the first, and runs each block in both passes. Calls `stored`
        for a block whose updated weights a kernel has stored."""
        materialiser = self._block_store.materialiser
        results: list[list[torch.Tensor]] = [[] for _ in range(_NUM_PASSES)]
        for position, link in enumerate(chain.links):
            if position > 0:
                pending = num_pending[position - 1]
                materialiser.launch_pair(link.unit, step=self._step, pending=pending)
                if pending:
                    stored(link.unit)
            for index, views in enumerate(materialiser.pair_views(link.unit)):
                self._lockstep.on_switch(index)
                torch.clear_autocast_cache()  # it holds casts of the other pass's copies
                link.unit.bind(views)
                inputs = _by_leaf(chain.links[0], chain.inputs[index])
                values = [
                    what if source == "value" else results[index][what] if source == "output" else inputs[what]
                    for source, what in link.sources
                ]
                args, kwargs = pytree.tree_unflatten(values, link.spec)
                results[index] = pytree.tree_flatten(self._forwards[id(link.unit)](*args, **kwargs))[0]
            link.unit.bind_stored()
        self._lockstep.on_switch(0)
        for statics, found in zip(chain.outputs, results, strict=True):
            for static, result in zip(statics, found, strict=True):
                static.copy_(result)

    def take_output(self, unit: Unit, leaves: Sequence[Any], spec: Any) -> Any:
        """Returns a block's output in the launched chain. Raises `ChainBroken` if the pass calls other blocks, or the
        block with other arguments, than the recorded pass."""
        chain, index = self._running, self._lockstep.current
        assert chain is not None
        position = self._positions[index]
        self._positions[index] += 1
        link = chain.links[position] if position < len(chain.links) else None
        if link is None or link.unit is not unit or link.spec != spec:
            raise ChainBroken(f"block {unit.name} was called in another order, or with arguments of another structure")
        before = chain.pending_outputs[position - 1] if position else []
        for leaf, (source, what) in zip(leaves, link.sources, strict=True):
            if source == "value":
                same = type(leaf) is type(what) and leaf == what
            elif source == "output":
                same = leaf is before[what]
            else:
                given, version = self._arguments[index][what]
                same = leaf is given and _version(leaf) == version
            if not same:
                raise ChainBroken(f"block {unit.name} was called with other arguments than when it was recorded")
        if position < len(chain.links) - 1:
            return pytree.tree_unflatten(chain.pending_outputs[position], link.output_spec)
        del self._arguments[index], self._noted[index]  # frees activations
        return pytree.tree_unflatten([t.clone() for t in chain.outputs[index]], link.output_spec)


def _by_leaf(link: Link, tensors: Sequence[torch.Tensor]) -> dict[int, torch.Tensor]:
    """The static tensors by the number of the leaf that each replaces in the first block's arguments."""
    numbers = [i for i, (source, _) in enumerate(link.sources) if source == "input"]
    return dict(zip(numbers, tensors, strict=True))


def _ignore(unit: Unit) -> None:
    """The kernels of a recording have not run, so no weights are stored."""


def _version(leaf: Any) -> int:
    return version_of(leaf) if isinstance(leaf, torch.Tensor) else 0


def _has_hooks(module: nn.Module) -> bool:
    """Whether the module has forward hooks besides those of the engine."""
    return any(
        not isinstance(hook, Hook)
        for hooks in (module._forward_hooks, module._forward_pre_hooks)
        for hook in hooks.values()
    )
