"""Parameters whose Adam runs on the device of the weights.

[Note: few launches] The sums of a layer are small, so the number of launches decides how long Adam takes. Norms,
clipping and counts of steps take one launch each for all layers. Only Adam and the update of weights are launched layer
by layer: a layer with a gradient that is not finite is skipped alone, and all layers share the directions' memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate, groupby

import torch

from ds_zo.backends.lsp.matrices import MatrixState
from ds_zo.backends.lsp.products import LaunchCache, Rate, apply_directions_
from ds_zo.config import LSPParams
from ds_zo.optim.subspace_adam import FlatMoments, Moments, adam_, clip_, clip_coefs, directions_

_ALIGNED_NUMEL = 64
"""Each gradient begins at a multiple of this number of elements, as fast kernels require."""

RateOf = dict[int, Rate | None]
"""The rate of each parameter in one step, by the id of its `MatrixState`."""


class DeviceGroup:
    """A layer's parameters, or all vectors of a model."""

    def __init__(self, matrices: Sequence[MatrixState]) -> None:
        self.matrices = sorted(matrices, key=lambda matrix: matrix.subspace is None)
        self.launch_cache = LaunchCache()
        self.moments: list[Moments] = []
        self.grads: list[torch.Tensor] = []
        """Float32 memory of the gradients that Adam gets; empty if one of the parameters is a whole matrix."""
        self.directions: list[torch.Tensor] = []
        """Memory of the directions, which other groups use too; empty as `grads`."""

    @property
    def is_complete(self) -> bool:
        """Whether all gradients have come and fit `grads`."""
        return bool(self.grads) and all(matrix.has_total for matrix in self.matrices)

    def start(self, trained: Sequence[bool]) -> None:
        """Begins a step, in which parameters are `trained` or not. One rank has nothing to do before Adam."""

    def finish(self) -> None:
        """Makes the gradients of the step final."""

    def move_weights(self, matrices: list[MatrixState], directions: list[torch.Tensor], rate_of: RateOf) -> None:
        rates = [rate_of[id(matrix)] for matrix in matrices]
        apply_directions_(self.launch_cache, zip(matrices, directions, rates, strict=True))
        for matrix in matrices:
            matrix.clear()


