"""The base class of our configuration models."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from deepspeed.runtime.config_utils import DeepSpeedConfigModel
from pydantic import BaseModel, ConfigDict


class ConfigModel(DeepSpeedConfigModel):
    """A JSON object without unknown keys, coercion ("8" is not 8) or NaN. The string under a field documents it."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False, use_attribute_docstrings=True, frozen=True)

    retired: ClassVar[Mapping[str, tuple[str, str]]] = {}
    """Keys of earlier versions: why there is none of this name, and the remedy."""

    always_on: ClassVar[frozenset[str]] = frozenset()
    """Those of them whose `true` asks for what every run does. It is ignored."""

    def __init__(self, /, **data: Any) -> None:
        # DeepSpeed's own __init__ is not called: it would take a key named "strict" for its argument, and it handles
        # deprecated fields, which we do not have.
        idle = {key for key in self.always_on if data.get(key) is True}
        BaseModel.__init__(self, **{k: v for k, v in data.items() if is_written(v) and k not in idle})


def is_written(value: Any) -> bool:
    """Whether a value in a JSON stands for one. null and "auto" mean the same as leaving the key out."""
    return value is not None and not (isinstance(value, str) and value == "auto")


def is_number(value: Any) -> bool:
    """Whether a value in a JSON is a number. true and false are none."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)
