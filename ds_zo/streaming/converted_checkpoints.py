"""Reads weights that transformers makes of other tensors when it loads a checkpoint.

A stack of experts, for example, is made of one tensor for each expert."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

from ds_zo import versions


@dataclass
class _Group:
    """Tensors of a checkpoint, and the rule by which transformers makes weights of them."""

    first: str
    """The first weight that the rule makes."""
    rule: Any
    """None: the tensor is the weight under another name, or under its own."""
    sources: list[tuple[str | None, str]] = field(default_factory=list)
    """The names of the tensors, each with the pattern of the rule that it matches."""

    def weights(self) -> list[str]:
        patterns = [""] if self.rule is None else self.rule.target_patterns
        return [self.first.replace(patterns[0], pattern) for pattern in patterns]


class Conversions:
    """For each weight and buffer of a transformers model that a checkpoint has: how it is made of the checkpoint's
    tensors."""

    def __init__(self, model: Any, tensors: Iterable[str]) -> None:
        self._config = model.config
        self._wanted: dict[str, torch.Tensor] = {name: t.to("meta") for name, t in model.state_dict().items()}
        groups: dict[str, _Group] = {}
        for tensor, weight, pattern, rule in versions.renamed_tensors(model, tensors, weights=self._wanted):
            groups.setdefault(weight, _Group(weight, rule)).sources.append((pattern, tensor))
        self._groups = {name: group for group in groups.values() for name in group.weights() if name in self._wanted}

    def names(self) -> set[str]:
        return set(self._groups)

    def sources(self, name: str) -> list[str]:
        """The tensors of which the weight is made."""
        return [tensor for _, tensor in self._groups[name].sources]

    def stack_of(self, name: str) -> list[str]:
        """The sources in the order in which their values follow each other in the weight; empty if they do not. The
        rule is applied to small tensors of numbers, which show where it puts them."""
        group, names = self._groups[name], self.sources(name)
        if group.rule is None:
            return names
        numbers = torch.arange(6 * len(names), device="cpu").view(-1, 2, 3)
        read = ((pattern, tensor, numbers[i]) for i, (pattern, tensor) in enumerate(group.sources))
        try:
            found = versions.apply_rule(group.rule, group.first, read, config=self._config, weights=self._wanted)[name]
            rows = found.reshape(-1, 6)
        except (RuntimeError, ValueError, IndexError):  # the rule depends on shapes
            return []
        order = rows[:, 0] // 6
        is_stack = len(rows) == len(names) and torch.equal(rows, numbers.view(-1, 6)[order])
        return [names[i] for i in order] if is_stack else []

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._wanted[name].shape)

    def read(self, name: str, read_tensor: Callable[[str], torch.Tensor]) -> torch.Tensor:
        """The weight `name`. Beside it, only the tensors of its group are in memory."""
        group, wanted = self._groups[name], self._wanted[name]
        if group.rule is None:
            return read_tensor(group.sources[0][1])
        read = ((pattern, tensor, read_tensor(tensor)) for pattern, tensor in group.sources)
        try:
            found = versions.apply_rule(group.rule, group.first, read, config=self._config, weights=self._wanted)[name]
            made = f"shape {tuple(found.shape)}"
        except RuntimeError as error:  # the tensors do not fit together
            found, made = torch.empty(0), str(error)
        if found.shape != wanted.shape:
            raise ValueError(
                f"{name} must have shape {tuple(wanted.shape)}, got {made} of "
                f"{len(group.sources)} tensors, {group.sources[0][1]} first: download or save the model again"
            )
        return found
