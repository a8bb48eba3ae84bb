"""Learning rates to start from, by backend and size of the model.

They are rows of the table "Learning rates to start from" in docs/recipes.md. That table is made from ds_configs/ and
from benchmark rows, which are not in the wheel. tests/config/test_conversion.py compares the two.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class StartingRate:
    """One learning rate, and what it is for."""

    backend: str
    method: str
    """Name of the method in the table of docs/recipes.md."""
    model: str
    """Name of the model in that table."""
    below_numel: float
    """The rate is for models with fewer parameters than this."""
    lr: float
    source: str
    is_clipped: bool | None = None
    """Whether `gradient_clipping` is on; None: the rate is for both."""

    @property
    def basis(self) -> str:
        """The model that the rate is for, and where the rate comes from."""
        return f"for {self.model}: {self.source}"


STARTING_RATES = (
    StartingRate("zo", "ZO", "SmolLM2-135M", 1e9, 1e-5, "the best of three rates tried"),
    StartingRate("zo", "ZO", "up to 7B", 10e9, 1e-6, "ten times MeZO's rate for OPT-13B"),
    StartingRate("zo", "ZO", "13B and larger", math.inf, 1e-7, "MeZO's rate for OPT-13B"),
    StartingRate("lomo", "LOMO, clipped", "SmolLM2-135M", 1e9, 0.1, "the best of three rates tried", True),
    StartingRate("lomo", "LOMO, clipped", "7B", math.inf, 0.03, "the LOMO authors' rate for LLaMA-7B", True),
    StartingRate(
        "lomo", "LOMO, not clipped", "7B and larger", math.inf, 0.01, "a third of the rate with clipping", False
    ),
    StartingRate("adalomo", "AdaLOMO", "7B", math.inf, 5e-4, "the AdaLomo authors' rate for LLaMA-7B"),
    StartingRate("lsp", "LSP", "SmolLM2-135M", 1e9, 1e-4, "the only rate tried"),
    StartingRate("lsp", "LSP", "7B", math.inf, 2e-5, "the rate of AdamW in Stanford Alpaca's settings for LLaMA-7B"),
    StartingRate("adapter", "LoRA by AdamW", "70B", math.inf, 1e-4, "QLoRA's rate for LLaMA-65B"),
)
_USUAL_NUMEL = 7e9


def starting_rate(backend: str, *, num_parameters: int | None = None, is_clipped: bool = True) -> StartingRate:
    """The learning rate to start from. `num_parameters` None: that of a 7B model."""
    numel = _USUAL_NUMEL if num_parameters is None else num_parameters
    return next(
        rate
        for rate in STARTING_RATES
        if rate.backend == backend and numel < rate.below_numel and rate.is_clipped in (None, is_clipped)
    )
