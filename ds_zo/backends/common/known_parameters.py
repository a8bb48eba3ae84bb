"""Refuses parameters that require a gradient and that a backend does not train."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn


class KnownParameters:
    """The parameters that a module has when its engine is made."""

    def __init__(self, module: nn.Module, trained: Iterable[nn.Parameter]) -> None:
        """`trained`: those whose gradients the backend takes."""
        self._module = module
        self._trained = {id(p) for p in trained}
        self._others = {id(p): p for p in module.parameters() if id(p) not in self._trained}
        """Parameters by their ids, which no other parameter can have while these exist."""

    def check(self) -> None:
        """Raises if the gradient of a parameter would be lost. All modules are walked over before each forward, for
        which `named_parameters` would take a millisecond."""
        modules: list[nn.Module | None] = [self._module]
        seen: set[int] = set()
        missing: set[int] = set()
        while modules:
            m = modules.pop()
            if m is not None and id(m) not in seen:
                seen.add(id(m))
                modules += m._modules.values()
                missing |= {id(p) for p in m._parameters.values() if p is not None and p.requires_grad} - self._trained
        for name, p in self._module.named_parameters() if missing else ():
            if id(p) in missing and p.numel():
                self._refuse(name, p)

    def _refuse(self, name: str, p: nn.Parameter) -> None:
        if not p.is_floating_point():
            raise ValueError(
                f"trained parameters are of a floating-point dtype, got {name} of {p.dtype}: freeze it, or split it "
                "into its real and imaginary parts"
            )
        if id(p) in self._others:
            raise ValueError(
                f"the parameters that are trainable in deepspeed.initialize are trained, got {name}, which became "
                "trainable later: call requires_grad_(True) before deepspeed.initialize"
            )
        raise ValueError(
            f"parameter {name} was added or replaced after deepspeed.initialize, so its gradient would be lost: add, "
            "resize or replace parameters before deepspeed.initialize, and load weights without assign=True"
        )
