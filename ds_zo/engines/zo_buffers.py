"""Buffers of a module that a forward changes (running statistics, counters), for forwards that are made again."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

_Place = tuple[dict[str, torch.Tensor | None], str]
"""A module's buffers, and the name of one of them."""


class SavedBuffers:
    """Buffers as they are now. Parameters need none of this: a pass works on copies of them."""

    def __init__(self, places: Iterable[_Place]) -> None:
        self._saved = [
            (owner, name, buffer, buffer.detach().clone())
            for owner, name in places
            if (buffer := owner[name]) is not None and not buffer.is_meta
        ]

    @classmethod
    def of(cls, module: nn.Module) -> SavedBuffers:
        return cls((m._buffers, name) for m in module.modules() for name in m._buffers)

    def split_off_changed(self) -> SavedBuffers:
        """What has changed since, as it is now. The rest is no longer kept here either: masks and tables, most of
        them, that no forward changes."""
        self._saved = [
            (owner, name, buffer, value)
            for owner, name, buffer, value in self._saved
            if owner.get(name) is not buffer or not torch.equal(buffer, value)
        ]
        return SavedBuffers((owner, name) for owner, name, _, _ in self._saved if name in owner)

    @torch.no_grad()
    def put_back(self) -> None:
        """The same tensors with the values they had: recorded kernels know them by address."""
        for owner, name, buffer, value in self._saved:
            owner[name] = buffer
            buffer.copy_(value)
