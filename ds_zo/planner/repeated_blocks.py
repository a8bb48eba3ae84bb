"""Traces one of several equal blocks, and takes its figures for the others.

[Note: repeated blocks] The plan of a model with 80 equal layers need not run 80 of them. Two blocks of one kind, whose
neighbours are of the same kinds too, take the same memory and the same work. One of them, its representative, runs; its
two neighbours run as well. The other blocks are replaced: their forward only returns tensors like the output of the
representative, and their sections of the trace become copies of its sections. The model's code outside the blocks
always runs, with the calls that it makes of each block.

Three comparisons check the assumption. A block that runs although it has a representative must have the same trace. The
code around a replaced block must have the same trace as the code around its representative. The inputs of a replaced
block, and the memory that stays allocated after it, must be the same. If one of them fails, the whole model is traced.
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

from ds_zo.planner.timeline import PassPhase, PassSection

_OF_ANY_MODULE = set(vars(nn.Module())) - {"training"}
_PLAIN = (bool, int, float, str, torch.dtype, torch.device, type(None))


class BlocksDifferError(Exception):
    """Raised where a block turns out to differ from its representative."""


def representatives_of(module: nn.Module, blocks: Sequence[nn.Module]) -> list[int]:
    """For each block the index of its representative: the first block of the same kind with neighbours of the same
    kinds. A block without an earlier one is its own representative. The first block of a kind represents itself only:
    tensors that its kind shares, such as a mask, are freed when its backward pass ends."""
    uses = Counter(id(p) for _, p in module.named_parameters(remove_duplicate=False))
    described = [_description(block, uses) for block in blocks]
    # Many blocks store their own index, for caches. An attribute that equals the index in every block is no difference.
    others = {key for i, it in enumerate(described) for key, value in it.items() if (type(value), value) != (int, i)}
    told_apart = [{key: it[key] for key in it if key in others} for it in described]
    kinds = [told_apart.index(it) for it in told_apart]
    is_first = [kind == i for i, kind in enumerate(kinds)]
    between = list(zip(is_first, [-1, *kinds], kinds, [*kinds[1:], -1], strict=False))
    return [between.index(neighbours) for neighbours in between]


def replaceable(representatives: Sequence[int]) -> set[int]:
    """The blocks that need not run: those that are neither a representative nor the neighbour of one."""
    run = {i + by for i in set(representatives) for by in (-1, 0, 1)}
    return set(range(len(representatives))) - run


def _description(block: nn.Module, uses: Mapping[int, int]) -> dict[tuple[str, str], Any]:
    """Everything that a block's forward may depend on except its inputs. A parameter that the model uses twice makes
    its block differ from all others."""
    found: dict[tuple[str, str], Any] = {}
    for name, module in block.named_modules():
        found[name, ""] = type(module)
        found |= {(name, key): _value(v) for key, v in vars(module).items() if key not in _OF_ANY_MODULE}
        for key, t in (*module._parameters.items(), *module._buffers.items()):
            found[name, key] = None if t is None else (*_like(t), id(module) if uses[id(t)] > 1 else None)
    return found


def _value(value: Any) -> Any:
    """A value that can be compared: plain values as they are, tensors by shape and dtype, other objects by identity."""
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


class _TensorForm:
    """Shape, strides and dtype of a tensor that is not kept alive, and whether the block's graph keeps it alive."""

    def __init__(self, t: torch.Tensor) -> None:
        self.shape, self.stride, self.dtype, self.device = t.shape, t.stride(), t.dtype, t.device
        self.requires_grad = t.requires_grad
        self.storage = weakref.ref(t.untyped_storage())
        self.is_kept = False
        """The block saved the tensor for its backward pass."""

    def make(self) -> torch.Tensor:
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=self.device)


@dataclass
class _Call:
    """Inputs and outputs of one call of a block."""

    inputs: Any
    first: _TensorForm
    """The first tensor among the inputs, which is the first output of the block before."""
    leaves: Sequence[Any] = ()
    """The leaves of its output, tensors as their forms."""
    structure: Any = None

    @property
    def outputs(self) -> list[_TensorForm]:
        return [leaf for leaf in self.leaves if isinstance(leaf, _TensorForm)]


