"""The batch sizes that a block gets, which tell whether it runs over tiles of a batch."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from ds_zo.streaming.blocks import find_blocks


def batch_sizes(model: nn.Module) -> list[int]:
    """A list to which each later call of the second block adds the size of its batch."""
    sizes: list[int] = []
    block = list(find_blocks(model).values())[1]
    layer: Any = next(m for m in block.modules() if not list(m.children()) and list(m.parameters()))

    def noted(forward: Callable[..., Any], hidden: torch.Tensor) -> Any:
        sizes.append(len(hidden))
        return forward(hidden)

    layer.forward = partial(noted, layer.forward)
    return sizes
