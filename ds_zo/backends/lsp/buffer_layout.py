"""Places of matrices in the flat buffers that are copied between device and host.

[Note: flat buffers] The projected matrices of a layer are contiguous, so that one copy moves a layer and a few torch
calls update it ([Note: few torch calls] in `optim/subspace_adam`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

ALIGNMENT = 16
"""Alignment of matrices in buffers, in bytes."""


class BufferLayout:
    """Places of matrices, of given shapes and dtypes, one after the other in a buffer of bytes."""

    def __init__(self, shapes: Sequence[tuple[int, ...]], dtypes: Sequence[torch.dtype], *, start: int = 0) -> None:
        """`start`: offset of the first matrix in bytes."""
        self.shapes = [tuple(shape) for shape in shapes]
        self.dtypes = list(dtypes)
        self._starts = [start]
        for shape, dtype in zip(self.shapes, self.dtypes, strict=True):
            num_bytes = math.prod(shape) * dtype.itemsize
            self._starts.append(self._starts[-1] + -(-num_bytes // ALIGNMENT) * ALIGNMENT)

    @property
    def end(self) -> int:
        return self._starts[-1]

    def view(self, i: int, buffer: torch.Tensor) -> torch.Tensor:
        start = self._starts[i]
        nbytes = math.prod(self.shapes[i]) * self.dtypes[i].itemsize
        return buffer[start : start + nbytes].view(self.dtypes[i]).view(self.shapes[i])