class BlockCalls:
    """Records the calls of all blocks in a pass. A replaced block reads the call of its representative."""

    def __init__(self) -> None:
        self._made: dict[int, _Call] = {}

    def enter(self, block: int, args: Any, kwargs: Any) -> None:
        if block in self._made:
            raise BlocksDifferError
        for earlier in list(self._made.values())[-2:-1]:  # whose tensors the caller no longer holds
            for form in (earlier.first, *earlier.outputs[1:]):
                form.is_kept = form.storage() is not None
        leaves, structure = tree_flatten((args, kwargs))
        self._made[block] = _Call(([_value(v) for v in leaves], structure), _TensorForm(first_tensor(leaves)))

    def leave(self, block: int, output: Any) -> None:
        call = self._made[block]
        leaves, call.structure = tree_flatten(output)
        call.leaves = [_TensorForm(v) if isinstance(v, torch.Tensor) else v for v in leaves]

    def placeholder(self, block: int, representative: int) -> Callable[..., Any]:
        """The forward of a replaced block, which only makes the output."""

        def forward(*args: Any, **kwargs: Any) -> Any:
            made = self._made.get(representative)
            if made is None or not made.outputs or self._made[block].inputs != made.inputs:
                raise BlocksDifferError
            tensors = iter(_ReplacedBlock.apply(first_tensor((args, kwargs)), made))
            return tree_unflatten(
                [next(tensors) if isinstance(v, _TensorForm) else v for v in made.leaves], made.structure
            )

        return forward


class _ReplacedBlock(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, made: _Call) -> tuple[torch.Tensor, ...]:
        ctx.made = made
        outputs = tuple(form.make() for form in made.outputs)
        form_of = ((made.first, x), *zip(made.outputs, outputs, strict=True))
        ctx.save_for_backward(*(t for form, t in form_of if form.is_kept))
        ctx.mark_non_differentiable(*(t for form, t in form_of if t is not x and not form.requires_grad))
        ctx.set_materialize_grads(False)
        return outputs

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return ctx.made.first.make(), None


def with_representatives(
    sections: Sequence[PassSection], representatives: Sequence[int], replaced: set[int]
) -> list[PassSection]:
    """The sections of a pass in which all blocks ran."""
    found: dict[tuple[PassPhase, int], PassSection] = {}
    for section in sections:
        if section.block is not None:
            if (section.phase, section.block) in found:
                raise BlocksDifferError
            found[section.phase, section.block] = section
    for block, representative in enumerate(representatives):
        if block != representative:
            _check(found, block, representative, is_replaced=block in replaced)
    return [
        replace(found[s.phase, representatives[s.block]], block=s.block)
        if s.block in replaced and s.phase is not PassPhase.AROUND
        else s
        for s in sections
    ]


def _check(
    found: Mapping[tuple[PassPhase, int], PassSection], block: int, representative: int, *, is_replaced: bool
) -> None:
    """Raises unless a block has the trace of its representative. For a replaced block: unless its inputs, the code
    around it and the memory that it leaves allocated are the same."""
    ours, its = ([found.get((phase, i)) for phase in PassPhase] for i in (block, representative))
    if not is_replaced:
        are_equal = its == [s and replace(s, block=representative) for s in ours]
    else:
        (*ours_inside, ours_after), (*its_inside, its_after) = ours, its
        before = [s and s.cost for s in (found.get((PassPhase.AROUND, i - 1)) for i in (block, representative))]
        are_equal = its_after == (ours_after and replace(ours_after, block=representative))
        are_equal &= before[0] == before[1] and _remaining_nbytes(ours_inside) == _remaining_nbytes(its_inside)
    if not are_equal:
        raise BlocksDifferError


def _remaining_nbytes(sections: Sequence[PassSection | None]) -> list[int]:
    """The bytes that stay allocated after all sections of a block, gradients aside, and those of logits among them."""
    ends = [s.at_end for s in sections if s is not None]
    return [len(ends), sum(end.total - end.gradients for end in ends), sum(end.logits for end in ends)]
