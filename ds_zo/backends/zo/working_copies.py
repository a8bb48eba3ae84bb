"""Module hooks that point parameters at working copies while the user's forward runs: perturbed copies in a training
pass, copies without noise otherwise."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_map_only

from ds_zo.backends.common.chunked_head import DeferredLogits
from ds_zo.backends.common.plain_copies import Hook, StandIn
from ds_zo.backends.zo.guarded_weights import WeightGuard, unseen
from ds_zo.backends.zo.lockstep import Lockstep
from ds_zo.backends.zo.loss_terms import marked_results
from ds_zo.backends.zo.materialise import Materialiser
from ds_zo.backends.zo.outputs import floats_of, with_floats
from ds_zo.backends.zo.scratch_overlap import ScratchOverlap, has_room, overlapping_block, overlapping_outer
from ds_zo.backends.zo.store import ZOStore
from ds_zo.logs import show
from ds_zo.streaming.interrupts import interrupts
from ds_zo.streaming.placement import Placement
from ds_zo.streaming.units import Unit

_WAIT_FOR_ALL = object()
"""Request of a pass that waits until all passes have run the blocks before it."""
_NO_PASS = -1
"""Index used in place of a pass during an evaluation."""


class WorkingCopies:
    """Binds parameters to working copies while their module runs, and to the stored weights otherwise.

    All passes run a block before any pass goes on to the next block. An outer module (one outside the blocks) is
    materialised for each pass when that pass calls it. An outer module that is too large to lie beside copies of a
    block waits until all passes have left the block. A module that contains other modules may own parameters itself.
    These are needed through a whole pass (pass-long units, `Placement.pass_long`): each pass has its own copies, bound
    when it resumes.
    """

    def __init__(self, module: nn.Module, store: ZOStore, lockstep: Lockstep, *, num_passes: int, device: torch.device):
        self._module = module
        self._store = store
        self._lockstep = lockstep
        self._num_passes = num_passes
        self._device = device
        self._placement = store.blocks.placement
        self._training = False
        self._overlap = ScratchOverlap()
        self._guard = WeightGuard(self._placement.units)
        self._overlapping: dict[int, Unit] | None = None
        """While passes are probed: units whose copies overlap those of another module, by id. None: all units that
        are not pass-long are guarded ([Note: guarded weights])."""
        self._materialised_by: dict[int, nn.Module] = {}
        """For an evaluation: the module whose call materialised a unit that several modules may materialise, by the
        unit's id."""
        self._block_hooks: dict[int, list[Any]] = {}
        """Hook handles by the unit's id."""
        self._passes_ahead: set[int] = set()
        """Indices of passes that have left a block which other passes may still have to run."""
        self._open_head: tuple[int, nn.Module] | None = None
        """A pass and its head whose logits are deferred. Its weights stay materialised for the loss, until the pass
        enters another module or pauses."""
        self._pass_long_copies: dict[int, list[torch.Tensor]] = {}
        """Memory for one copy per pass of each pass-long unit, by the unit's id."""
        self._handles: list[Any] = []
        self._forwards: dict[nn.Module, StandIn] = {}
        """What stands in for the forward of each hooked module (`_call`)."""
        for unit in self._placement.blocks:
            enter, leave = partial(self._enter_block, unit), partial(self._leave_block, unit)
            self._block_hooks[id(unit)] = self._hook(unit.module, enter, leave)
        for outer in self._placement.entered_by:
            self._hook(outer, self._enter_outer, self._leave_outer)
        for unit in self._placement.pass_long:
            for hooked in {module, unit.module}:  # the unit's own module may be a container that is never called
                self._hook(hooked, partial(self._enter_pass_long, unit), partial(self._leave_pass_long, unit))

    def _hook(self, module: nn.Module, enter: Any, leave: Any) -> list[Any]:
        """Registers the two hooks on the module, and returns their handles."""
        # A compiled forward has a graph break here: moving weights and switching passes can't be traced.
        enter, leave = Hook(torch.compiler.disable(enter)), Hook(torch.compiler.disable(leave))
        made = [
            module.register_forward_pre_hook(enter, prepend=True),
            module.register_forward_hook(leave, always_call=True),
        ]
        self._handles += made
        if module not in self._forwards:
            self._forwards[module] = StandIn.put(module, "forward", partial(self._call, module.forward))
        return made

    def _call(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Calls the forward of a hooked module. An evaluation runs it without gradients: the next module overwrites its
        weights before a backward could read them."""
        with nullcontext() if self._training else torch.no_grad():
            return forward(*args, **kwargs)

    @property
    def _materialiser(self) -> Materialiser:
        return self._store.materialiser  # another one after the slots were made anew

    @property
    def streams(self) -> bool:
        """Whether any block streams from the host."""
        return any(unit.streamed for unit in self._placement.blocks)

    def close(self) -> None:
        """Removes all hooks."""
        for stand_in in self._forwards.values():
            stand_in.remove()
        while self._handles:
            self._handles.pop().remove()

    @contextmanager
    def training_pass(self) -> Iterator[None]:
        """Inside, modules run on perturbed copies. On exit, also after an error, every parameter is bound to the stored
        weights."""
        guarded = [*self._placement.blocks, *self._placement.leaf_units]
        try:
            self._training = True
            self._passes_ahead.clear()
            self._overlap.clear()
            self._materialiser.begin_pass()
            self._fill_pass_long()
            self.bind_pass_long(self._lockstep.current)
            for unit in guarded:
                self._put_guard(unit)
            yield
        finally:
            with interrupts.deferred():  # else Ctrl-C would leave weights guarded, and a save after it would raise
                self._training, self._open_head = False, None
                for unit in guarded:
                    self._guard.lift(unit)
                self._materialiser.end_pass()
                self._bind_all_stored()
                self._overlap.clear()

    @contextmanager
    def probing(self) -> Iterator[dict[int, Unit]]:
        """Context of passes of which it is not known yet where they use weights. Yields units, by id, whose copies
        overlap those of another module in these passes."""
        self._overlapping = {}
        try:
            yield self._overlapping
        finally:
            self._overlapping = None

    def _put_guard(self, unit: Unit) -> None:
        if self._overlapping is None:
            self._guard.put(unit)

    def _note_overlap(self, units: Iterable[Unit]) -> None:
        """Notes units whose copies overlap those of another module. Raises in passes that are not probed."""
        for unit in units:
            if self._overlapping is None:
                raise unseen(f"module {unit.name} was used while another module ran", unit)
            self._overlapping[id(unit)] = unit

    def _bind_all_stored(self) -> None:
        """Binds every unit that is still materialised to the stored weights."""
        for unit in self._placement.units:
            if unit.in_use:
                self._materialiser.hide(unit)

    @property
    def _index(self) -> int:
        """Index of the pass that is running, or `_NO_PASS` in an evaluation."""
        return self._lockstep.current if self._training else _NO_PASS

    # Blocks

    def _enter_block(self, unit: Unit, module: nn.Module, args: Any) -> None:
        """Pre-hook of a block: materialises its weights for the pass that calls it."""
        self._close_head()
        enclosing = self._overlap.enclosing(self._index)
        if not self._training:
            self._enter_clean(unit, self._temporary_scratch(unit) if enclosing else self._materialiser.scratch)
        else:
            if enclosing:
                self._note_overlap(overlapping_block(unit, enclosing, streams=self.streams))
            if self._lockstep.inside:
                self._pause(unit)
            else:
                self._make_ready(unit, self._lockstep.current, last=True)
        self._overlap.enter(self._index, module, (unit,))

    def _temporary_scratch(self, *units: Unit) -> torch.Tensor:
        """Memory for copies of the units, apart from the shared scratch."""
        return torch.empty(sum(unit.scratch_nbytes for unit in units), dtype=torch.uint8, device=self._device)

    def _pause(self, request: Any) -> None:
        """Pauses this pass until the hub has answered the request. All passes are then at the same block."""
        self._lockstep.pause(request)
        self._passes_ahead.discard(self._lockstep.current)

    def _leave_block(self, unit: Unit, module: nn.Module, args: Any, output: Any) -> Any:
        """Hook after a block: releases its weights once the last pass has run it."""
        self._overlap.leave(self._index, module)
        kept = _outside_shared_buffers(output, self._materialiser)
        if not self._training:
            self._leave_clean(unit)
            return self._marked(module, output, kept)
        if self._lockstep.inside:
            self._passes_ahead.add(self._lockstep.current)
            if self._lockstep.current < self._num_passes - 1:
                return kept  # later passes have still to run the block
        self._materialiser.hide(unit)
        self._put_guard(unit)
        return kept

    def ready(self, request: Any, index: int) -> None:
        """Called by the hub when all passes have made the same request: makes pass `index`'s copy of the requested
        block."""
        if request is not _WAIT_FOR_ALL:
            self._make_ready(request, index, last=index == self._num_passes - 1)

    @torch.no_grad()
    def _make_ready(self, unit: Unit, index: int, *, last: bool) -> None:
        """Materialises the block for pass `index`, and binds its parameters to that copy."""
        views = self._materialiser.materialise_block(unit, index=index, last=last)
        if views is not None:
            self._guard.lift(unit)
            self._materialiser.show(unit, views)

    # Modules outside the blocks

    def _enter_outer(self, module: nn.Module, args: Any) -> None:
        """Pre-hook of an outer module: materialises the units that it owns."""
        self._close_head()
        at = self._placement.nested_at.get(id(module))
        entering = tuple(self._placement.entered_by[module])
        enclosing = self._overlap.enclosing(self._index)
        if self._training:
            self._note_overlap(overlapping_outer(entering, enclosing, at=at))
            self._wait_for_room((at or 0) + sum(unit.scratch_nbytes for unit in entering))
        self._overlap.enter(self._index, module, entering)
        shares = self._training or has_room(enclosing, at=at)
        scratch = self._materialiser.scratch[at:] if shares else self._temporary_scratch(*entering)
        for unit in entering:
            if self._training:
                self._guard.lift(unit)
                with torch.no_grad():
                    views = self._materialiser.materialise_outer(unit, index=self._index, scratch=scratch)
                    self._materialiser.show(unit, views)
            else:
                self._enter_clean(unit, scratch)
            scratch = scratch[unit.scratch_nbytes :]

    def _wait_for_room(self, nbytes: int) -> None:
        """Waits for the other passes if `nbytes` of scratch would overwrite a block's second copy that they still read.
        Every pass reaches this point with the same `nbytes`, so all of them pause."""
        is_ahead = self._lockstep.inside and self._lockstep.current in self._passes_ahead
        if is_ahead and nbytes > self._materialiser.free_nbytes:
            self._pause(_WAIT_FOR_ALL)

    def _leave_outer(self, module: nn.Module, args: Any, output: Any) -> Any:
        """Hook after an outer module: binds its units to the stored weights."""
        if isinstance(output, DeferredLogits):
            self._open_head = self._index, module
            return None
        kept = _outside_shared_buffers(output, self._materialiser)
        if self._training:
            self._hide_outer(self._index, module)
            return kept
        for unit in reversed(self._overlap.leave(self._index, module)):
            self._leave_clean(unit)
        return self._marked(module, output, kept)

    def _hide_outer(self, index: int, module: nn.Module) -> None:
        """Ends the use of an outer module in pass `index`."""
        for unit in reversed(self._overlap.leave(index, module)):
            self._materialiser.hide(unit)
            self._put_guard(unit)

    # Heads whose logits are deferred

    def use_of(self, head: nn.Module, *, chunk_nbytes: int) -> Callable[[], AbstractContextManager[None]] | None:
        """See `PassWeights`. Weights of modules inside the head are materialised for each chunk."""
        if _copied_nbytes_inside(head, self._placement) > chunk_nbytes:
            return None
        return partial(self._use_again, head, index=self._index, version=self._store.version)

    @contextmanager
    def _use_again(self, head: nn.Module, *, index: int, version: tuple[int, int]) -> Iterator[None]:
        """Context in which `head` has the weights of pass `index` of a forward at `version`."""
        if version != self._store.version or (self._training and index != self._index):
            raise RuntimeError(
                "outputs.logits are computed when they are read, with the weights of their own pass, and these exist "
                "until engine.step or until weights are loaded: read them before either, and in an objective in the "
                "call that gets them"
            )
        if self._training:
            with self._opened(head):
                yield
            return
        self._training, self._lockstep.current = True, index
        try:
            with self.probing():  # nothing is guarded
                self.bind_pass_long(index)
                with self._opened(head):
                    yield
        finally:
            with interrupts.deferred():
                self._training = False
                self._overlap.clear()
                self._bind_all_stored()

    @contextmanager
    def _opened(self, head: nn.Module) -> Iterator[None]:
        """Context of a pass in which the head's own weights are materialised."""
        index = self._index
        if self._open_head == (index, head):
            self._open_head = None
        elif head in self._placement.entered_by:
            self._enter_outer(head, ())
        try:
            yield
        finally:
            self._hide_outer(index, head)

    def _close_head(self) -> None:
        """Ends the use of the head that is open, if there is one."""
        if self._open_head is not None:
            index, head = self._open_head
            self._open_head = None
            self._hide_outer(index, head)

    def switch(self, index: int) -> None:
        """Pass `index` starts or resumes."""
        self._close_head()
        self.bind_pass_long(index)

    # Outside training

    def _enter_clean(self, unit: Unit, scratch: torch.Tensor) -> None:
        """Binds the unit to a copy without noise."""
        with torch.inference_mode(False), torch.no_grad():
            views = self._materialiser.materialise_for_forward(unit, scratch=scratch)
            self._materialiser.show(unit, views)

    def _leave_clean(self, unit: Unit) -> None:
        """Binds the unit to the stored weights."""
        if not unit.in_use:  # entering failed
            return
        with torch.inference_mode(False), torch.no_grad():
            self._materialiser.release_clean(unit)
        if torch.is_autocast_enabled(self._device.type):
            torch.clear_autocast_cache()  # it would keep a cast of every block, also of overwritten weights

    def _marked(self, module: nn.Module, output: Any, kept: Any) -> Any:
        """Marks the result of a module that is called in train mode outside the engine's forward. Such a result has no
        graph; see [Note: terms that ZO cannot see]. `kept` is what the hook returns otherwise."""
        if not (module.training and torch.is_grad_enabled()):
            return kept
        output = output if kept is None else kept
        return with_floats(output, marked_results(floats_of(output), module))

    def recover(self) -> None:
        """Cleans up before a training forward if Ctrl-C interrupted an evaluation. PyTorch calls forward hooks after an
        `Exception`, but not after a `KeyboardInterrupt`."""
        if not any(unit.in_use for unit in self._placement.units):
            return
        self._materialised_by.clear()
        self._overlap.clear()
        with torch.no_grad():
            self._materialiser.end_pass()
        self._bind_all_stored()

    # Pass-long units: parameters that are needed through a whole pass

    @torch.no_grad()
    def _fill_pass_long(self) -> None:
        """Makes every pass's copy of every pass-long unit."""
        for unit in self._placement.pass_long:
            if id(unit) not in self._pass_long_copies:
                self._pass_long_copies[id(unit)] = [
                    torch.empty(unit.scratch_nbytes, dtype=torch.uint8, device=self._device)
                    for _ in range(self._num_passes)
                ]
            for index, copy in enumerate(self._pass_long_copies[id(unit)]):
                self._materialiser.materialise_outer(unit, index=index, scratch=copy)

    def bind_pass_long(self, index: int) -> None:
        """Binds pass-long units to the copies of pass `index`, which starts or resumes."""
        if not self._training:
            return
        for unit in self._placement.pass_long:
            outs = unit.outs(self._pass_long_copies[id(unit)][index])
            self._materialiser.show(unit, unit.views(unit.planes(unit.store_buffer), outs))

    def _enter_pass_long(self, unit: Unit, module: nn.Module, args: Any) -> None:
        """Pre-hook for a pass-long unit: materialises it for an evaluation of `module`, unless the evaluation of an
        enclosing module has done so. A training pass has bound it already."""
        if not unit.in_use:
            self._enter_clean(unit, self._temporary_scratch(unit))
            self._materialised_by[id(unit)] = module

    def _leave_pass_long(self, unit: Unit, module: nn.Module, args: Any, output: Any) -> Any:
        """Hook that ends what `_enter_pass_long` began for this module."""
        if self._materialised_by.get(id(unit)) is not module:
            return None
        kept = _outside_shared_buffers(output, self._materialiser)
        del self._materialised_by[id(unit)]
        self._leave_clean(unit)
        return self._marked(module, output, kept)

    def make_pass_long(self, units: Sequence[Unit]) -> None:
        """Gives each pass its own copies of the units. Their weights are used outside their own module's forward (a
        tied head by `F.linear`, say), or their copies would overlap those of another module. None of them may
        stream."""
        for unit in units:
            owners = _owners(unit)
            if unit.is_block:
                self._placement.blocks.remove(unit)
                for handle in self._block_hooks.pop(id(unit)):
                    handle.remove()
            else:
                self._placement.leaf_units.remove(unit)
                owners = {m for m, entered in self._placement.entered_by.items() if unit in entered}
                for m in owners:
                    self._placement.entered_by[m].remove(unit)
            self._placement.pass_long.append(unit)
            unit.module = self._module
            for hooked in {self._module, *owners}:  # the whole model, or a part that is called by itself
                self._hook(hooked, partial(self._enter_pass_long, unit), partial(self._leave_pass_long, unit))
        blocks = any(unit.is_block for unit in units)
        show(
            f"ds_zo: {', '.join(u.name for u in units)}: these weights are used outside their module's own forward, or "
            f"while another module runs, so a step keeps {self._num_passes} copies of them"
            f"{'; name the list whose entries are called whole (ds_zo.stream.blocks)' if blocks else ''}"
        )


def _owners(unit: Unit) -> set[nn.Module]:
    """The block's module, and the modules inside it that own parameters of the unit."""
    own = {id(placed.parameter) for placed in unit.placed}
    return {unit.module, *(m for m in unit.module.modules() if any(id(p) in own for p in m._parameters.values()))}


def _outside_shared_buffers(output: Any, materialiser: Materialiser) -> Any:
    """Returns the output with copies in place of tensors that lie in a shared buffer (`is_in_shared_buffer`). Returns
    None if there are no such tensors."""
    if isinstance(output, torch.Tensor):
        return output.detach().clone() if materialiser.is_in_shared_buffer(output) else None
    is_flat = isinstance(output, tuple) and all(x is None or isinstance(x, torch.Tensor) for x in output)
    leaves = output if is_flat else tree_flatten(output)[0]  # flattening takes longer than a small block's launches
    if not any(isinstance(x, torch.Tensor) and materialiser.is_in_shared_buffer(x) for x in leaves):
        return None
    return tree_map_only(
        torch.Tensor, lambda leaf: leaf if (own := _outside_shared_buffers(leaf, materialiser)) is None else own, output
    )


def _copied_nbytes_inside(head: nn.Module, placement: Placement) -> int:
    """Bytes of the weights that each call of the head copies for modules inside it."""
    units = [unit for m in head.modules() if m is not head for unit in placement.entered_by.get(m, ())]
    copied = [p for unit in units for part in unit.parts if not part.direct for p in part.placed]
    return sum(p.parameter.nbytes for p in copied)
