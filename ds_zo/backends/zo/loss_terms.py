"""Refuses losses with terms that ZO would drop.

[Note: terms that ZO cannot see] ZO measures the losses that a model's forward returns, in passes that keep no graph.
Other terms of a loss have no effect on the update. Such terms are functions of the model's other outputs, of its
parameters, or of a module that made an input. Each is a node in the loss's graph. Other outputs get a node that keeps
no tensor. Parameters are leaves. Inputs that require grad come before the node of the measured loss. `engine.backward`
searches the graph for these nodes and raises. In a direct `loss.backward()`, the nodes raise.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from ds_zo.backends.common.autograd_graph import nodes_before
from ds_zo.backends.common.plain_copies import Hook
from ds_zo.streaming.units import PlacedParameter

_OUTPUT_REMEDY = (
    "return the whole loss from the model's forward, call the model without labels so that ZO measures its outputs, or "
    "detach a constant"
)
_CALL_REMEDY = "make the call inside the forward that the engine runs, or under torch.no_grad()"
_PARAMETER_REMEDY = "return the whole loss from the model's forward, or use weight_decay"
_INPUT_REMEDY = "compute the input inside the module that deepspeed.initialize is given, or detach it"


def refusal(found: str, remedy: str) -> ValueError:
    """The error for a loss that depends on `found`."""
    return ValueError(
        "ZO follows the losses that the model's forward returns, and no other part of a loss. This loss also depends "
        f"on {found}: {remedy} (engine.backward)"
    )


class _Mark(torch.autograd.Function):
    """Returns the same values behind a node whose backward raises. `dropped` holds (found, remedy) for each output."""

    @staticmethod
    def forward(
        ctx: Any, anchor: torch.Tensor, dropped: Sequence[tuple[str, str]], *outputs: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.dropped = dropped
        ctx.set_materialize_grads(False)
        return tuple(output.detach() for output in outputs)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> None:  # type: ignore[override]
        raise refusal(*next(why for why, grad in zip(ctx.dropped, grads, strict=True) if grad is not None))


def _marked(tensors: Sequence[torch.Tensor], found: str, remedy: str) -> list[torch.Tensor]:
    """The tensors with marks. Parameters and tensors with a graph stay as they are: `TrainedParameters.check` finds
    them."""
    others = [t for t in tensors if not (isinstance(t, nn.Parameter) or t.requires_grad)]
    if not others:
        return list(tensors)
    with torch.enable_grad():
        anchor = torch.zeros((), requires_grad=True)
        why = [(f"{found} (of shape {tuple(t.shape)})", remedy) for t in others]
        left = iter(_Mark.apply(anchor, why, *others))
    return [t if isinstance(t, nn.Parameter) or t.requires_grad else next(left) for t in tensors]


def marked_outputs(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Marks outputs of a training forward other than its loss."""
    return _marked(tensors, "an output of the model besides its loss", _OUTPUT_REMEDY)


def marked_results(tensors: Sequence[torch.Tensor], module: nn.Module) -> list[torch.Tensor]:
    """Marks results of a module of the model that was called outside the engine's forward."""
    return _marked(tensors, f"{type(module).__name__} called outside the engine's forward", _CALL_REMEDY)


def dropped_inputs(inputs: Sequence[torch.Tensor]) -> tuple[str, str] | None:
    """The (found, remedy) for a loss that has a gradient in these inputs; None if there are no inputs that require
    grad."""
    if not inputs:
        return None
    return f"an input that requires grad (of shape {tuple(inputs[0].shape)})", _INPUT_REMEDY


class TrainedParameters:
    """The model's trained parameters. Refuses losses whose graph contains one of them, or a mark."""

    def __init__(self, placed: Iterable[PlacedParameter]) -> None:
        trained = [p for p in placed if p.trainable]
        self._names = {id(p.parameter): p.name for p in trained}
        self._handles = [
            p.parameter.register_post_accumulate_grad_hook(Hook(partial(_refuse_gradient, p.name))) for p in trained
        ]

    def __contains__(self, tensor: Any) -> bool:
        return id(tensor) in self._names

    def check(self, loss: torch.Tensor) -> list[Any]:
        """Raises if the loss's graph contains a trained parameter or a mark. Runs before the backward pass, so that a
        refused loss changes nothing. Returns the nodes of the graph."""
        nodes = list(nodes_before([loss.grad_fn]))
        edges = [(loss.grad_fn, loss.output_nr)]
        edges += [edge for node in nodes for edge in node.next_functions]
        for node, number in edges:
            dropped = getattr(node, "dropped", None)
            if dropped is not None:
                raise refusal(*dropped[number])
            variable = getattr(node, "variable", None)
            if variable in self:
                raise refusal(f"parameter {self._names[id(variable)]}", _PARAMETER_REMEDY)
        return nodes

    def close(self) -> None:
        """Removes the hooks from the parameters."""
        while self._handles:
            self._handles.pop().remove()


def _refuse_gradient(name: str, parameter: nn.Parameter) -> None:
    """Gradient hook of a parameter: raises in a direct `loss.backward()`."""
    parameter.grad = None
    raise refusal(f"parameter {name}", _PARAMETER_REMEDY)
