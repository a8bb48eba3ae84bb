"""What several commands do with their arguments and their output."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from contextlib import redirect_stdout
from typing import Any, TypeVar

_T = TypeVar("_T")


def unprinted(work: Callable[..., _T], *args: Any, **kwargs: Any) -> _T:
    """Calls `work` with standard output redirected to standard error, because libraries print there.

    DeepSpeed, for one, prints how long an operator took to load.
    """
    with redirect_stdout(sys.stderr):
        return work(*args, **kwargs)


def json_object(text: str, option: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{option} must be a JSON object, got {text!r}: {error} ({option})") from None
    if not isinstance(found, dict):
        raise ValueError(f"{option} must be a JSON object, got {text!r}: write {{...}} ({option})")
    return found
