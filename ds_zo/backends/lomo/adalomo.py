"""AdaLOMO: LOMO with a learning rate that adapts to each row and column of a weight matrix.

Its state is one vector for the rows and one for the columns of each matrix.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from ds_zo.backends.lomo.backend import LOMOBackend
from ds_zo.backends.lomo.parameters import ParameterState
from ds_zo.backends.lomo.updates import UpdateRule
from ds_zo.config import AdaLOMOParams
from ds_zo.optim import FactoredMoments, adalomo_update_


def update_by_adalomo(
    state: ParameterState, grad: torch.Tensor, settings: AdaLOMOParams, **options: Any
) -> torch.Tensor | None:
    """AdaLOMO's rule. `options`: see `UpdateRule.update`."""
    state.moments = state.moments or FactoredMoments.zeros(state.parameter)
    assert isinstance(state.moments, FactoredMoments)
    return adalomo_update_(state.parameter, grad, state.moments, settings, residue=state.residue, **options)


class AdaLOMOBackend(LOMOBackend):
    """LOMO whose updates are normalised by factored second moments."""

    rule: ClassVar[UpdateRule] = UpdateRule(update_by_adalomo, is_elementwise=False, has_moments=True)
