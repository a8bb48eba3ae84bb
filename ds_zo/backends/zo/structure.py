"""Whether a model is still the one that was placed, asked before every step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import is_
from typing import Any

from torch import nn


class Structure:
    """A module tree and an optimizer's groups as they were. Looking whether anything was added, replaced, resized,
    frozen or regrouped since takes a fraction of the time of walking the tree, which the first kernel of a step would
    wait for."""

    def __init__(self, module: nn.Module, param_groups: Sequence[Mapping[str, Any]]) -> None:
        self._held = [(held, tuple(held.values())) for m in module.modules() for held in (m._modules, m._parameters)]
        self._parameters = [(p, p.shape, p.requires_grad) for p in module.parameters()]
        self._groups = [tuple(group["params"]) for group in param_groups]

    def is_that_of(self, param_groups: Sequence[Mapping[str, Any]]) -> bool:
        return (
            all(len(held) == len(kept) and all(map(is_, held.values(), kept)) for held, kept in self._held)
            and all(p.shape == shape and p.requires_grad is flag for p, shape, flag in self._parameters)
            and len(param_groups) == len(self._groups)
            and all(
                len(group["params"]) == len(kept) and all(map(is_, group["params"], kept))
                for group, kept in zip(param_groups, self._groups, strict=True)
            )
        )