class DeviceAdam:
    """Runs Adam of all device groups of a model, and moves their weights. See [Note: few launches]."""

    def __init__(
        self, groups: Sequence[DeviceGroup], settings: LSPParams, *, device: torch.device, max_norm: float
    ) -> None:
        self._groups, self._settings, self._device, self._max_norm = list(groups), settings, device, max_norm
        for group in groups:
            if any(matrix.subspace is None and matrix.parameter.ndim >= 2 for matrix in group.matrices):
                group.moments = [Moments.zeros(matrix.shape, device) for matrix in group.matrices]
                for matrix in (matrix for matrix in group.matrices if matrix.subspace is not None):
                    matrix.total = torch.empty(matrix.shape, device=device)
        flat = [group for group in groups if not group.moments]
        matrices = [matrix for group in flat for matrix in group.matrices]
        by_size = sorted(matrices, key=_padded_numel, reverse=True)
        starts = dict(zip(map(id, by_size), accumulate(map(_padded_numel, by_size), initial=0), strict=False))
        self._grad = torch.zeros(sum(map(_padded_numel, matrices)), device=device)
        """All gradients, the largest first."""
        self._sizes = [(size, len(list(found))) for size, found in groupby(map(_padded_numel, by_size))]
        """The sizes of gradients in `_grad`, and the number of gradients of each size."""
        self._place_of = {id(matrix): place for place, matrix in enumerate(by_size)}
        """By the id of a `MatrixState`: the position of its gradient in `_grad`."""
        view = lambda i, memory: _view(memory, matrices[i], starts[id(matrices[i])])  # noqa: E731
        moments = FlatMoments.zeros(self._grad.numel(), len(matrices), view, device=device)
        self._num_steps, parts = moments.whole.num_steps, iter(moments.parts)
        directions = torch.empty(max((sum(map(_padded_numel, g.matrices)) for g in flat), default=0), device=device)
        for group in flat:
            places = list(accumulate(map(_padded_numel, group.matrices), initial=0))
            for matrix, start in zip(group.matrices, places, strict=False):
                group.moments.append(next(parts))
                group.grads.append(_view(self._grad, matrix, starts[id(matrix)]))
                group.directions.append(_view(directions, matrix, start))
                matrix.total = None if matrix.subspace is None else group.grads[-1]
        self._indices: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = {}

    @torch.no_grad()
    def step(
        self, rates: Callable[[Sequence[MatrixState]], list[Rate | None]], *, factor: float
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Runs Adam on gradients times `factor`, and moves the weights. Returns the norms of these gradients, and
        whether the gradients of each group are finite. Groups without a gradient are left out."""
        matrices = [matrix for group in self._groups for matrix in group.matrices]
        rate_of = dict(zip(map(id, matrices), rates(matrices), strict=True))
        found = []
        for is_complete, members in groupby(self._groups, key=lambda group: group.is_complete):
            if is_complete:
                found.append(self._step_together(list(members), rate_of, factor=factor))
            else:
                found += [self._step_alone(g, rate_of, factor=factor) for g in members if _with_gradients(g)]
        return found

    def _step_together(
        self, groups: list[DeviceGroup], rate_of: RateOf, *, factor: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """A step of groups that are adjacent in the model."""
        pairs = [pair for group in groups for pair in zip(group.matrices, group.grads, strict=True)]
        whole = [pair for pair in pairs if pair[0].subspace is None]
        if whole:
            torch._foreach_copy_([grad for _, grad in whole], [matrix.gradient for matrix, _ in whole])
        places, group_of, members = self._indices_of(groups)
        norms = torch.stack(torch._foreach_norm([grad for _, grad in pairs]))
        if factor != 1.0:
            norms = norms * factor
        if self._max_norm > 0 or factor != 1.0:
            coefs = torch.ones(len(self._place_of), device=self._device)
            self._scale_(coefs.index_copy_(0, places, clip_coefs(norms, self._max_norm) * factor))
        are_finite = (norms < math.inf)[members].all(1)
        is_counted = are_finite.to(torch.float32)
        first = groups[0].moments[0].num_steps.storage_offset()
        self._num_steps[first : first + len(pairs)].add_(is_counted[group_of])
        betas, eps = self._settings.betas, self._settings.eps
        for group, overflow in zip(groups, (1.0 - is_counted).unbind(), strict=True):
            torch._foreach_zero_(group.directions)
            means, squares = [m.mean for m in group.moments], [m.mean_square for m in group.moments]
            steps = [m.num_steps for m in group.moments]
            adam_(group.directions, group.grads, means, squares, steps, overflow=overflow, betas=betas, eps=eps)
            group.move_weights(group.matrices, group.directions, rate_of)
        return norms, are_finite

    def _indices_of(self, groups: list[DeviceGroup]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """On the device: the place and the group of each gradient, and a row for each group with the numbers of its
        gradients. Shorter rows repeat their last number."""
        key = id(groups[0]), len(groups)
        if key not in self._indices:
            ends = list(accumulate(len(group.matrices) for group in groups))
            longest = max(len(group.matrices) for group in groups)
            rows = [range(end - len(group.matrices), end) for group, end in zip(groups, ends, strict=True)]
            values = (
                [self._place_of[id(matrix)] for group in groups for matrix in group.matrices],
                [i for i, row in enumerate(rows) for _ in row],
                [[*row, *[row[-1]] * (longest - len(row))] for row in rows],
            )
            places, group_of, members = map(partial(torch.tensor, device=self._device), values)
            self._indices[key] = places, group_of, members
        return self._indices[key]

    def _scale_(self, coefs: torch.Tensor) -> None:
        """Multiplies each gradient in `_grad` by its coefficient."""
        start = place = 0
        for size, number in self._sizes:
            rows = self._grad[start : start + number * size].view(number, size)
            rows.mul_(coefs[place : place + number].unsqueeze(1))
            start, place = start + number * size, place + number

    def _step_alone(self, group: DeviceGroup, rate_of: RateOf, *, factor: float) -> tuple[torch.Tensor, torch.Tensor]:
        """The step of a group with a whole matrix, or in which a parameter has no gradient."""
        active = _with_gradients(group)
        moments = [own for own, matrix in zip(group.moments, group.matrices, strict=True) if matrix.has_total]
        grads = [matrix.gradient.float() for matrix in active]
        out = [torch.empty_like(grad) for grad in grads]
        norms = clip_(grads, self._max_norm, factor=factor)
        directions_(out, grads, moments, norms=norms, betas=self._settings.betas, eps=self._settings.eps)
        group.move_weights(active, out, rate_of)
        return norms, (norms < math.inf).all().unsqueeze(0)


def _with_gradients(group: DeviceGroup) -> list[MatrixState]:
    return [matrix for matrix in group.matrices if matrix.has_total]


def _padded_numel(matrix: MatrixState) -> int:
    return -(-math.prod(matrix.shape) // _ALIGNED_NUMEL) * _ALIGNED_NUMEL


def _view(memory: torch.Tensor, matrix: MatrixState, start: int) -> torch.Tensor:
    return memory[start : start + math.prod(matrix.shape)].view(matrix.shape)
