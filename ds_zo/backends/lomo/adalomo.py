"""AdaLOMO: LOMO with a learning rate that adapts to each row and column of a weight matrix.

Its state is one vector for the rows and one for the columns of each matrix.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch

from ds_zo.backends.lomo.backend import LOMOBackend
from ds_zo.backends.lomo.gradients import ParameterState
from ds_zo.config import AdaLOMOParams
from ds_zo.optim import Dither, FactoredMoments, adalomo_update_


class AdaLOMOBackend(LOMOBackend):
    """LOMO whose updates are normalised by factored second moments."""

    updates_pieces: ClassVar[bool] = False
    has_moments: ClassVar[bool] = True
    settings: AdaLOMOParams

    def _update_weight(
        self,
        state: ParameterState,
        grad: torch.Tensor,
        *,
        lr: float,
        decay: float,
        coef: torch.Tensor | None,
        dither: Dither | None,
        guards: Sequence[torch.Tensor],
    ) -> torch.Tensor | None:
        state.moments = state.moments or FactoredMoments.zeros(state.parameter)
        assert isinstance(state.moments, FactoredMoments)
        return adalomo_update_(
            state.parameter,
            grad,
            state.moments,
            lr=lr,
            decay=decay,
            decay_rate=self.settings.decay_rate,
            eps=self.settings.adalomo_eps,
            clip_threshold=self.settings.clip_threshold,
            coef=coef,
            clip_value=self.settings.clip_grad_value,
            dither=dither,
            residue=state.residue,
            guards=guards,
        )
