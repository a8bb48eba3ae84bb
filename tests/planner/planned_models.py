"""Toy models without memory, for plans."""

from __future__ import annotations

from typing import Any

from ds_zo.planner import Model, Rates
from ds_zo.planner.models import DTYPES
from tests.helpers.tiny_models import tiny_model


def planned(name: str, *, dtype: Any = "fp32", batch: int = 2, seq: int = 8, **overrides: Any) -> Model:
    """The same shapes as `tiny_model`'s."""
    module = tiny_model(name, **overrides).to(device="meta", dtype=DTYPES[dtype])
    module.tie_weights()  # type: ignore[operator]
    module.config.use_cache = False  # type: ignore[union-attr]
    return Model(name, module, batch, seq, dtype, Rates())
