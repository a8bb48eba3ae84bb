"""What crosses the bus: float32 matrices as bytes, and the error that fewer bytes make, carried to the next step."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

_ALIGNMENT = 16
_INT8_MAX = 127.0


class Codec:
    """Matrices of fixed shapes and formats (fp32, bf16 or int8), one after the other in a flat buffer.

    int8 has a float32 scale for each row, before the values of its matrix.
    """

    def __init__(self, shapes: Sequence[tuple[int, ...]], dtypes: Sequence[torch.dtype]) -> None:
        self.shapes = [tuple(shape) for shape in shapes]
        self.dtypes = list(dtypes)
        self._starts = [0]
        for i in range(len(self.shapes)):
            num_bytes = self._scale_bytes(i) + math.prod(self.shapes[i]) * self.dtypes[i].itemsize
            self._starts.append(self._starts[-1] + -(-num_bytes // _ALIGNMENT) * _ALIGNMENT)

    def num_bytes(self, num_matrices: int | None = None) -> int:
        """Of the first so many."""
        return self._starts[-1 if num_matrices is None else num_matrices]

    def encode(self, i: int, value: torch.Tensor, buffer: torch.Tensor) -> None:
        """Puts matrix i there, rounded to nearest."""
        if self.dtypes[i] is not torch.int8:
            self.view(i, buffer).copy_(value)
            return
        scales = value.abs().amax(dim=1).div_(_INT8_MAX)
        self._scales(i, buffer).copy_(scales)
        self.view(i, buffer).copy_((value / torch.where(scales > 0, scales, 1.0)[:, None]).round_())

    def decode(self, i: int, buffer: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
        """Matrix i in float32, in `out` where it is given. Without, what stands in float32 already is not copied."""
        values = self.view(i, buffer)
        result = values.float() if out is None else out.copy_(values)
        return result.mul_(self._scales(i, buffer)[:, None]) if self.dtypes[i] is torch.int8 else result

    def view(self, i: int, buffer: torch.Tensor) -> torch.Tensor:
        """Where matrix i's values stand, in their format."""
        start = self._starts[i] + self._scale_bytes(i)
        nbytes = math.prod(self.shapes[i]) * self.dtypes[i].itemsize
        return buffer[start : start + nbytes].view(self.dtypes[i]).view(self.shapes[i])

    def _scale_bytes(self, i: int) -> int:
        return 4 * self.shapes[i][0] if self.dtypes[i] is torch.int8 else 0

    def _scales(self, i: int, buffer: torch.Tensor) -> torch.Tensor:
        return buffer[self._starts[i] : self._starts[i] + self._scale_bytes(i)].view(torch.float32)


class Carry:
    """Rounding errors of the last payload, added to the next: what one step loses, later ones bring."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.errors: dict[int, torch.Tensor] = {}
        self._before: dict[int, torch.Tensor] = {}

    @torch.no_grad()
    def encode(self, codec: Codec, i: int, value: torch.Tensor, buffer: torch.Tensor) -> None:
        before = self.errors.get(i)
        before = torch.zeros_like(value) if before is None else before
        whole = value + before
        codec.encode(i, whole, buffer)
        error = whole - codec.decode(i, buffer)
        self._before[i] = before
        # A payload with inf or NaN is skipped where it arrives, so it leaves nothing to carry.
        self.errors[i] = torch.where(error.isfinite().all(), error, before)

    def take_back(self, i: int) -> None:
        """The last payload of matrix i is not going to be used."""
        if i in self._before:
            self.errors[i] = self._before.pop(i)

    def keep(self) -> None:
        """What was sent has been used."""
        self._before.clear()
