"""Update rules: they change a parameter by its gradient, independent of backends and of streaming."""

from __future__ import annotations

from ds_zo.optim.loss_scale import LossScaler
from ds_zo.optim.rules import (
    OFFSET_ALIGNMENT,
    AdamMoments,
    Dither,
    FactoredMoments,
    adalomo_update_,
    adamw_update_,
    gradient_guard,
    sgd_update_,
)

__all__ = [
    "OFFSET_ALIGNMENT",
    "AdamMoments",
    "Dither",
    "FactoredMoments",
    "LossScaler",
    "adalomo_update_",
    "adamw_update_",
    "gradient_guard",
    "sgd_update_",
]
