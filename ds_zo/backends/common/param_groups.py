"""Finds the param group of a parameter."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

Group = dict[str, Any]


class ParamGroupIndex:
    """A map from parameters to their param groups, which stays right when a user replaces groups or their lists."""

    def __init__(self) -> None:
        self._seen: list[tuple[int, list[int]]] = []
        """Ids of the groups and of their parameters when the index was built. These objects are alive, in the optimizer
        or in the module, so that ids are not reused."""
        self._group_of: dict[int, Group] = {}
        """By the parameter's id."""

    def follow(self, groups: Sequence[Group]) -> None:
        """Rebuilds the index if groups or their parameters have changed. All ids are compared: loading an optimizer's
        state replaces the groups, and a user may replace a list of parameters by another of the same length."""
        seen = [(id(group), list(map(id, group["params"]))) for group in groups]
        if seen != self._seen:
            self._seen = seen
            self._group_of = {id(p): group for group in groups for p in group["params"]}

    def __contains__(self, parameter: torch.Tensor) -> bool:
        return id(parameter) in self._group_of

    def __getitem__(self, parameter: torch.Tensor) -> Group:
        return self._group_of[id(parameter)]

    def get(self, parameter: torch.Tensor) -> Group | None:
        """The parameter's group, or None if it is in no group."""
        return self._group_of.get(id(parameter))
