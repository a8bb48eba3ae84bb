"""The check of the first step with rank-1 noise.

[Note: check of members] Noise outside the weights has the effect of noise in the weights under three conditions. Each
weight is used by the forward of its own module alone: a mode sees every function of torch that gets one. Rows of the
batch do not mix: each module returns NaN in the rows of all other members, and no NaN may reach the rows of the first
member. And u v^T is the z of the update: the noise that the fused operation adds to weights is compared with the
factors. Outputs of two passes are not compared. In a deep model in 16 bits they differ by rounding as much as by the
noise.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from ds_zo.backends.common.stray_weights import StrayWeightDetector
from ds_zo.backends.zo.members import MemberRows

WEIGHTS_SCALE = 0.125
"""Scale of the noise in weights that are compared: far above their rounding."""
_LARGEST_DIFFERENCE = 0.1
"""Relative difference of u v^T and the noise in weights that rounding may explain."""
_REMEDY = 'use noise "mezo" (optimizer.params.noise)'
_LIKE = frozenset(
    (
        *("new_empty", "new_zeros", "new_ones", "new_full", "new_tensor", "is_contiguous"),
        *("empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like"),
    )
)
"""Torch functions that read the shape, dtype and device of a weight, and not its values."""
_CASTS = frozenset(("to", "type_as"))
"""Torch functions that read the values of the first tensor alone."""


class WeightReads(StrayWeightDetector):
    """Records weights whose values are read outside of the forward of their module."""

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        if name in _LIKE or (name in _CASTS and not isinstance(args[0], nn.Parameter)):
            return func(*args, **(kwargs or {}))
        return super().__torch_function__(func, types, args, kwargs)


class MemberCheck:
    """What `MemberForwards` sees in two passes: over all rows with noise outside the weights, and over the rows of
    the first member with noise in the weights."""

    def __init__(self, rows: MemberRows, weights: Mapping[int, str]) -> None:
        """`weights`: names of the trained matrices by the parameter's id."""
        self._rows = rows
        self._in_use: set[int] = set()
        """Ids of the weights whose own module's forward is running."""
        self.detector = WeightReads({key: (key, name) for key, name in weights.items()}, self._is_in_use)
        """Mode of the first pass."""
        self.in_weights = False
        """Whether the second pass is running."""
        self._nans: list[tuple[str, torch.Tensor]] = []
        """Names of modules, in the order of their calls, and whether the first member's rows have a NaN behind them."""
        self._products: dict[int, torch.Tensor] = {}
        """Product of each weight without noise and v, by the parameter's id."""
        self._differences: list[tuple[str, torch.Tensor]] = []
        """The relative difference of u v^T and the noise in each weight."""

    def _is_in_use(self, key: int) -> bool:
        return key in self._in_use

    @contextmanager
    def using(self, weight: torch.Tensor) -> Iterator[None]:
        """Context of the own forward of a weight's module."""
        self._in_use.add(id(weight))
        try:
            yield
        finally:
            self._in_use.discard(id(weight))

    def saw(self, name: str, output: torch.Tensor, weight: torch.Tensor, u: torch.Tensor, v: torch.Tensor) -> None:
        """Module `name` has returned `output`, which the first pass may change. `u`, `v`: the first member's factors of
        the weight."""
        with self.using(weight):
            product = weight @ v.to(weight.dtype)
        if self.in_weights:
            if id(weight) not in self._products:  # without the other rows, the forward calls other modules
                raise _mixed(name)
            expected = WEIGHTS_SCALE * v.float().square().sum() * u.float()
            found = product.float() - self._products[id(weight)].float()
            length = expected.norm().clamp_min(torch.finfo(torch.float32).tiny)  # 0 where only padding has rows
            self._differences.append((name, (found - expected).norm() / length))
            return
        self._products[id(weight)] = product
        by_row = output.view(self._rows.num_rows, -1)
        by_row[self._rows.num_each :] = torch.nan
        self._nans.append((name, by_row[: self._rows.num_each].isnan().any()))

    def saw_losses(self, losses: torch.Tensor) -> None:
        """The first pass has these losses, one for each row."""
        self._nans.append(("the loss", losses[: self._rows.num_each].isnan().any()))

    def raise_for_uses(self) -> None:
        """Raises if the first pass has used a weight outside of its module, or mixed rows."""
        for name in self.detector.strays.values():
            raise ValueError(
                f'noise "rank1" is added to the outputs of modules, and weight {name} was used outside of the forward '
                f"of its module: freeze it before deepspeed.initialize, or {_REMEDY}"
            )
        for name, is_nan in self._nans:
            if is_nan:
                raise _mixed(name)

    def raise_for_noise(self) -> None:
        """Raises if the second pass has found other noise in a weight than that of its factors."""
        for name, difference in self._differences:
            if not difference <= _LARGEST_DIFFERENCE:
                raise RuntimeError(
                    f"ds_zo: the noise outside the weight of {name} differs from that of its update by a factor of "
                    f"{float(difference):.2g}, which is a fault of ds_zo: {_REMEDY}"
                )


def _mixed(name: str) -> ValueError:
    return ValueError(
        f'noise "rank1" differs from row to row of the batch, and at {name} other rows have reached a row, or the row '
        "is NaN by itself: change the model so that it computes finite numbers from each row of the batch alone, or "
        f"{_REMEDY}"
    )
