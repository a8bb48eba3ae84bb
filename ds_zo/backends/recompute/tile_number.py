"""The number of tiles, and its choice by the first step where `ds_zo.stream.tiles` is null.

[Note: the number of tiles] In the first step each block runs on its whole batch. The tensors that autograd would save
show how much memory the block's backward pass needs. If the device has that memory beside the inputs of all blocks, one
tile is enough, and nothing else is done. Otherwise the block runs again, over the fewest tiles that fit. The blocks
after it run over as many, or over more. At the end of the step all ranks take the largest number of a rank and keep it.
A CPU has no limit, unless `device_memory_gb` sets one.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ds_zo.config import Resolved
from ds_zo.config.marks import Trait
from ds_zo.config.registry import entry_of
from ds_zo.logs import show
from ds_zo.streaming.block_store import BlockStore
from ds_zo.streaming.budget import MARGIN_NBYTES, budget_nbytes

_TRANSIENTS = 3
"""Tensors as large as the largest saved one that a backward pass has beside the saved ones: gradients on their way."""
_INPUTS_ON_DEVICE = 3
"""Inputs of blocks that are on the device while the host has the others."""
_NUM_HIDDEN_GRADIENTS = 2
"""Gradients of the size of a block's output: that of the output, and that of the input."""
_MOST = 65536


class SavedBytes:
    """Counts the memory of the tensors that autograd would save in a forward, for its backward pass."""

    def __init__(self, known: Iterable[torch.Tensor]) -> None:
        """`known`: tensors that are not counted."""
        self._total = self._largest = 0
        self._has_ended = False
        self._seen: dict[int, Any] = {t.untyped_storage()._cdata: None for t in known if t.layout is torch.strided}
        """By storage, a reference that removes it when its memory is freed, and may be used again."""

    def add(self, tensor: torch.Tensor) -> None:
        if self._has_ended or tensor.layout is not torch.strided:
            return
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._seen:
            self._seen[key] = weakref.ref(storage, lambda _: self._seen.pop(key, None))
            self._total += storage.nbytes()
            self._largest = max(self._largest, storage.nbytes())

    def end(self) -> None:
        self._has_ended = True

    @property
    def backward_nbytes(self) -> int:
        """Bytes that the recomputation and the backward pass need, gradients of weights aside."""
        return self._total + _TRANSIENTS * self._largest


class TileNumber:
    """See [Note: the number of tiles]."""

    def __init__(self, module: nn.Module, store: BlockStore, config: Resolved, *, state_nbytes: int) -> None:
        """`state_nbytes`: bytes of the optimizer's states for each element that is trained outside of the store."""
        stream = config.section.stream
        self.value = stream.tiles or 1
        self.chosen = stream.tiles
        """The number that a resumed run keeps. None: there is none."""
        has_limit = budget_nbytes(store.device, budget_gb=stream.device_memory_gb) is not None
        self.is_open = stream.tiles is None and has_limit
        """Whether the first step has yet to choose."""
        self._module, self._store, self._state_nbytes = module, store, state_nbytes
        self._kept_inputs = _INPUTS_ON_DEVICE if stream.offload_activations else len(store.placement.blocks)
        self._frees_gradients = entry_of(config.backend).has(Trait.UPDATES_IN_BACKWARD)
        self._free_nbytes: int | None = None
        """Bytes that a forward and its backward pass may take, as its begin found. None: as many as they need."""

    def begin_forward(self) -> None:
        if self.is_open:
            free = self._store.unallocated_nbytes()
            self._free_nbytes = None if free is None else free - MARGIN_NBYTES - self._later_nbytes()

    def _later_nbytes(self) -> int:
        """Bytes of gradients and optimizer states that the first step makes of weights outside of the store."""
        stored = {id(placed.parameter) for unit in self._store.placement.blocks for placed in unit.placed}
        trained = [p for p in self._module.parameters() if p.requires_grad and id(p) not in stored]
        gradients = 0 if self._frees_gradients else sum(p.nbytes for p in trained if p.grad is None)
        return gradients + self._state_nbytes * sum(p.numel() for p in trained)

    def fitting(
        self, saved: SavedBytes, outputs: Sequence[torch.Tensor], trained: Sequence[nn.Parameter], *, num_tiles: int
    ) -> int:
        """The fewest tiles over which a block may run, and at least `num_tiles`. `saved`: of a forward over `num_tiles`
        tiles, counted for one of them. `trained`: the block's trained weights."""
        if self._free_nbytes is None:
            return num_tiles
        hidden = sum(t.nbytes for t in outputs if t.requires_grad)
        free = self._free_nbytes - (self._kept_inputs + _NUM_HIDDEN_GRADIENTS) * hidden
        one_gradient = max((p.nbytes for p in trained), default=0)
        if saved.backward_nbytes <= free - (one_gradient if num_tiles == 1 else _sums_nbytes(trained)):
            return num_tiles
        rest = free - _sums_nbytes(trained)
        needed = saved.backward_nbytes * num_tiles
        return _MOST if rest <= 0 else min(_MOST, max(num_tiles + 1, math.ceil(needed / rest)))

    def settle(self) -> None:
        """Called by all ranks after each step. The first one ends the choice."""
        if not self.is_open:
            return
        if dist.is_initialized():
            found = torch.tensor(self.value, device=self._store.device)
            dist.all_reduce(found, op=dist.ReduceOp.MAX, group=self._store.process_group)
            self.value = int(found)
        self.is_open, self.chosen = False, self.value
        if self.value > 1:
            show(
                f"ds_zo: each block runs over up to {self.value} slices of the batch, the fewest with which the first "
                "batch fits the device; name more for larger batches (ds_zo.stream.tiles)"
            )

    def keep(self, number: int | None) -> None:
        """Called with `chosen` of the run that is resumed. A number in the JSON counts for more."""
        if self.is_open and number is not None:
            self.value, self.chosen, self.is_open = number, number, False


def _sums_nbytes(trained: Sequence[nn.Parameter]) -> int:
    """Bytes of the gradients that several tiles sum in float32, and of one that is about to be added."""
    numels = [p.numel() for p in trained]
    return 4 * (sum(numels) + max(numels, default=0))
