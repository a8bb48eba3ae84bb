"""Switches off the key-value caches of transformers, which a training step does not use."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import nn


class Caches:
    """The key-value caches of a model's parts. transformers fills them unless `config.use_cache` is False.

    Interleaved forward passes would keep one cache each. A recomputed block would fill its cache twice. Compiled blocks
    could not share one graph, because a block's use of the cache depends on its index. A cache copies keys and values
    to contiguous memory, and products of such copies round differently. So resident blocks use no cache in training.
    """

    def __init__(self, module: nn.Module) -> None:
        found = (getattr(m, "config", None) for m in module.modules())
        self._configs: list[Any] = list({id(config): config for config in found if config is not None}.values())

    @contextmanager
    def off(self) -> Iterator[None]:
        """Context in which `use_cache` is False in all configs of the model."""
        with ExitStack() as stack:
            for config in self._configs:
                if getattr(config, "use_cache", False) is True:
                    config.use_cache = False
                    stack.callback(setattr, config, "use_cache", True)
            yield
