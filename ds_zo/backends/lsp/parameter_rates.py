"""Which parameters an engine trains, and at which rates."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from ds_zo.backends.common.known_parameters import KnownParameters
from ds_zo.backends.lsp.matrices import MatrixState
from ds_zo.backends.lsp.products import Rate


class ParameterRates:
    """Learning rates and weight decays of a module's trained parameters, from their param groups."""

    def __init__(self, module: nn.Module, matrices: Sequence[MatrixState], *, stochastic: bool) -> None:
        """`stochastic`: weights are rounded stochastically."""
        self.known = KnownParameters(module, (matrix.parameter for matrix in matrices))
        self._stochastic = stochastic
        self._group_of: dict[int, dict[str, Any]] = {}
        """The param group of each parameter, by the parameter's id."""
        self._in_backward: set[int] = set()
        """Ids of the parameters that were trained in an `engine.backward` since the last step. All ranks have the same,
        whatever gradients they have."""

    def follow(self, param_groups: Sequence[dict[str, Any]]) -> None:
        """Reads the param groups, which a user may have changed."""
        self._group_of = {id(p): group for group in param_groups for p in group["params"]}

    def is_grouped(self, matrix: MatrixState) -> bool:
        """Whether the parameter is in a param group."""
        return id(matrix.parameter) in self._group_of

    def trains(self, matrix: MatrixState) -> bool:
        """Whether the parameter requires a gradient and is in a param group."""
        return matrix.parameter.requires_grad and id(matrix.parameter) in self._group_of

    def begin_backward(self, trained: Sequence[MatrixState]) -> None:
        self._in_backward |= {id(matrix.parameter) for matrix in trained}

    def end_step(self) -> None:
        self._in_backward.clear()

    def takes_part(self, matrix: MatrixState) -> bool:
        """Whether the next step updates the parameter if some rank has a gradient of it. It may have been frozen after
        its backward."""
        return self.is_grouped(matrix) and (matrix.parameter.requires_grad or id(matrix.parameter) in self._in_backward)

    def rates(self, matrices: Sequence[MatrixState], step: int) -> list[Rate | None]:
        """Learning rate and weight decay of each matrix in a step; None for a parameter in no param group. Parameters
        of one param group get the same object."""
        found: dict[int, Rate] = {}
        groups = [self._group_of.get(id(matrix.parameter)) for matrix in matrices]
        for group in groups:
            if group is not None and id(group) not in found:
                lr, weight_decay = float(group["lr"]), float(group.get("weight_decay", 0.0))
                found[id(group)] = Rate(lr, weight_decay, step, self._stochastic)
        return [None if group is None else found[id(group)] for group in groups]
