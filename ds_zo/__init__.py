"""ds_zo: DeepSpeed update paths that fit (ZO, LOMO, LSP), chosen by `optimizer.type` in the DeepSpeed JSON.

Importing this package is what makes DeepSpeed know them; every other JSON keeps DeepSpeed's own engine.
"""

from __future__ import annotations

from ds_zo import command_line  # noqa: F401  first: it decides where DeepSpeed's logger writes
from ds_zo.config import ConfigError, register_backend
from ds_zo.plugin import install, uninstall
from ds_zo.streaming.loading import load_pretrained

__version__ = "0.1.0"
__all__ = ["ConfigError", "__version__", "install", "load_pretrained", "register_backend", "uninstall"]

install()
