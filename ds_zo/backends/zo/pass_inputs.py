"""The caller's arguments, for several passes each of which may change them."""

from __future__ import annotations

import copy
from collections import UserDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch.utils import _pytree as pytree

from ds_zo.backends.common.random_state import is_generator
from ds_zo.backends.zo.outputs import floats_of


class PassInputs:
    """Makes each pass's arguments. Containers are made anew for each pass, because forwards pop labels from a batch.
    Tensors are the caller's own, unless `copies` is set: then each pass gets copies."""

    def __init__(self, args: Sequence[Any], kwargs: Mapping[str, Any], *, copies: bool) -> None:
        self._leaves, self._build = _flatten((tuple(args), dict(kwargs)))
        self.copies = copies
        self._before: list[tuple[torch.Tensor, int, torch.Tensor]] = []

    def fresh(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments for one pass."""
        made: tuple[tuple[Any, ...], dict[str, Any]] = self._build(map(self._own, self._leaves))
        return made

    def with_rows(self, change: Callable[[torch.Tensor], torch.Tensor], *, num_rows: int) -> PassInputs:
        """These inputs, with other rows of all tensors that have `num_rows` rows."""
        found = copy.copy(self)
        found._leaves = [change(x) if has_rows(x, num_rows) else x for x in self._leaves]
        return found

    @property
    def num_sequences(self) -> int:
        """The number of rows of the input ids, of the embeddings, of the labels, or of the first tensor."""
        _, kwargs = self.fresh()
        named = [kwargs.get(name) for name in ("input_ids", "inputs_embeds", "labels")]
        tensors = [x for x in (*named, *self._leaves) if isinstance(x, torch.Tensor) and x.ndim]
        if not tensors:
            raise ValueError('noise "rank1" needs a batch of tensors, got none: pass input ids, or use noise "mezo"')
        return len(tensors[0])

    def check_rows(self, num_sequences: int) -> None:
        """Raises if there is a tensor whose rows are neither the sequences nor shared by all."""
        shapes = (tuple(x.shape) for x in self._leaves if isinstance(x, torch.Tensor) and x.ndim)
        wrong = next((shape for shape in shapes if shape[0] not in (1, num_sequences)), None)
        if wrong is not None:
            raise ValueError(
                f'noise "rank1" repeats the {num_sequences} rows of a batch, got a tensor of shape {wrong} beside '
                'them: leave it out, or use noise "mezo" (optimizer.params.noise)'
            )

    def batch(self) -> Any:
        """The batch of `engine.zo_step`: a tuple of positional arguments, or a dict of keywords."""
        args, kwargs = self.fresh()
        return args or kwargs

    def lengths(self) -> set[int]:
        """The lengths of the tensors that have dimensions. One of them is the number of sequences."""
        return {len(x) for x in self._leaves if isinstance(x, torch.Tensor) and x.ndim}

    def _own(self, leaf: Any) -> Any:
        return leaf.clone() if self.copies and isinstance(leaf, torch.Tensor) else leaf

    def watch(self) -> None:
        """Notes the versions and values of the caller's tensors, for `were_written`."""
        writable = (x for x in self._leaves if isinstance(x, torch.Tensor) and not x.is_inference())
        self._before = [(x, x._version, x.detach().clone()) for x in writable]

    @torch.no_grad()
    def were_written(self) -> bool:
        """Whether passes wrote to the caller's tensors after `watch`. If so, restores their values."""
        written = [(x, value) for x, version, value in self._before if x._version != version]
        self._before = []
        for x, value in written:
            x.copy_(value)
        return bool(written)

    def generators(self) -> Iterator[Any]:
        """Random generators among the arguments."""
        return filter(is_generator, self._leaves)

    def without_grad(self) -> list[torch.Tensor]:
        """Floating-point tensors among the arguments that do not require grad."""
        return [x for x in floats_of(self._leaves) if not x.requires_grad]

    def requiring_grad(self) -> list[torch.Tensor]:
        """Tensors among the arguments that require grad."""
        return [x for x in floats_of(self._leaves) if x.requires_grad]


def has_rows(leaf: Any, num_rows: int) -> bool:
    """Whether the leaf is a tensor with a row for each of `num_rows`."""
    return isinstance(leaf, torch.Tensor) and leaf.ndim > 0 and len(leaf) == num_rows


def _flatten(tree: Any) -> tuple[list[Any], Callable[[Iterator[Any]], Any]]:
    """The leaves of nested containers, and a function that makes the containers anew from leaves. torch flattens no
    UserDict, such as a tokenizer's BatchEncoding."""
    leaves, spec = pytree.tree_flatten(tree)
    found: list[Any] = []
    makers: list[Callable[[Iterator[Any]], Any]] = []
    for leaf in leaves:
        inside, make = [leaf], next
        if isinstance(leaf, UserDict):
            inside, build = _flatten(leaf.data)
            make = partial(_refilled, leaf, build)
        found += inside
        makers.append(make)
    return found, lambda values: pytree.tree_unflatten([make(values) for make in makers], spec)


def _refilled(holder: UserDict[Any, Any], build: Callable[[Iterator[Any]], Any], values: Iterator[Any]) -> Any:
    """A copy of `holder` that holds what `build` makes from the next of `values`."""
    made = copy.copy(holder)
    made.data = build(values)
    return made
