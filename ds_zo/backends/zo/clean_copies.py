"""Keeps the weights that an evaluation has replayed, for the forwards that follow.

[Note: kept clean copies] An evaluation replays the pending updates of every unit, and it must not fold: folds depend on
the step alone. `generate` runs one forward a token, so without kept copies each token would replay every unit again.
The first forward copies what it has replayed. Later forwards read that copy, which has the same bits, and upload the
unit only if some of its parameters are frozen. All copies are freed where stored weights are replaced, and when the
next training forward begins. Together they take no more memory than they leave free on the device, within the user's
budget. A copy in host memory would not help a CUDA device: uploads hide the replay of streamed units.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from ds_zo.logs import show
from ds_zo.streaming.budget import release_cached_memory
from ds_zo.streaming.units import Unit


@dataclass
class _Copy:
    weights: torch.Tensor
    unchecked: torch.Tensor | None
    """What the unit's first forward reads, until that forward is over. None: it has left these weights alone."""


class CleanCopies:
    """The copies by unit; see [Note: kept clean copies]. A copy holds the unit's parameters that are not frozen."""

    def __init__(self, device: torch.device, *, free_nbytes: Callable[[], int]) -> None:
        """`free_nbytes` returns the device memory that no training step needs."""
        self._device = device
        self._free_nbytes = free_nbytes
        self._step = 0
        """The step of all copies' weights."""
        self._copies: dict[int, _Copy] = {}
        self._refused: set[int] = set()
        """Units, by id, that are replayed in every forward until `drop`."""
        self.addresses: set[int] = set()
        """Where the memory of each copy starts."""
        self.nbytes = 0
        self._has_logged = False

    def find(self, unit: Unit, *, step: int) -> torch.Tensor | None:
        """The unit's weights of `step`, if they are kept."""
        if self._step != step:
            self.drop()
            self._step = step
        # Asked once a forward, because activations may grow.
        if next(iter(self._copies), None) == id(unit) and self.nbytes > self._free_nbytes():
            refused = {*self._refused, *self._copies}
            self.drop()
            self._refused = refused
        copy = self._copies.get(id(unit))
        return None if copy is None or copy.unchecked is not None else copy.weights

    def keep(self, unit: Unit, scratch: torch.Tensor) -> None:
        """Copies the weights that `find` has not found, and that a forward is about to read in `scratch`, if there is
        memory."""
        nbytes = unit.second_copy_nbytes
        self._forget(unit)
        if id(unit) in self._refused:
            return
        if self.nbytes + 2 * nbytes > self._free_nbytes():
            self._refused.add(id(unit))
            if not self._has_logged:
                self._has_logged = True
                show(
                    "ds_zo: an evaluation keeps replayed weights in device memory that no training step needs, and "
                    f"leaves as much free, got no room for the {nbytes / 1e6:.3g} MB of {unit.name}: each forward "
                    "replays its pending updates; lower ds_zo.stream.resident_blocks or writeback_interval for faster "
                    "generation"
                )
            return
        kept = scratch[:nbytes].clone()
        self._copies[id(unit)] = _Copy(kept, unchecked=scratch[:nbytes])
        self.addresses.add(kept.data_ptr())
        self.nbytes += nbytes

    def check(self, unit: Unit) -> None:
        """Called when a forward has used the unit. A copy that differs from what its first forward has left is given
        up: that forward writes to its weights, and the next one must not see the change."""
        copy = self._copies.get(id(unit))
        if copy is None or copy.unchecked is None:
            return
        if torch.equal(copy.weights, copy.unchecked):
            copy.unchecked = None
        else:
            self._forget(unit)
            self._refused.add(id(unit))

    def drop(self) -> None:
        """Frees all copies."""
        self._refused = set()
        if self._copies:
            self._copies, self.addresses, self.nbytes = {}, set(), 0
            release_cached_memory(self._device)

    def _forget(self, unit: Unit) -> None:
        copy = self._copies.pop(id(unit), None)
        if copy is not None:
            self.addresses.discard(copy.weights.data_ptr())
            self.nbytes -= copy.weights.numel()
