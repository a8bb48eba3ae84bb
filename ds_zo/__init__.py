"""ds_zo: DeepSpeed backends for little GPU memory (ZO, LOMO, LSP), chosen by `optimizer.type` in the DeepSpeed JSON.

`import ds_zo` makes DeepSpeed know these optimizer types. Every other JSON keeps DeepSpeed's own engine.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ds_zo import command_line  # noqa: F401  first: it decides where DeepSpeed's logger writes
from ds_zo.versions import check_installed

check_installed()  # here: it refuses versions with which the imports below fail

# ruff: noqa: E402
from ds_zo.checkpoint import newest_complete
from ds_zo.checkpoint.preemption import Preemption
from ds_zo.config import ConfigError, register_backend
from ds_zo.plugin import install, uninstall
from ds_zo.streaming.loading import load_pretrained

if TYPE_CHECKING:
    from ds_zo.planner.plan import plan
    from ds_zo.tasks.embedded_model import FOLDER as EMBEDDED_MODEL

__version__ = "0.2.0"
__all__ = [
    "EMBEDDED_MODEL",
    "ConfigError",
    "Preemption",
    "__version__",
    "install",
    "load_pretrained",
    "newest_complete",
    "plan",
    "register_backend",
    "uninstall",
]

_IMPORTED_ON_USE = {
    "EMBEDDED_MODEL": ("ds_zo.tasks.embedded_model", "FOLDER"),
    "plan": ("ds_zo.planner", "plan"),
}
"""Module and name of each export whose module takes long to import (the tasks, the planner's model)."""


if not TYPE_CHECKING:  # a type checker takes the imports above, and finds misspelt names

    def __getattr__(name: str) -> Any:
        if name not in _IMPORTED_ON_USE:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        module, attribute = _IMPORTED_ON_USE[name]
        value = globals()[name] = getattr(import_module(module), attribute)
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


install()
