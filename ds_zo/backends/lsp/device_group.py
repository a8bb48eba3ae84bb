"""Parameters whose Adam runs on the device of the weights."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from ds_zo.backends.lsp.matrices import MatrixState
from ds_zo.backends.lsp.products import LaunchCache, Rate, apply_directions_
from ds_zo.config import LSPParams
from ds_zo.optim.subspace_adam import FlatTensors, Moments, clip_, directions_


def flat_numel(matrices: Sequence[MatrixState]) -> int:
    """Elements of a DeviceGroup's flat memory. It has none if one of the parameters is a whole matrix."""
    has_whole_matrices = any(matrix.subspace is None and matrix.parameter.ndim >= 2 for matrix in matrices)
    return 0 if has_whole_matrices else sum(math.prod(matrix.shape) for matrix in matrices)


class DeviceGroup:
    """A layer's parameters, or all vectors of a model. Adam runs in `step`."""

    def __init__(
        self,
        matrices: Sequence[MatrixState],
        settings: LSPParams,
        *,
        device: torch.device,
        max_norm: float,
        directions: torch.Tensor,
    ) -> None:
        """`directions`: float32 memory that all groups of the model use in turn."""
        self.matrices = sorted(matrices, key=lambda matrix: matrix.subspace is None)
        self._settings, self._max_norm = settings, max_norm
        self._launch_cache = LaunchCache()
        self._flat: FlatTensors | None = None
        """Contiguous memory of all gradients and moments; None if one of the parameters is a whole matrix."""
        shapes = [matrix.shape for matrix in self.matrices]
        if flat_numel(matrices):
            self._flat = FlatTensors(shapes, device, out=directions)
            self.moments = self._flat.moments.parts
        else:
            self.moments = [Moments.zeros(shape, device) for shape in shapes]
        for i, matrix in enumerate(self.matrices):
            if matrix.subspace is not None:
                flat = self._flat
                matrix.total = torch.empty(matrix.shape, device=device) if flat is None else flat.grads[i]

    def start(self, trained: Sequence[bool]) -> None:
        """Begins a step, in which parameters are `trained` or not. One rank has nothing to do before Adam."""

    def finish(self) -> None:
        """Makes the gradients of the step final."""

    @torch.no_grad()
    def step(self, rates: list[Rate | None], *, factor: float) -> torch.Tensor | None:
        """Runs Adam on gradients times `factor`, and moves the weights. Returns the norms of these gradients; None: no
        parameter has one."""
        active = [i for i, matrix in enumerate(self.matrices) if matrix.has_total]
        if not active:
            return None
        flat, betas, eps = self._flat, self._settings.betas, self._settings.eps
        if flat is not None and len(active) == len(self.matrices) and flat.have_equal_steps():
            vectors = [matrix.gradient.reshape(-1) for matrix in self.matrices if matrix.subspace is None]
            if vectors:
                flat.grad[-sum(vector.numel() for vector in vectors) :].copy_(torch.cat(vectors))
            norms, out = flat.step_(max_norm=self._max_norm, factor=factor, betas=betas, eps=eps), flat.outs
        else:
            grads = [self.matrices[i].gradient.float() for i in active]
            out = [torch.empty_like(grad) for grad in grads]
            norms = clip_(grads, self._max_norm, factor=factor)
            directions_(out, grads, [self.moments[i] for i in active], norms=norms, betas=betas, eps=eps)
        matrices = [self.matrices[i] for i in active]
        apply_directions_(self._launch_cache, zip(matrices, out, (rates[i] for i in active), strict=True))
        for matrix in matrices:
            matrix.clear()
        return norms
