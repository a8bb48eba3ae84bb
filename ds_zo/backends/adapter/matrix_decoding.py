"""Decodes the weights of a block one matrix at a time, where those of a whole block would take too much device memory.

[Note: decoding by matrix] While a block is materialised, its encoded parameters are of a subclass of Parameter whose
`__torch_function__` decodes. A matrix product gets the decoded weight in scratch memory that all matrices share. Where
autograd would save that memory for the backward pass, it saves a reference to the stored matrix, and the backward pass
decodes the matrix again. Any other function gets a decoded copy of its own, because its result may share memory with
the copy. DoRA reads weights in this way. Stacks of experts that are decoded in groups are such parameters too:
[Note: experts in groups] in `experts.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from ds_zo.ops import Planes
from ds_zo.streaming.intercepted import is_harmless, parameters_in, without_interception
from ds_zo.streaming.units import Part, PlacedParameter, Unit

_PRODUCTS: frozenset[Callable[..., Any]] = frozenset({F.linear, torch.addmm, torch.mm, torch.bmm, torch.matmul})
"""Functions whose results never share memory with a weight. GPT-2's layers call addmm."""


@dataclass(frozen=True)
class EncodedMatrix:
    """An encoded parameter of a materialised block, or a stack of experts whose scratch holds one group of them."""

    part: Part
    placed: PlacedParameter
    stored: Planes
    scratch: torch.Tensor

    def in_scratch(self) -> torch.Tensor:
        return self._decoded(self.scratch)

    def experts_in_scratch(self, experts: range) -> torch.Tensor:
        return self._decoded(self.scratch, experts=experts)

    def copy(self) -> torch.Tensor:
        return self._decoded(self.scratch.new_empty(self.part.decoded_nbytes(self.placed)))

    def _decoded(self, memory: torch.Tensor, *, experts: range | None = None) -> torch.Tensor:
        with torch.inference_mode(False), torch.no_grad():
            return self.part.decode_one_(memory, self.stored, self.placed, experts=experts)

    def pack(self, tensor: torch.Tensor) -> Any:
        """What autograd saves in place of a tensor that shares memory with the scratch; else the tensor."""
        if tensor.untyped_storage().data_ptr() != self.scratch.untyped_storage().data_ptr():
            return tensor
        return _Saved(self, tensor.size(), tensor.stride(), tensor.storage_offset())


@dataclass(frozen=True)
class _Saved:
    """A view of a decoded matrix, without its memory."""

    matrix: EncodedMatrix
    size: torch.Size
    stride: tuple[int, ...]
    offset: Any


def _unpack(saved: Any) -> torch.Tensor:
    if isinstance(saved, torch.Tensor):
        return saved
    return saved.matrix.in_scratch().as_strided(saved.size, saved.stride, saved.offset)


class EncodedParameter(nn.Parameter):
    """A parameter without values of its own, which is decoded when torch uses it. See [Note: decoding by matrix]."""

    _ds_zo_matrix: EncodedMatrix

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        with without_interception():
            if is_harmless(func) or func is torch.Tensor.untyped_storage:
                return func(*args, **kwargs)
            used = [p for p in parameters_in((*args, *kwargs.values())) if isinstance(p, EncodedParameter)]
            matrices = {id(p): p._ds_zo_matrix for p in used}
            if func in _PRODUCTS and len(matrices) == 1 and not used[0]._ds_zo_matrix.part.in_groups:
                [matrix] = matrices.values()
                given = _replaced((args, kwargs), {id(used[0]): matrix.in_scratch()})
                with torch.autograd.graph.saved_tensors_hooks(matrix.pack, _unpack):
                    return func(*given[0], **given[1])
            given = _replaced((args, kwargs), {key: matrix.copy() for key, matrix in matrices.items()})
            return func(*given[0], **given[1])


def _replaced(value: Any, by_id: Mapping[int, torch.Tensor]) -> Any:
    """`value` with tensors for the parameters in it, also in lists, tuples and dicts."""
    if isinstance(value, EncodedParameter):
        return by_id[id(value)]
    if isinstance(value, dict):
        return {name: _replaced(v, by_id) for name, v in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_replaced(v, by_id) for v in value)
    return value


def matrix_of(parameter: torch.Tensor) -> EncodedMatrix | None:
    """The matrix of a parameter that is decoded when it is used. None for other tensors."""
    return parameter._ds_zo_matrix if isinstance(parameter, EncodedParameter) else None


def attach(part: Part, stored: Planes, scratch: torch.Tensor) -> None:
    """From now until `detach`, the part's parameters are decoded from `stored` when they are used. One of a user's
    subclass of Parameter keeps its class, and holds a decoded copy."""
    for placed in part.placed:
        matrix = EncodedMatrix(part, placed, stored, scratch)
        if type(placed.parameter) is nn.Parameter:
            placed.parameter.__class__ = EncodedParameter
            placed.parameter._ds_zo_matrix = matrix  # type: ignore[attr-defined]
        else:
            placed.parameter.data = matrix.copy()


def detach(unit: Unit) -> None:
    for placed in unit.placed:
        if type(placed.parameter) is EncodedParameter:
            placed.parameter.__class__ = nn.Parameter  # type: ignore[assignment]
            del placed.parameter._ds_zo_matrix
