"""Which of an optimizer's groups a parameter is in, though users replace groups and lists of parameters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

Group = dict[str, Any]


class ParamGroupIndex:
    def __init__(self) -> None:
        self._seen: list[tuple[int, list[int]]] = []
        self._group_of: dict[int, Group] = {}

    def follow(self, groups: Sequence[Group]) -> None:
        """Loading an optimizer's state makes groups of their own, and a list may be replaced by one as long."""
        seen = [
            (id(group), list(map(id, group["params"]))) for group in groups
        ]  # of what is alive, here or in the module
        if seen != self._seen:
            self._seen = seen
            self._group_of = {id(p): group for group in groups for p in group["params"]}

    def __contains__(self, parameter: torch.Tensor) -> bool:
        return id(parameter) in self._group_of

    def __getitem__(self, parameter: torch.Tensor) -> Group:
        return self._group_of[id(parameter)]

    def get(self, parameter: torch.Tensor) -> Group | None:
        return self._group_of.get(id(parameter))
