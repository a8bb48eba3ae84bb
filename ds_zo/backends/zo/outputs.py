"""Combines the outputs of all passes into one output with an autograd node.

[Note: the chain rule does the bookkeeping] A ZO step has no backward pass through the model. Still, any scale that the
caller applies before `engine.backward(loss)` (1/accumulation, token counts, `2 * loss`) must scale the update. So the
returned loss is the mean over the passes, and its autograd node keeps `l+ - l-`. The node's backward receives the
caller's scale as `grad`. It adds `grad * (l+ - l-) / (2 zo_eps)` to the projected gradient of each direction. If the
output has no loss, the node covers all its floating-point tensors and adds `<grad_o, o+ - o-> / (2 zo_eps)`. This is
exact for a loss that is linear in the output, and first order otherwise.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterable, MutableMapping, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_is_leaf, tree_unflatten

from ds_zo.backends.zo.loss_terms import dropped_inputs, marked_outputs, refusal


def loss_of(output: Any) -> torch.Tensor | None:
    """The scalar that a model returned as its loss, or None. Conventions: `.loss`, `["loss"]`, first of a tuple, or the
    output itself."""
    if isinstance(output, torch.Tensor):
        found: Any = output
    elif isinstance(output, MutableMapping):
        found = output.get("loss")
    elif isinstance(output, (tuple, list)):
        found = output[0] if output else None
    else:
        found = getattr(output, "loss", None)
    if isinstance(found, torch.Tensor) and found.is_floating_point() and found.numel() == 1:
        return found
    return None


def losses_of(output: Any) -> list[torch.Tensor]:
    """The loss, and the output's other tensors of which the caller may make a loss. These are losses of other heads,
    regularisers, and the labels' log-probabilities of a fused head, which TRL's trainers sum themselves. Empty if the
    output has no loss."""
    loss = loss_of(output)
    return [] if loss is None else [loss, *(t for t in floats_of(output) if t is not loss and _is_loss(t, output))]


def _is_loss(tensor: torch.Tensor, output: Any) -> bool:
    return tensor.numel() == 1 or tensor is getattr(output, "log_probs", None)


def with_losses(output: Any, losses: Sequence[torch.Tensor]) -> Any:
    """A copy of the output with `losses` in place of `losses_of` it, and its other tensors marked. See [Note: terms
    that ZO cannot see]."""
    loss, floats, others = loss_of(output), floats_of(output), iter(losses[1:])
    rest = iter(marked_outputs([t for t in floats if t is not loss and not _is_loss(t, output)]))
    if len(floats) > 1:
        new = [losses[0] if t is loss else next(others) if _is_loss(t, output) else next(rest) for t in floats]
        output = with_floats(output, new)
    return with_loss(output, losses[0])


def with_loss(output: Any, loss: torch.Tensor | None) -> Any:
    """A copy of the output with another loss."""
    if isinstance(output, torch.Tensor):
        return loss
    if isinstance(output, (tuple, list)):
        items: Any = (loss, *output[1:])
        return type(output)(*items) if hasattr(output, "_fields") else type(output)(items)
    replaced = copy.copy(output)
    _set(replaced, "loss", loss)
    return replaced


def _set(output: Any, name: str, value: Any) -> None:
    if isinstance(output, MutableMapping):
        output[name] = value
    elif dataclasses.is_dataclass(output):
        object.__setattr__(output, name, value)  # the dataclass may be frozen
    else:
        setattr(output, name, value)


def _is_tensor(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor)


def _is_float(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.is_floating_point()


def floats_of(output: Any) -> list[torch.Tensor]:
    """The output's floating-point tensors."""
    return tensors_of(output, is_wanted=_is_float)


def tensors_of(output: Any, *, is_wanted: Callable[[Any], bool] = _is_tensor) -> list[torch.Tensor]:
    """The output's tensors, also those inside dataclasses and mappings that PyTorch's pytrees do not flatten."""
    found: list[torch.Tensor] = []
    for leaf in tree_flatten(_fields(output))[0]:
        if is_wanted(leaf):
            found.append(leaf)
        elif _fields(leaf) is not leaf:
            found += tensors_of(leaf, is_wanted=is_wanted)
    return found


def with_floats(output: Any, floats: Iterable[torch.Tensor]) -> Any:
    """A copy of the output with `floats` in place of `floats_of` it."""
    return with_tensors(output, floats, is_wanted=_is_float)


