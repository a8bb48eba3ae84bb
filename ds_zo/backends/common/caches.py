"""Key-value caches, which no training step reads."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import nn


class Caches:
    """Those that transformers' models fill unless their configs say otherwise. Passes side by side would keep one each,
    a block that is computed again would fill one twice, and no two compiled blocks would be alike."""

    def __init__(self, module: nn.Module) -> None:
        found = (getattr(m, "config", None) for m in module.modules())
        self._configs: list[Any] = list({id(config): config for config in found if config is not None}.values())

    @contextmanager
    def off(self) -> Iterator[None]:
        with ExitStack() as stack:
            for config in self._configs:
                if getattr(config, "use_cache", False) is True:
                    config.use_cache = False
                    stack.callback(setattr, config, "use_cache", True)
            yield
