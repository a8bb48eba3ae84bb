"""The one table of learning rates, by backend and size of the model.

Defaults of `lr`, `ds-zo convert`, `ds-zo plan`, warnings and the tables of keys read it. Its rates are rows of the
table "Learning rates to start from" in docs/recipes.md. That table is made from ds_configs/ and benchmark rows, which
are not in the wheel. tests/config/test_conversion.py compares the two.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ds_zo.config.marks import Trait

if TYPE_CHECKING:
    from ds_zo.config.resolved import Resolved


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
    StartingRate("adapter", "LoRA", "SmolLM2-135M", 1e9, 2e-3, "the best of three rates tried"),
    StartingRate("adapter", "LoRA by AdamW", "70B", math.inf, 1e-4, "QLoRA's rate for LLaMA-65B"),
)
_USUAL_NUMEL = 7e9
_FAR = 10.0
"""A rate is far from the table's if it is more than this many times larger than the largest, or smaller than the
smallest."""
_LARGEST_OF_SMALL = {"zo": 5e-4}
"""Learning rate of ZO for the embedded model of a million parameters. No larger one is known to train a language model
by ZO."""


def starting_rate(backend: str, *, num_parameters: int | None = None, is_clipped: bool = True) -> StartingRate:
    """The learning rate to start from. `num_parameters` None: that of a 7B model."""
    numel = _USUAL_NUMEL if num_parameters is None else num_parameters
    return next(
        rate
        for rate in STARTING_RATES
        if rate.backend == backend and numel < rate.below_numel and rate.is_clipped in (None, is_clipped)
    )


def has_rates(backend: str) -> bool:
    """Whether the table has a backend. One that is registered from outside ds_zo is not in it."""
    return any(rate.backend == backend for rate in STARTING_RATES)


def usual_rates(backend: str) -> tuple[float, float]:
    """The smallest and the largest learning rate of a backend in the table."""
    rates = [rate.lr for rate in STARTING_RATES if rate.backend == backend]
    return min(rates), max(rates)


def largest_rate(backend: str, num_trained: int | None = None) -> float:
    """The largest learning rate of a backend without a warning. ZO's falls with the number of trained parameters,
    because an estimate along one direction is longer than the gradient, by more the more parameters there are."""
    largest = _LARGEST_OF_SMALL.get(backend)
    if largest is not None:
        return largest if num_trained is None else min(largest, max(1e-5, 1e4 / max(1, num_trained)))
    return _FAR * usual_rates(backend)[1]


def far_rate(config: Resolved, lr: float, *, at: str, num_trained: int | None = None) -> str | None:
    """The warning of a learning rate far from the table's; None for a usual one, and for a backend without rates.

    Where AdamW's rates suit, none is too small: preference and reinforcement training lowers them by as much.
    """
    backend = config.backend
    if not lr or not has_rates(backend):
        return None
    low, high = usual_rates(backend)
    suits_adamw = config.entry.has(Trait.ADAMW_RATES)
    is_low = lr < low / _FAR and not suits_adamw
    if not is_low and lr <= largest_rate(backend, num_trained):
        return None
    is_clipped = config.gradient_clipping > 0
    start = starting_rate(backend, num_parameters=num_trained, is_clipped=is_clipped)
    clipping = "" if start.is_clipped is None else f" {'with' if is_clipped else 'without'} gradient_clipping"
    adamw = "" if suits_adamw else "; AdamW's rates do not suit it"
    return (
        f"{start.method.partition(',')[0]} trains at learning rates of about {low:g} to {high:g}, got {lr:g}, which is "
        f"far {'below' if is_low else 'above'} them{adamw}; start from {start.lr:g}{clipping} ({at})"
    )


def rate_table() -> str:
    """The table as Markdown, for pages."""
    rows = [f"| {rate.method} | {rate.model} | {rate.lr:g} | {rate.source} |" for rate in STARTING_RATES]
    return "\n".join(["| method | model | learning rate | where it comes from |", "| --- | --- | --- | --- |", *rows])
