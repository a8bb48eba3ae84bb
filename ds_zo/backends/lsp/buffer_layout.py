"""Places of matrices in the flat buffers that are copied between device and host.

[Note: flat buffers] The projected matrices of a layer are contiguous, so that one copy moves a layer and a few torch
calls update it ([Note: few torch calls] in `optim/subspace_adam`). Whole parameters follow them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

ALIGNMENT = 16
"""Alignment of matrices in buffers, in bytes."""


class BufferLayout:
    """Places of matrices, of given shapes and dtypes, one after the other in a buffer of bytes."""

    def __init__(
        self, shapes: Sequence[tuple[int, ...]], dtypes: Sequence[torch.dtype], *, num_projected: int, gap: int = 0
    ) -> None:
        """`num_projected`: the first matrices, which are projected and in float32. `gap`: free bytes behind them."""
        self.num_projected = num_projected
        self._matrices = list(zip(shapes, dtypes, strict=True))
        sizes = [_aligned(math.prod(shape) * dtype.itemsize) for shape, dtype in self._matrices]
        self.projected_numel = sum(sizes[:num_projected]) // 4
        """Float32 elements of the projected matrices."""
        self.whole_start = 4 * self.projected_numel + _aligned(gap)
        self.end = self.whole_start + sum(sizes[num_projected:])
        """Bytes of a buffer."""
        self._starts = [
            sum(sizes[:i]) + (self.whole_start - 4 * self.projected_numel if i >= num_projected else 0)
            for i in range(len(sizes))
        ]
        self._views: dict[tuple[int, int], torch.Tensor] = {}
        """Views by matrix and buffer address. A view keeps its buffer alive, so that addresses are not reused."""

    def view(self, i: int, buffer: torch.Tensor) -> torch.Tensor:
        """The i-th matrix in a buffer, which starts as this layout does."""
        key = i, buffer.data_ptr()
        if key not in self._views:
            (shape, dtype), start = self._matrices[i], self._starts[i]
            nbytes = math.prod(shape) * dtype.itemsize
            self._views[key] = buffer.view(torch.uint8)[start : start + nbytes].view(dtype).view(shape)
        return self._views[key]

    def flat(self, buffer: torch.Tensor) -> torch.Tensor:
        """The projected matrices in a buffer, as one vector."""
        key = -1, buffer.data_ptr()
        if key not in self._views:
            self._views[key] = buffer.view(torch.uint8)[: 4 * self.projected_numel].view(torch.float32)
        return self._views[key]

    def whole(self, buffer: torch.Tensor) -> torch.Tensor:
        """The bytes of the whole parameters in a buffer."""
        return buffer.view(torch.uint8)[self.whole_start : self.end]


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
