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

    def __init__(self, /, **data: Any) -> None:
        # null and "auto" mean the same as leaving a key out. DeepSpeed's own __init__ is not called: it would take a
        # key named "strict" for its argument, and it handles deprecated fields, which we do not have.
        BaseModel.__init__(self, **{k: v for k, v in data.items() if v is not None and not _is_auto(v)})


def _is_auto(value: Any) -> bool:
    return isinstance(value, str) and value == "auto"
