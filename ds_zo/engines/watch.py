"""Looks, during one forward, for weights that are used where they are not brought up."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch.overrides import TorchFunctionMode

from ds_zo.streaming.units import Unit
from ds_zo.streaming.watched import is_harmless, parameters_in


class Watch(TorchFunctionMode):
    """Notes parameters that reach a torch function while their unit is not being visited.

    `F.linear(x, self.embed.weight)` outside the embedding's forward would use unperturbed weights, silently.
    """

    def __init__(self, units: Sequence[Unit], visited: set[int]) -> None:
        super().__init__()
        self._unit_of = {id(p.parameter): (unit, p.name) for unit in units for p in unit.placed if p.trainable}
        self._visited = visited
        self.edges: list[Unit] = []
        self._in_blocks: list[str] = []

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not is_harmless(func):
            for parameter in parameters_in((*args, *kwargs.values())):
                if id(parameter) in self._unit_of:
                    self._note(*self._unit_of[id(parameter)])
        return func(*args, **kwargs)

    def _note(self, unit: Unit, name: str) -> None:
        if id(unit) in self._visited:
            return
        if unit.is_block:
            self._in_blocks.append(name)
        elif unit not in self.edges:
            self.edges.append(unit)

    def raise_for_blocks(self) -> None:
        if self._in_blocks:
            raise ValueError(
                f"parameter {self._in_blocks[0]} was used outside the forward of the block that holds it, where its "
                "weights are not brought up: name the list whose entries are called whole, or [] for none "
                "(ds_zo.stream.blocks)"
            ) from None
