"""Modules whose output for a row does not depend on other rows, such as heads and norms, in chunks of rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from ds_zo.backends.common.plain_copies import own_forward

Gradients = tuple[torch.Tensor | None, ...]


class RowFunction:
    """The forward of such a module, and its gradients. A row is a token's features."""

    def __init__(
        self, module: nn.Module, forward: Callable[..., torch.Tensor], *, device: torch.device, num_rows: int
    ) -> None:
        """`num_rows`: rows of a chunk. Autocast settings are those that are in force here."""
        self.function = _Function(module, forward)
        self.parameters = {name: p for name, p in self.function.named_parameters() if p.requires_grad}
        self.num_rows = num_rows
        self._autocast = autocast_of(device.type)

    def of(self, rows: torch.Tensor, parameters: Mapping[str, torch.Tensor] | None = None) -> torch.Tensor:
        """The output for some rows. `parameters` take the place of the module's own."""
        with self._autocast:
            found: torch.Tensor = (
                torch.func.functional_call(self.function, dict(parameters), (rows,))
                if parameters
                else self.function(rows)
            )
        return found

    def chunks(self, rows: torch.Tensor) -> Sequence[torch.Tensor]:
        return rows.reshape(-1, rows.shape[-1]).split(self.num_rows)

    def gradients(
        self,
        pull: Callable[[torch.Tensor, int], tuple[torch.Tensor, torch.Tensor]],
        rows: torch.Tensor,
        wanted: Sequence[bool],
        *,
        in_chunks: bool = True,
    ) -> Gradients:
        """Gradients of `rows` and of each parameter. `pull` takes the output for a chunk, and the chunk's index, and
        returns a result and its gradient. `wanted`: which gradients are needed."""
        names = [name for name, is_wanted in zip(self.parameters, wanted[1:], strict=True) if is_wanted]
        leaves = {name: self.parameters[name].detach().requires_grad_() for name in names}
        totals: dict[str, torch.Tensor] = {}
        of_rows = torch.empty_like(rows, memory_format=torch.contiguous_format) if wanted[0] else None
        chunks = self.chunks(rows) if in_chunks else (rows,)
        for index, chunk in enumerate(chunks):
            with torch.enable_grad():
                x = chunk.detach().requires_grad_(wanted[0])
                output, grad = pull(self.of(x, leaves), index)
                inputs = [x] * wanted[0] + list(leaves.values())
                found = list(torch.autograd.grad(output, inputs, grad, materialize_grads=True))
            if of_rows is not None:
                (self.chunks(of_rows)[index] if in_chunks else of_rows).copy_(found.pop(0))
            for name, grad_of_p in zip(names, found, strict=True):
                if name in totals:
                    totals[name] += grad_of_p
                else:
                    totals[name] = _float32_copy(grad_of_p) if in_chunks else grad_of_p
            del output, grad, found
        return of_rows, *(totals[n].to(p.dtype) if n in totals else None for n, p in self.parameters.items())


def autocast_of(device: str) -> AbstractContextManager[Any]:
    """A context with the autocast settings that are in force here."""
    if not torch.amp.is_autocast_available(device):
        return nullcontext()
    dtype, enabled = torch.get_autocast_dtype(device), torch.is_autocast_enabled(device)
    return torch.autocast(device, dtype=dtype, enabled=enabled, cache_enabled=False)


def _float32_copy(grad: torch.Tensor) -> torch.Tensor:
    return grad.to(torch.promote_types(grad.dtype, torch.float32), copy=True)


def has_class_forward(module: nn.Module) -> bool:
    """Whether the module's forward is that of its class, below the stand-ins of an engine."""
    return getattr(own_forward(module), "__func__", None) is type(module).forward


class ReplacedForwards:
    """Forwards that take the place of those of some modules in a training forward."""

    def __init__(self, make: Callable[[nn.Module, Callable[..., Any]], Callable[..., Any]]) -> None:
        """`make` returns the new forward of a module, given the present one."""
        self._make = make
        self._forwards: dict[nn.Module, Callable[..., Any]] = {}
        """Each is made once, because torch.compile compiles again for a new function."""

    def replace(self, module: nn.Module) -> Callable[[], None]:
        """Replaces the forward of a module. Returns the function that restores it."""
        if module not in self._forwards:
            self._forwards[module] = self._make(module, module.forward)
        before = vars(module).get("forward")
        module.forward = self._forwards[module]  # type: ignore[method-assign]

        def restore() -> None:
            if before is None:
                del vars(module)["forward"]
            else:
                module.forward = before  # type: ignore[method-assign]

        return restore


class _Function(nn.Module):
    """A module's own forward, without the hooks of the module."""

    def __init__(self, module: nn.Module, forward: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.module, self._forward = module, forward

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self._forward(rows)
