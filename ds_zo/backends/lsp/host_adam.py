"""Adam of one group of parameters in host memory: the buffers that are copied, and the moments, which never are.

[Note: undone updates] A host update that started inside a backward pass must be undone if `zero_grad` or a checkpoint
comes before `step`. Adam's moments are then restored by subtracting the gradient's part, exactly but for rounding.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ds_zo.backends.lsp.buffer_layout import BufferLayout
from ds_zo.backends.lsp.matrices import MatrixState
from ds_zo.config import LSPParams
from ds_zo.optim.subspace_adam import (
    FlatMoments,
    FlatTensors,
    HostScratch,
    Moments,
    clip_coefs,
    host_directions_,
    undo_moments_,
)
from ds_zo.streaming.host_store import HostStore


class HostAdam:
    """Turns gradients of a group into directions. Parameters are given by their index in the group."""

    def __init__(
        self,
        matrices: Sequence[MatrixState],
        layout: BufferLayout,
        settings: LSPParams,
        *,
        store: HostStore,
        scratch: HostScratch,
        max_norm: float,
    ) -> None:
        """`scratch`: memory of the thread that calls `update`."""
        self._layout, self._settings, self._scratch, self._max_norm = layout, settings, scratch, max_norm
        self.gradients, self.directions = (store.take(layout.end) for _ in range(2))
        self._flat = FlatMoments.zeros(layout.projected_numel, layout.num_projected, layout.view)
        whole = [matrix.shape for matrix in matrices[layout.num_projected :]]
        self.moments = [*self._flat.parts, *(Moments.zeros(shape, "cpu") for shape in whole)]
        self.whole_norms = store.take(4 * len(whole)).view(torch.float32) if whole else torch.empty(0)
        """Norms of whole gradients. The device computes them, which saves a pass through host memory."""

    def update(self, active: Sequence[int], *, factor: float) -> torch.Tensor:
        """Runs Adam on the `active` parameters, from `gradients` times `factor` to `directions`. Returns the norms of
        these gradients."""
        if not active:
            return torch.zeros(0)
        layout, settings = self._layout, self._settings
        outs, grads = ([layout.view(i, side) for i in active] for side in (self.directions, self.gradients))
        whole = [k for k, i in enumerate(active) if i >= layout.num_projected]
        flat = None
        if len(active) - len(whole) == layout.num_projected > 0:  # the usual case
            flat = FlatTensors(layout.flat(self.directions), layout.flat(self.gradients), self._flat)
        return host_directions_(
            outs,
            grads,
            [self.moments[i] for i in active],
            max_norm=self._max_norm,
            factor=factor,
            betas=settings.betas,
            eps=settings.eps,
            scratch=self._scratch,
            flat=flat,
            known=dict(zip(whole, self.whole_norms[: len(whole)].tolist(), strict=True)),
        )

    @torch.no_grad()
    def undo(self, active: Sequence[int], norms: torch.Tensor) -> list[torch.Tensor]:
        """Restores the moments before `update` with the factor 1, which returned `norms`. Returns the gradients before
        clipping."""
        grads = [self._layout.view(i, self.gradients) for i in active]
        clipped, unclipped = [], []
        for grad, coef in zip(grads, clip_coefs(norms, self._max_norm), strict=True):
            in_place = grad.dtype is torch.float32  # then `update` has clipped `gradients`
            clipped.append(grad if in_place else grad.float() * coef)
            unclipped.append(grad / coef if in_place else grad.float())
        if bool(norms.isfinite().all()):
            undo_moments_(clipped, [self.moments[i] for i in active], betas=self._settings.betas)
        return unclipped
