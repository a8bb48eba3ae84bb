"""Blocks that are alike are traced once: the others are stood in for.

[Note: stand-ins] A plan of 80 equal layers need not run 80 of them. Blocks of one kind, between neighbours of the same
kinds, do the same to memory and take the same work, so one of them runs, with both its neighbours, and the others only
return a tensor like its own. Their stretches of the timeline are then the one's. What the model does around its blocks
is run in any case, with what it hands to each. Nothing is taken on trust that can be looked at: blocks that run though
they have a model must match it, as must what surrounds a stand-in, what it is called with and what is left of it. If
anything differs, the whole model is traced.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from ds_zo.planner.timeline import PassPhase, Stretch

_OF_ANY_MODULE = set(vars(nn.Module())) - {"training"}
_PLAIN = (bool, int, float, str, torch.dtype, torch.device, type(None))


class UnlikeError(Exception):
    """Blocks that looked alike are not."""


def models_of(module: nn.Module, blocks: Sequence[nn.Module]) -> list[int]:
    """For each block the first one like it between neighbours like its own: itself, if there was none before. A kind's
    first block is like no other: what its kind shares, as a mask, is gone when its backward pass is over."""
    uses = Counter(id(p) for _, p in module.named_parameters(remove_duplicate=False))
    described = [_description(block, uses) for block in blocks]
    # Blocks know their place, for caches. What is each one's place is no difference between them.
    others = {key for i, it in enumerate(described) for key, value in it.items() if (type(value), value) != (int, i)}
    told_apart = [{key: it[key] for key in it if key in others} for it in described]
    kinds = [told_apart.index(it) for it in told_apart]
    is_first = [kind == i for i, kind in enumerate(kinds)]
    between = list(zip(is_first, [-1, *kinds], kinds, [*kinds[1:], -1], strict=False))
    return [between.index(neighbours) for neighbours in between]


def stood_in_for(models: Sequence[int]) -> set[int]:
    """Blocks that need not run: those that are nobody's model, nor a model's neighbour."""
    run = {i + by for i in set(models) for by in (-1, 0, 1)}
    return set(range(len(models))) - run


def _description(block: nn.Module, uses: Mapping[int, int]) -> dict[tuple[str, str], Any]:
    """All that a block's forward may depend on beside its inputs. Parameters that are used twice are like no others."""
    found: dict[tuple[str, str], Any] = {}
    for name, module in block.named_modules():
        found[name, ""] = type(module)
        found |= {(name, key): _value(v) for key, v in vars(module).items() if key not in _OF_ANY_MODULE}
        for key, t in (*module._parameters.items(), *module._buffers.items()):
            found[name, key] = None if t is None else (*_like(t), id(module) if uses[id(t)] > 1 else None)
    return found


def _value(value: Any) -> Any:
    """What can be compared: plain values and tensors by what they are like, other objects by which they are."""
    if isinstance(value, torch.Tensor):
        return _like(value)
    if isinstance(value, (tuple, list)):
        return tuple(map(_value, value))
    if isinstance(value, partial):
        return _value((value.func, value.args, *value.keywords.items()))
    return value if isinstance(value, _PLAIN) else id(value)


def _like(t: torch.Tensor) -> tuple[Any, ...]:
    return t.shape, t.stride(), t.dtype, t.requires_grad


def first_tensor(values: Any) -> torch.Tensor:
    return next(t for t in tree_leaves(values) if isinstance(t, torch.Tensor))


class _Looks:
    """Of a tensor, without keeping it alive, and whether something else did."""

    def __init__(self, t: torch.Tensor) -> None:
        self.shape, self.stride, self.dtype, self.device = t.shape, t.stride(), t.dtype, t.device
        self.requires_grad = t.requires_grad
        self.storage = weakref.ref(t.untyped_storage())
        self.is_kept = False
        """By the block, for its backward pass."""

    def make(self) -> torch.Tensor:
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=self.device)


