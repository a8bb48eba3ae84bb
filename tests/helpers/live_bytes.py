"""A mode that measures the memory of tensors."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Records the most bytes that were alive at a time, of tensors made inside."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._alive: dict[int, weakref.ref[Any]] = {}

    def counts(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor that is made inside counts."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {x.untyped_storage()._cdata for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)}
        found = func(*args, **(kwargs or {}))
        made = [x.untyped_storage() for x in tree_leaves(found) if isinstance(x, torch.Tensor) and self.counts(x)]
        self._alive |= {s._cdata: weakref.ref(s) for s in made if s._cdata not in given}
        self._alive = {key: ref for key, ref in self._alive.items() if ref() is not None}
        self.peak = max(self.peak, sum(storage.nbytes() for ref in self._alive.values() if (storage := ref())))
        return found
