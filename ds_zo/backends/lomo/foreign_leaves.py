"""Leaves of a loss that are not the engine's parameters: a user's prompts, or a head with an optimizer of its own.

A backward pass that only measures must not add to their gradients, or the second pass doubles them. They are found by
walking the autograd graph outside of the engine's forwards. The walk goes from the loss to the outputs of these
forwards, and continues from their inputs. These parts of the graph are small. (torch's `backward(inputs=...)` would
serve as well, but reentrant checkpointing does not support it.)
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._pytree import tree_flatten

from ds_zo.backends.common.autograd_graph import nodes_before


class ForeignLeaves:
    """Finds the foreign leaves of a loss. See this module's docstring."""

    def __init__(self, own: Iterable[torch.Tensor]) -> None:
        """`own`: the engine's parameters."""
        self._own = {id(p) for p in own}
        self._inputs: list[weakref.ref[torch.Tensor]] = []
        """Tensors with gradients among the inputs of the engine's forwards."""
        self._outputs: list[weakref.ref[torch.Tensor]] = []
        """Tensors with gradients among the outputs of the engine's forwards."""

    def record_forward(self, inputs: Any, outputs: Any) -> None:
        """Records the inputs and the outputs of one forward of the engine."""
        for known, found in ((self._inputs, inputs), (self._outputs, outputs)):
            leaves = tree_flatten(found)[0]
            known[:] = [ref for ref in known if ref() is not None]
            known += [weakref.ref(t) for t in leaves if isinstance(t, torch.Tensor) and t.requires_grad]

    @contextmanager
    def gradients_restored(self, loss: torch.Tensor) -> Iterator[None]:
        """Context of a backward pass from `loss` after which the gradients of foreign leaves are as before."""
        leaves = self._leaves_of(loss)
        before = [leaf.grad for leaf in leaves]
        for leaf in leaves:
            leaf.grad = None
        try:
            yield
        finally:
            for leaf, grad in zip(leaves, before, strict=True):
                leaf.grad = grad

    def _leaves_of(self, loss: torch.Tensor) -> list[torch.Tensor]:
        inputs, outputs = ([t for ref in refs if (t := ref()) is not None] for refs in (self._inputs, self._outputs))
        found = {id(t): t for t in (*inputs, *outputs) if t.is_leaf or t.retains_grad}
        starts = [loss.grad_fn, *(t.grad_fn for t in inputs)]
        for node in nodes_before(starts, ends=[t.grad_fn for t in outputs]):
            if hasattr(node, "variable"):  # AccumulateGrad, the node of a leaf
                found[id(node.variable)] = node.variable
        return [leaf for key, leaf in found.items() if key not in self._own]