@dataclass
class _Call:
    """What a block was called with, and what it returned."""

    inputs: Any
    first: _Looks
    """Of its inputs, and the first output of the block before."""
    leaves: Sequence[Any] = ()
    """Of its output, tensors as looks."""
    structure: Any = None

    @property
    def outputs(self) -> list[_Looks]:
        return [leaf for leaf in self.leaves if isinstance(leaf, _Looks)]


class Calls:
    """Of blocks, as they are made: what stand-ins need to know of their models."""

    def __init__(self) -> None:
        self._made: dict[int, _Call] = {}

    def enter(self, block: int, args: Any, kwargs: Any) -> None:
        if block in self._made:
            raise UnlikeError
        for earlier in list(self._made.values())[-2:-1]:  # of which the caller has let go
            for looks in (earlier.first, *earlier.outputs[1:]):
                looks.is_kept = looks.storage() is not None
        leaves, structure = tree_flatten((args, kwargs))
        self._made[block] = _Call(([_value(v) for v in leaves], structure), _Looks(first_tensor(leaves)))

    def leave(self, block: int, output: Any) -> None:
        call = self._made[block]
        leaves, call.structure = tree_flatten(output)
        call.leaves = [_Looks(v) if isinstance(v, torch.Tensor) else v for v in leaves]

    def stand_in(self, block: int, model: int) -> Callable[..., Any]:
        """A forward that makes nothing but an output."""

        def forward(*args: Any, **kwargs: Any) -> Any:
            made = self._made.get(model)
            if made is None or not made.outputs or self._made[block].inputs != made.inputs:
                raise UnlikeError
            tensors = iter(_StandIn.apply(first_tensor((args, kwargs)), made))
            return tree_unflatten([next(tensors) if isinstance(v, _Looks) else v for v in made.leaves], made.structure)

        return forward


class _StandIn(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, made: _Call) -> tuple[torch.Tensor, ...]:
        ctx.made = made
        outputs = tuple(looks.make() for looks in made.outputs)
        looks_of = ((made.first, x), *zip(made.outputs, outputs, strict=True))
        ctx.save_for_backward(*(t for looks, t in looks_of if looks.is_kept))
        ctx.mark_non_differentiable(*(t for looks, t in looks_of if t is not x and not looks.requires_grad))
        ctx.set_materialize_grads(False)
        return outputs

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return ctx.made.first.make(), None


def with_models(stretches: Sequence[Stretch], models: Sequence[int], stood_in: set[int]) -> list[Stretch]:
    """The timeline as if all blocks had run."""
    found: dict[tuple[PassPhase, int], Stretch] = {}
    for stretch in stretches:
        if stretch.block is not None:
            if (stretch.phase, stretch.block) in found:
                raise UnlikeError
            found[stretch.phase, stretch.block] = stretch
    for block, model in enumerate(models):
        if block != model:
            _check(found, block, model, is_stand_in=block in stood_in)
    return [
        replace(found[s.phase, models[s.block]], block=s.block)
        if s.block in stood_in and s.phase is not PassPhase.AROUND
        else s
        for s in stretches
    ]


def _check(found: Mapping[tuple[PassPhase, int], Stretch], block: int, model: int, *, is_stand_in: bool) -> None:
    """That a block did as its model, or that its stand-in was handed, and left behind, the same."""
    ours, its = ([found.get((phase, i)) for phase in PassPhase] for i in (block, model))
    if not is_stand_in:
        alike = its == [s and replace(s, block=model) for s in ours]
    else:
        (*ours_inside, ours_after), (*its_inside, its_after) = ours, its
        before = [s and s.cost for s in (found.get((PassPhase.AROUND, i - 1)) for i in (block, model))]
        alike = its_after == (ours_after and replace(ours_after, block=model))
        alike &= before[0] == before[1] and _left(ours_inside) == _left(its_inside)
    if not alike:
        raise UnlikeError


def _left(stretches: Sequence[Stretch | None]) -> list[int]:
    """Of tensors, when all of a block's stretches are over."""
    ends = [s.at_end for s in stretches if s is not None]
    return [len(ends), sum(end.total - end.gradients for end in ends), sum(end.logits for end in ends)]
