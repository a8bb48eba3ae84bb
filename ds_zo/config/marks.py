"""Marks of keys: which backends read a key, and what it needs.

Fields of our models have marks in `ds_zo/config/section.py`, and DeepSpeed's keys in `ds_zo/config/keys.py`. Refusals,
ignored keys, `ds-zo convert`, `ds-zo plan` and the key tables are loops over them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum, Flag, auto
from typing import Any, TypeVar

from pydantic import BaseModel

from ds_zo.config.errors import model_in
from ds_zo.config.stock import is_on


class Trait(Flag):
    """A trait of a backend. `register_backend` takes each as a keyword, in lower case."""

    STREAMS = auto()
    """The backend streams blocks when `offload_param.device` is "cpu". Without it the configuration refuses that
    setting, and the whole model is on the device before the backend's constructor runs."""
    SHARDS_HOST = auto()
    """Under ZeRO stage 3 and streaming, the ranks of a machine divide its host copy of the weights among them."""
    SHARDS_DEVICE = auto()
    """Under ZeRO stage 3 without streaming, each device keeps a shard of every block."""
    OFFLOADS_OPTIMIZER = auto()
    """The backend reads `offload_optimizer`. Without it the section is reported as ignored."""
    SCALES_LOSS = auto()
    """The backend scales fp16 losses as the `fp16` section says, or refuses fp16. Without it the scaling keys of that
    section are reported as ignored."""
    REFUSES_FP16 = auto()
    """The backend does not train in fp16, because it does not scale losses."""
    CLIPS_GRADIENTS = auto()
    """The backend applies `gradient_clipping`. Without it the start-up log says that it has no effect."""
    ZEROTH_ORDER = auto()
    """The backend estimates gradients from losses, so that AdamW's learning rates are far too large for it."""
    ADAMW_RATES = auto()
    """AdamW's learning rates suit the backend. Without it a warning says that they may not."""
    UPDATES_IN_BACKWARD = auto()
    """Each gradient is applied and freed inside the backward pass. Accumulation is refused by default, and the norm for
    `gradient_clipping` takes a backward pass of its own."""
    COMPILES_BLOCKS = auto()
    REPLAYS_UPDATES = auto()
    OFFLOADS_ACTIVATIONS = auto()
    STORES_FROZEN_DTYPES = auto()
    """Frozen weights may have another dtype than the model."""
    STORES_OTHER_DTYPES = auto()
    """All weights may have another dtype than the model."""
    ROUNDS_UPDATES = auto()
    """The backend rounds updated weights to 16 bits itself. `register_backend` gives the trait to each backend without
    `stock_types`: these optimizers update float32 masters."""
    ROUNDS_BY_KAHAN = auto()
    """The backend has `rounding` kahan for weights on the device."""


NO_BACKEND = Trait(0)
MODEL_DTYPE = "the model's dtype"
"""In `ReadBy.without`: the name of the dtype that the JSON gives the model."""


@dataclass(frozen=True)
class ReadBy:
    """The backends that read a key. Any other one accepts the values that it acts by anyway, and no others."""

    traits: Trait | None = None
    """A backend with one of these reads the key; None: every backend."""

    unless: Trait = NO_BACKEND
    """A backend with one of these does not read the key."""

    value: Any = None
    """The mark is about this value of the key alone; None: about every value."""

    without: tuple[Any, ...] = ()
    """Values that a backend acts by which does not read the key."""

    is_feature: bool = False
    """The key switches a feature on, which no backend has that does not read the key."""

    refusal: str | None = "{key} belongs to {readers}, got {value} under {backend}; leave it out"
    """The error of another value under such a backend; None: the key is reported as ignored."""

    is_told: bool = True
    """False for an ignored key that clients write by themselves, or of which the backend logs a line of its own."""

    removal: str | None = "it belongs to {readers}"
    """Reason of `ds-zo convert` to remove the key. None: `convert` changes the value, or has no backend to remove it
    for."""

    def concerns(self, value: Any, *, model_dtype: str) -> bool:
        """Whether a backend that does not read the key acts otherwise than by this value. None: the key is left
        out."""
        if value is None or self.value not in (None, value):
            return False
        accepted = [model_dtype if other == MODEL_DTYPE else other for other in self.without]
        return is_on(value) if self.is_feature else value not in accepted


class Needs(Enum):
    """Where weights must be for a key to have an effect."""

    STREAMING = "blocks stream"
    """A value is refused without it."""

    COPIES = "blocks stream, or devices shard them"
    """The key is reported as ignored without it."""

    def are_met(self, *, streams: bool, shards: bool) -> bool:
        return streams or (shards and self is Needs.COPIES)


class MayDiffer:
    """The key may differ between ranks: it is about placement, ways of computing, or files. Weights do not depend on
    it."""


Mark = TypeVar("Mark", ReadBy, Needs, MayDiffer)


def marks_in(model: type[BaseModel], kind: type[Mark]) -> Iterator[tuple[str, Mark]]:
    """Each mark of a kind with the dotted key of its field, also in the objects inside."""
    for key, info in model.model_fields.items():
        inner = model_in(info.annotation)
        if inner is not None:
            yield from ((f"{key}.{path}", mark) for path, mark in marks_in(inner, kind))
        yield from ((key, mark) for mark in info.metadata if isinstance(mark, kind))


def written_at(found: BaseModel, path: str) -> Any:
    """The value that the JSON has at a dotted key; None where it is left out."""
    key, _, rest = path.partition(".")
    if key not in found.model_fields_set:
        return None
    return written_at(getattr(found, key), rest) if rest else getattr(found, key)


def written_with(found: BaseModel, needs: Needs) -> list[tuple[str, Any]]:
    """Dotted keys with this need that the JSON has, and their values."""
    values = [(path, written_at(found, path)) for path, mark in marks_in(type(found), Needs) if mark is needs]
    return [(path, value) for path, value in values if value is not None]
