"""The base of every model of ours: strict, closed, and with one meaning of "automatic"."""

from __future__ import annotations

from typing import Any

from deepspeed.runtime.config_utils import DeepSpeedConfigModel
from pydantic import BaseModel, ConfigDict


class ConfigModel(DeepSpeedConfigModel):
    """A closed JSON object: no unknown keys, no coercion ("8" is not 8), no NaN. Text under a field documents it."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False, use_attribute_docstrings=True, frozen=True)

    def __init__(self, /, **data: Any) -> None:
        # Left out, null and "auto" are the same to a user. DeepSpeed's own __init__ is passed over: it would take a
        # key named "strict" for its argument, and we have no deprecated fields for it to look after.
        BaseModel.__init__(self, **{k: v for k, v in data.items() if v is not None and not _is_auto(v)})


def _is_auto(value: Any) -> bool:
    return isinstance(value, str) and value == "auto"
