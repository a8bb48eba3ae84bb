"""Tells before every step whether the model is still the one that was placed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import is_
from typing import Any

from torch import nn


class Structure:
    """A module tree and an optimizer's groups, as they are when this is made. Comparing them finds additions,
    replacements, resizes, freezes and regrouping. It is much faster than walking the tree, for which the first kernel
    of a step would wait."""

    def __init__(self, module: nn.Module, param_groups: Sequence[Mapping[str, Any]]) -> None:
        self._held = [(held, tuple(held.values())) for m in module.modules() for held in (m._modules, m._parameters)]
        self._parameters = [(p, p.shape, p.requires_grad) for p in module.parameters()]
        self._groups = [tuple(group["params"]) for group in param_groups]

    def is_unchanged(self, param_groups: Sequence[Mapping[str, Any]]) -> bool:
        """Whether the module tree and these groups are the same as when this was made."""
        return (
            all(len(held) == len(kept) and all(map(is_, held.values(), kept)) for held, kept in self._held)
            and all(p.shape == shape and p.requires_grad is flag for p, shape, flag in self._parameters)
            and len(param_groups) == len(self._groups)
            and all(
                len(group["params"]) == len(kept) and all(map(is_, group["params"], kept))
                for group, kept in zip(param_groups, self._groups, strict=True)
            )
        )
