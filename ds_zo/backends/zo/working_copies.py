"""Hooks that put working copies under the user's forward: perturbed ones in a training pass, clean ones otherwise."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_map_only

from ds_zo.backends.common.plain_copies import Hook
from ds_zo.backends.common.stray_weights import used_outside
from ds_zo.backends.zo.block_store import ZOBlockStore
from ds_zo.backends.zo.lockstep import Lockstep
from ds_zo.backends.zo.loss_terms import marked_results
from ds_zo.backends.zo.outputs import floats_of, with_floats
from ds_zo.backends.zo.scratch_overlap import ScratchOverlap, has_room
from ds_zo.logs import show
from ds_zo.streaming.units import Unit

_ALL_HERE = object()
"""What a pass asks for that waits for the others to have run the blocks it has left."""
_NO_PASS = -1
"""Stands for an evaluation where passes are counted."""


class WorkingCopies:
    """While a module runs, its parameters are the copies of the pass that runs it; between visits they are at home.

    Blocks are visited by all passes before any goes on to the next one. Modules around them are visited by each pass as
    it comes by; those that are too large to lie beside copies of a block, after all have left it.
    Parameters of modules that contain other modules are alive through a whole pass (`ambient`): each pass has copies of
    its own, swapped in when it goes on.
    """

    def __init__(
        self, module: nn.Module, block_store: ZOBlockStore, lockstep: Lockstep, *, num_passes: int, device: torch.device
    ):
        self._module = module
        self._block_store = block_store
        self._lockstep = lockstep
        self._num_passes = num_passes
        self._device = device
        self._placement = block_store.placement
        self._training = False
        self.visited: set[int] = set()
        """Units whose parameters are working copies now, by id."""
        self._entered: dict[int, list[Unit]] = {}
        """What a module outside the blocks brought up for itself, by `id(module)`."""
        self._kept: set[int] = set()
        """Units that became ambient because they are used outside their module, by id."""
        self.nesting = ScratchOverlap()
        self._alone = {id(unit): (unit,) for unit in self._placement.blocks}
        self._brought_by: dict[int, nn.Module] = {}
        """The module whose evaluation brought up a unit that several modules may bring, by the unit's id."""
        self._block_hooks: dict[int, list[Any]] = {}
        """Handles by the unit's id."""
        self._unvisited: dict[int, list[Any]] = {}
        """Units that no training forward has visited yet, by id, and the handles that guard blocks."""
        self._went_on: set[int] = set()
        """Passes that have left a block which others may still have to run."""
        self._grad_modes: list[bool] = []
        self._ambient: dict[int, list[torch.Tensor]] = {}
        self._handles: list[Any] = []
        for unit in self._placement.blocks:
            enter, leave = partial(self._enter_block, unit), partial(self._leave_block, unit)
            self._block_hooks[id(unit)] = self._hook(unit.module, enter, leave)
        self._unvisited |= {id(u): [] for u in (*self._placement.blocks, *self._placement.leaf_units) if u.trainable}
        for edge in self._placement.entered_by:
            self._hook(edge, self._enter_edge, self._leave_edge)
        for unit in self._placement.ambient:
            for visitor in {module, unit.module}:  # its own may be a container that nobody calls
                self._hook(visitor, partial(self._enter_ambient, unit), partial(self._leave_ambient, unit))

        before = Hook(torch.compiler.disable(self._enter_unwatched))
        self._probation = module.register_forward_pre_hook(before, prepend=True)

    def _hook(self, module: nn.Module, enter: Any, leave: Any) -> list[Any]:
        # A compiled forward breaks here: what moves weights and switches passes can't be traced.
        enter, leave = Hook(torch.compiler.disable(enter)), Hook(torch.compiler.disable(leave))
        made = [
            module.register_forward_pre_hook(enter, prepend=True),
            module.register_forward_hook(leave, always_call=True),
        ]
        self._handles += made
        return made

    @property
    def streams(self) -> bool:
        return any(unit.streamed for unit in self._placement.blocks)

    def end_probation(self) -> None:
        """A training forward was watched."""
        self._probation.remove()

    def _enter_unwatched(self, module: nn.Module, args: Any) -> None:
        """An evaluation of a model that was resumed, before a training forward has shown which weights are used outside
        their modules: all that are not blocks' are brought up to date, as that forward would."""
        if not self._training:
            with torch.inference_mode(False), torch.no_grad():
                self._block_store.materialiser.fold_now(*self._placement.leaf_units, *self._placement.ambient)

    def close(self) -> None:
        self.end_probation()
        while self._handles:
            self._handles.pop().remove()

    @contextmanager
    def training_pass(self) -> Iterator[None]:
        """Visits inside are of perturbed copies. However it ends, every parameter is at home afterwards."""
        try:
            self._training = True
            self._went_on.clear()
            self.nesting.clear()
            self._block_store.materialiser.begin()
            self._fill_ambient()
            yield
        finally:
            self._training = False
            self._block_store.materialiser.end()
            for unit in self._placement.units:
                if id(unit) in self.visited:
                    unit.bind_stored()
            self.visited.clear()
            self.nesting.clear()

    @property
    def _index(self) -> int:
        """The pass that is running."""
        return self._lockstep.current if self._training else _NO_PASS

    # Blocks

    def _enter_block(self, unit: Unit, module: nn.Module, args: Any) -> None:
        around = self.nesting.around(self._index)
        if not self._training:
            self._enter_clean(unit, self._aside(unit) if around else self._block_store.materialiser.scratch)
        else:
            _remove(self._unvisited.pop(id(unit), ()))
            if around:
                self.nesting.note_block(unit, around, streams=self.streams)
            if self._lockstep.inside:
                self._pause(unit)
            else:
                self._make_ready(unit, self._lockstep.current, last=True)
        self.nesting.enter(self._index, self._alone[id(unit)])
        self.visited.add(id(unit))

    def _aside(self, *units: Unit) -> torch.Tensor:
        return torch.empty(sum(unit.scratch_nbytes for unit in units), dtype=torch.uint8, device=self._device)

    def _pause(self, asked: Any) -> None:
        self._lockstep.pause(asked)
        self._went_on.discard(self._lockstep.current)

    def _leave_block(self, unit: Unit, module: nn.Module, args: Any, output: Any) -> Any:
        self.nesting.leave(self._index, self._alone[id(unit)])
        kept = self._saved_from_reuse(output)
        if not self._training:
            self._leave_clean(unit)
            return self._marked(module, output, kept)
        if self._lockstep.inside:
            self._went_on.add(self._lockstep.current)
            if self._lockstep.current < self._num_passes - 1:
                return kept  # the other passes have still to run it
        self._block_store.materialiser.leave_block(unit)
        self.visited.discard(id(unit))
        return kept

    def _saved_from_reuse(self, output: Any) -> Any:
        """The output with copies of what is a view of weights, or None where nothing is: their memory is the next
        unit's."""
        if isinstance(output, torch.Tensor):
            return output.detach().clone() if self._block_store.materialiser.lends(output) else None
        is_flat = isinstance(output, tuple) and all(x is None or isinstance(x, torch.Tensor) for x in output)
        leaves = output if is_flat else tree_flatten(output)[0]  # which takes longer than a small block's launches
        if not any(isinstance(leaf, torch.Tensor) and self._block_store.materialiser.lends(leaf) for leaf in leaves):
            return None
        return tree_map_only(
            torch.Tensor, lambda leaf: leaf if (own := self._saved_from_reuse(leaf)) is None else own, output
        )

    def ready(self, asked: Any, index: int) -> None:
        """All passes have asked for a block: makes pass `index`'s copy of it."""
        if asked is not _ALL_HERE:
            self._make_ready(asked, index, last=index == self._num_passes - 1)

    @torch.no_grad()
    def _make_ready(self, unit: Unit, index: int, *, last: bool) -> None:
        views = self._block_store.materialiser.perturb_block(unit, index=index, last=last)
        if views is not None:
            unit.bind(views)

    # Modules around them

    def _enter_edge(self, module: nn.Module, args: Any) -> None:
        at = self._placement.nested_at.get(id(module))
        # A unit that is kept through the whole pass is entered here only where its module is called by itself.
        there = self._kept & self.visited
        entering = [unit for unit in self._placement.entered_by[module] if id(unit) not in there]
        around = self.nesting.around(self._index)
        if self._training:
            self.nesting.note_edge(entering, around, at=at)
            self._wait_for_room((at or 0) + sum(unit.scratch_nbytes for unit in entering))
        self._entered[id(module)] = entering
        self.nesting.enter(self._index, entering)
        shares = self._training or has_room(around, at=at)
        scratch = self._block_store.materialiser.scratch[at:] if shares else self._aside(*entering)
        for unit in entering:
            if self._training:
                with torch.no_grad():
                    unit.bind(
                        self._block_store.materialiser.perturb_edge(unit, index=self._lockstep.current, scratch=scratch)
                    )
                self.visited.add(id(unit))
                self._unvisited.pop(id(unit), None)
            else:
                self._enter_clean(unit, scratch)
            scratch = scratch[unit.scratch_nbytes :]

    def _wait_for_room(self, nbytes: int) -> None:
        """Before so much of the scratch is written. Every pass comes by here alike, and so they meet."""
        is_ahead = self._lockstep.inside and self._lockstep.current in self._went_on
        if is_ahead and nbytes > self._block_store.materialiser.free_nbytes:
            self._pause(_ALL_HERE)

    def _leave_edge(self, module: nn.Module, args: Any, output: Any) -> Any:
        kept = self._saved_from_reuse(output)
        entered = self._entered.pop(id(module), [])
        self.nesting.leave(self._index, entered)
        for unit in reversed(entered):
            if self._training:
                unit.bind_stored()
                self.visited.discard(id(unit))
            else:
                self._leave_clean(unit)
        return kept if self._training else self._marked(module, output, kept)

    # Outside training

    def _enter_clean(self, unit: Unit, scratch: torch.Tensor) -> None:
        """Without gradients: the working copy is gone when a backward would need it."""
        with torch.inference_mode(False), torch.no_grad():
            unit.bind(self._block_store.materialiser.clean(unit, scratch=scratch))
        self._grad_modes.append(torch.is_grad_enabled())
        torch.set_grad_enabled(False)
        self.visited.add(id(unit))

    def _leave_clean(self, unit: Unit) -> None:
        if id(unit) not in self.visited:  # entering failed
            return
        with torch.inference_mode(False), torch.no_grad():
            self._block_store.materialiser.leave_clean(unit)
        if torch.is_autocast_enabled(self._device.type):
            torch.clear_autocast_cache()  # it would keep a cast of every block, and of weights that are gone
        torch.set_grad_enabled(self._grad_modes.pop())
        self.visited.discard(id(unit))

    def _marked(self, module: nn.Module, output: Any, kept: Any) -> Any:
        """A call in train mode, outside the engine's forward, has a result without a graph. It is marked for
        [Note: terms that ZO cannot see]. `kept` is what the hook returns otherwise."""
        if not (module.training and torch.is_grad_enabled()):
            return kept
        output = output if kept is None else kept
        return with_floats(output, marked_results(floats_of(output), module))

    def recover(self) -> None:
        """Before a training forward: puts back what an evaluation left that Ctrl-C broke off. Torch calls hooks after
        an error, but not after that."""
        if not self._grad_modes:
            return
        if self._grad_modes[0]:
            torch.set_grad_enabled(True)
        self._grad_modes.clear()
        self._entered.clear()
        self._brought_by.clear()
        self.nesting.clear()
        with torch.no_grad():
            self._block_store.materialiser.end()
        for unit in self._placement.units:
            if id(unit) in self.visited:
                unit.bind_stored()
        self.visited.clear()

    # Parameters that are alive through a whole pass

    @torch.no_grad()
    def _fill_ambient(self) -> None:
        for unit in self._placement.ambient:
            if id(unit) not in self._ambient:
                self._ambient[id(unit)] = [
                    torch.empty(unit.scratch_nbytes, dtype=torch.uint8, device=self._device)
                    for _ in range(self._num_passes)
                ]
            for index, copy in enumerate(self._ambient[id(unit)]):
                self._block_store.materialiser.perturb_edge(unit, index=index, scratch=copy)

    def swap_ambient(self, index: int) -> None:
        """Pass `index` starts or goes on."""
        if not self._training:
            return
        for unit in self._placement.ambient:
            unit.bind(unit.views(unit.planes(unit.store_buffer), unit.outs(self._ambient[id(unit)][index])))
            self.visited.add(id(unit))

    def _enter_ambient(self, unit: Unit, module: nn.Module, args: Any) -> None:
        if self._training:
            if module is self._module and not self._lockstep.inside:
                self.swap_ambient(self._lockstep.current)
        else:
            self._bring_clean(unit, module)

    def _leave_ambient(self, unit: Unit, module: nn.Module, args: Any, output: Any) -> Any:
        if self._training or self._brought_by.get(id(unit)) is not module:
            return None
        del self._brought_by[id(unit)]
        self._leave_clean(unit)
        return self._marked(module, output, None)

    def _bring_clean(self, unit: Unit, module: nn.Module) -> None:
        """For an evaluation of `module`, unless the evaluation of a module around it has brought the unit."""
        if id(unit) not in self.visited:
            self._enter_clean(unit, self._aside(unit))
            self._brought_by[id(unit)] = module

    def make_ambient(self, units: Sequence[Unit]) -> None:
        """Their weights are used outside their own module's forward (a tied head by `F.linear`, say), or would lie
        where those of another module do. None of them streams."""
        if not units:
            return
        for unit in units:
            visitors = {self._module}  # from here on it is entered with the whole model
            _remove(self._unvisited.pop(id(unit), ()))
            if unit.is_block:
                self._placement.blocks.remove(unit)
                _remove(self._block_hooks.pop(id(unit)))
                visitors |= _owners(unit)
            else:
                self._placement.leaf_units.remove(unit)
            self._placement.ambient.append(unit)
            self._kept.add(id(unit))
            unit.module = self._module
            for visitor in visitors:
                self._hook(visitor, partial(self._enter_ambient, unit), partial(self._leave_ambient, unit))
        blocks = any(unit.is_block for unit in units)
        show(
            f"ds_zo: {', '.join(u.name for u in units)}: used outside the module's own forward, or while others' are: "
            f"kept as {self._num_passes} copies during a step"
            f"{'; name the list whose entries are called whole (ds_zo.stream.blocks)' if blocks else ''}"
        )

    def crowd(self, units: Iterable[Unit]) -> None:
        """They are to be made ambient."""
        self.nesting.crowded |= {id(unit): unit for unit in units}

    def take_crowded(self) -> list[Unit]:
        found = list(self.nesting.crowded.values())
        self.nesting.crowded.clear()
        return found

    # Units that the first training forward did not visit

    @property
    def has_unvisited(self) -> bool:
        return bool(self._unvisited)

    def guard_unvisited(self) -> None:
        """A later forward may run modules inside them without the block. Modules that are not run cost nothing."""
        for unit in self._placement.blocks:
            if id(unit) in self._unvisited:
                enter, leave = partial(self._enter_inside, unit), partial(self._leave_ambient, unit)
                for inside in _owners(unit) - {unit.module}:
                    self._unvisited[id(unit)] += self._hook(inside, enter, leave)

    def _enter_inside(self, unit: Unit, module: nn.Module, args: Any) -> None:
        if not self._training:
            self._bring_clean(unit, module)
        elif id(unit) not in self.visited and unit.trainable:
            if self.streams:
                raise used_outside(next(p.name for p in unit.placed))
            self.crowd([unit])


def _remove(handles: Iterable[Any]) -> None:
    for handle in handles:
        handle.remove()


def _owners(unit: Unit) -> set[nn.Module]:
    """Modules of a block that have parameters of the unit, and the block."""
    own = {id(placed.parameter) for placed in unit.placed}
    return {unit.module, *(m for m in unit.module.modules() if any(id(p) in own for p in m._parameters.values()))}
