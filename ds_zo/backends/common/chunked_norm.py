"""Norms outside of the blocks, in chunks of tokens.

A norm of a large batch takes several float32 tensors of the batch's size, in its forward and again in its backward
pass. In chunks, only one chunk's exist at a time, and the norm's input is all that is saved. The last norm of a model
would otherwise bound the batch, once blocks run over tiles of it.

[Note: norms are found] Chunks are for modules without children whose parameters are vectors and which have no buffers.
The first large batch tries each of them, on a few rows. Rows in another shape, and each row alone, must give the same
output within rounding. A row's output must keep its bits if the other rows are NaN. Attributes may not change.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable

from ds_zo.backends.common.chunked_rows import Gradients, ReplacedForwards, RowFunction, has_class_forward
from ds_zo.backends.common.random_state import RandomState

NORM_CHUNK_NUMEL = 2**23
"""Elements of a chunk: 32 MiB in float32."""


class ChunkedNorms:
    """The norms outside of the blocks of a model. See [Note: norms are found]."""

    def __init__(self, module: nn.Module, blocks: Collection[nn.Module]) -> None:
        inside = {m for block in blocks for m in block.modules()}
        self._candidates = [m for m in module.modules() if m not in inside and _may_be_norm(m)] if blocks else []
        self._by_rows: dict[Any, bool] = {}
        """Whether a module passed its trial, by module, dtype of its input and `training`."""
        self._replaced = ReplacedForwards(self._chunking)

    @contextmanager
    def in_chunks(self) -> Iterator[None]:
        """Context of a training forward."""
        with ExitStack() as stack:
            for m in self._candidates:
                if has_class_forward(m):
                    stack.callback(self._replaced.replace(m))
            yield

    def _chunking(self, module: nn.Module, forward: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def chunk(*args: Any, **kwargs: Any) -> torch.Tensor:
            x = args[0] if len(args) == 1 and not kwargs else None
            is_large = type(x) is torch.Tensor and x.ndim > 1 and x.numel() > NORM_CHUNK_NUMEL
            if not is_large or not torch.is_grad_enabled() or torch.compiler.is_compiling():
                return forward(*args, **kwargs)
            assert x is not None
            key = module, x.dtype, module.training
            if key not in self._by_rows:
                self._by_rows[key] = _is_by_rows(module, forward, x.detach())
            if not self._by_rows[key]:
                return forward(x)
            rows = RowFunction(module, forward, device=x.device, num_rows=max(1, NORM_CHUNK_NUMEL // x.shape[-1]))
            found: torch.Tensor = _InChunks.apply(rows, x, *rows.parameters.values())
            return found

        return chunk


class _InChunks(torch.autograd.Function):
    """The output of a norm for all rows. The backward pass computes each chunk again."""

    @staticmethod
    def forward(ctx: Any, function: RowFunction, x: torch.Tensor, *parameters: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, *parameters)
        ctx.function = function
        whole: torch.Tensor | None = None
        for index, chunk in enumerate(function.chunks(x)):
            found = function.of(chunk)
            if whole is None:
                whole = found.new_empty(*x.shape[:-1], found.shape[-1])
            function.chunks(whole)[index].copy_(found)
        assert whole is not None
        return whole

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Gradients:
        x, *_ = ctx.saved_tensors
        grads = ctx.function.chunks(grad)
        return None, *ctx.function.gradients(lambda y, index: (y, grads[index]), x, ctx.needs_input_grad[1:])


def _may_be_norm(module: nn.Module) -> bool:
    parameters = list(module.parameters())
    is_leaf = next(module.children(), None) is None and next(module.buffers(), None) is None
    return is_leaf and bool(parameters) and all(p.ndim == 1 for p in parameters)


@torch.no_grad()
def _is_by_rows(module: nn.Module, forward: Callable[..., torch.Tensor], x: torch.Tensor) -> bool:
    """The trial of one module, with two rows from each of two samples."""
    few = x[:2]
    for dim in range(1, x.ndim - 1):
        few = few.narrow(dim, 0, min(2, x.shape[dim]))
    rows = few.reshape(-1, x.shape[-1])
    attributes, random = dict(vars(module)), RandomState(x.device)
    state = random.get_state()
    try:
        together, found = forward(few), forward(rows)
        if x.is_meta:
            return found.shape == rows.shape and together.shape == few.shape
        others = rows.clone()
        others[1:] = torch.nan
        beside_nan = forward(others)[:1]
        alone = torch.cat([forward(row) for row in rows.split(1)])
    except torch.OutOfMemoryError:
        raise
    except Exception:  # of the module's own code, for a shape that it does not take
        return False
    finally:
        random.set_state(state)
    is_same = all(vars(module).get(name) is value for name, value in attributes.items())
    is_same = is_same and vars(module).keys() == attributes.keys() and found.shape == rows.shape
    eps = 8 * torch.finfo(found.dtype).eps
    near = (together.reshape_as(found), alone)
    return is_same and torch.equal(beside_nan, found[:1]) and all(torch.allclose(a, found, eps, eps) for a in near)