def with_tensors(output: Any, tensors: Iterable[torch.Tensor], *, is_wanted: Callable[[Any], bool] = _is_tensor) -> Any:
    """A copy of the output with `tensors` in place of `tensors_of` it."""
    left = iter(tensors)
    leaves, spec = tree_flatten(_fields(output))
    filled = [
        next(left)
        if is_wanted(leaf)
        else leaf
        if _fields(leaf) is leaf
        else with_tensors(leaf, left, is_wanted=is_wanted)
        for leaf in leaves
    ]
    made = tree_unflatten(filled, spec)
    if _fields(output) is output:
        return made
    output = copy.copy(output)
    for name, value in made.items():
        _set(output, name, value)
    return output


def _fields(output: Any) -> Any:
    """The output as a dict if pytrees treat it as a leaf: plain dataclasses, other mappings, objects with a loss. Else
    the output itself."""
    if tree_is_leaf(output) and not isinstance(output, torch.Tensor):
        if isinstance(output, MutableMapping):
            return dict(output)
        if dataclasses.is_dataclass(output) and not isinstance(output, type):
            return {field.name: getattr(output, field.name) for field in dataclasses.fields(output)}
        if isinstance(getattr(output, "loss", None), torch.Tensor) and hasattr(output, "__dict__"):
            return dict(vars(output))
    return output


def _wide(value: torch.Tensor) -> torch.Tensor:
    """The value in float32, or in float64 if it is that."""
    return value if value.dtype is torch.float64 else value.float()


class _Tie(torch.autograd.Function):
    """Returns means over the passes. Its backward passes the directional differences to `accumulate`."""

    @staticmethod
    def forward(
        ctx: Any,
        anchor: torch.Tensor,
        accumulate: Callable[[torch.Tensor], None],
        passes: Sequence[Sequence[torch.Tensor]],
        *inputs: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        ctx.accumulate = accumulate
        why = dropped_inputs(inputs)
        ctx.dropped = None if why is None else [why] * len(passes[0])
        ctx.set_materialize_grads(False)
        ctx.differences = [
            [_wide(plus) - _wide(minus) for plus, minus in zip(passes[i], passes[i + 1], strict=True)]
            for i in range(0, len(passes), 2)
        ]
        return tuple(
            (torch.stack([_wide(out) for out in outs]).sum(0) / len(outs)).to(outs[0].dtype)
            for outs in zip(*passes, strict=True)
        )

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[None, ...]:  # type: ignore[override]
        if ctx.dropped is not None:
            raise refusal(*ctx.dropped[0])
        projected = [
            sum(
                (_wide(grad) * difference).sum()
                for grad, difference in zip(grads, row, strict=True)
                if grad is not None
            )
            for row in ctx.differences
        ]
        if any(isinstance(p, torch.Tensor) for p in projected):
            ctx.accumulate(torch.stack([torch.as_tensor(p) for p in projected]))
        return None, None, None


class _TieDifferences(torch.autograd.Function):
    """Returns a loss. Its backward passes `grad * differences` to `accumulate`."""

    @staticmethod
    def forward(
        ctx: Any,
        anchor: torch.Tensor,
        accumulate: Callable[[torch.Tensor], None],
        loss: torch.Tensor,
        differences: torch.Tensor,
        *inputs: torch.Tensor,
    ) -> torch.Tensor:
        ctx.accumulate, ctx.differences = accumulate, differences
        why = dropped_inputs(inputs)
        ctx.dropped = None if why is None else [why]
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[None, ...]:  # type: ignore[override]
        if ctx.dropped is not None:
            raise refusal(*ctx.dropped[0])
        ctx.accumulate(_wide(grad) * ctx.differences)
        return None, None, None, None


def tie_differences(
    loss: torch.Tensor,
    differences: torch.Tensor,
    *,
    anchor: torch.Tensor,
    accumulate: Callable[[torch.Tensor], None],
    inputs: Sequence[torch.Tensor] = (),
) -> torch.Tensor:
    """As `tie`, for one loss, whose differences of all directions are known."""
    with torch.enable_grad():
        tied: torch.Tensor = _TieDifferences.apply(anchor, accumulate, loss, differences, *inputs)
    return tied


def tie(
    passes: Sequence[Sequence[torch.Tensor]],
    *,
    anchor: torch.Tensor,
    accumulate: Callable[[torch.Tensor], None],
    inputs: Sequence[torch.Tensor] = (),
) -> tuple[torch.Tensor, ...]:
    """Makes differentiable means over the passes. `passes` are outputs in the order +, -, +, -, one pair per direction.
    `accumulate` receives, per direction, the sum of `grad * (plus - minus)`. `anchor` is any leaf that requires grad:
    it makes the result differentiable. `inputs` are the forward's inputs that require grad: a backward to them is
    refused."""
    with torch.enable_grad():
        tied: tuple[torch.Tensor, ...] = _Tie.apply(anchor, accumulate, passes, *inputs)
    return tied
