"""What crosses the bus: float32 matrices as bytes, and the error that fewer bytes make, carried to the next step.

[Note: flat payloads] The projected matrices of a layer stand one behind the other, so that encoding, decoding and the
error's bookkeeping are a few calls a layer: a call for each matrix costs more on either side than a fast link saves
([Note: few calls] in `optim/subspace_adam`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

ALIGNMENT = 16
"""Bytes."""
_BLOCK = 256
"""Numbers that share an int8 scale."""
_INT8_MAX = 127.0

Span = tuple[int, int]
"""Of numbers in the flat part, from and to."""


class Places:
    """Matrices of fixed shapes and formats, one after the other in a flat buffer of bytes."""

    def __init__(
        self,
        shapes: Sequence[tuple[int, ...]],
        dtypes: Sequence[torch.dtype],
        *,
        start: int = 0,
        alignment: int = ALIGNMENT,
    ) -> None:
        """`start`: bytes of the buffer that are somebody else's."""
        self.shapes = [tuple(shape) for shape in shapes]
        self.dtypes = list(dtypes)
        self._starts = [start]
        for shape, dtype in zip(self.shapes, self.dtypes, strict=True):
            num_bytes = math.prod(shape) * dtype.itemsize
            self._starts.append(self._starts[-1] + -(-num_bytes // alignment) * alignment)

    @property
    def end(self) -> int:
        return self._starts[-1]

    def view(self, i: int, buffer: torch.Tensor) -> torch.Tensor:
        start = self._starts[i]
        nbytes = math.prod(self.shapes[i]) * self.dtypes[i].itemsize
        return buffer[start : start + nbytes].view(self.dtypes[i]).view(self.shapes[i])

    def spans(self, chosen: Sequence[int]) -> list[Span]:
        """Of float32 matrices, with their padding; neighbours make one span."""
        found: list[Span] = []
        for i in sorted(chosen):
            first, last = self._starts[i] // 4, self._starts[i + 1] // 4
            if found and found[-1][1] == first:
                found[-1] = found[-1][0], last
            else:
                found.append((first, last))
        return found


class Wire:
    """So many float32 numbers as fp32, bf16 or int8, in the first `num_bytes` of a buffer; int8's scales come first."""

    def __init__(self, numel: int, dtype: torch.dtype) -> None:
        self.numel, self.dtype = numel, dtype
        is_int8 = dtype is torch.int8
        assert not is_int8 or numel % _BLOCK == 0
        self._scale_bytes = 4 * numel // _BLOCK if is_int8 else 0
        self.num_bytes = self._scale_bytes + numel * dtype.itemsize

    @staticmethod
    def alignment(dtype: torch.dtype) -> int:
        """Of float32 matrices, in bytes: no two share a scale."""
        return 4 * _BLOCK if dtype is torch.int8 else ALIGNMENT

    def encode_(self, values: torch.Tensor, buffer: torch.Tensor, span: Span) -> None:
        """Puts the span's `values` there, rounded to nearest; what that loses of them is left in their place."""
        target = self._values(buffer, span)
        if self.dtype is not torch.int8:
            target.copy_(values)
            values.sub_(target)
            return
        blocks, scales = values.view(-1, _BLOCK), self._scales(buffer, span)
        quotients = blocks.abs()
        scales.copy_(quotients.amax(dim=1)).div_(_INT8_MAX).clamp_(min=torch.finfo(torch.float32).tiny)
        torch.div(blocks, scales[:, None], out=quotients)
        quotients.round_()
        target.copy_(quotients.view(-1))
        blocks.addcmul_(quotients, scales[:, None], value=-1.0)

    def decode_(self, out: torch.Tensor, buffer: torch.Tensor, span: Span) -> torch.Tensor:
        out.copy_(self._values(buffer, span))
        if self.dtype is torch.int8:
            out.view(-1, _BLOCK).mul_(self._scales(buffer, span)[:, None])
        return out

    def _values(self, buffer: torch.Tensor, span: Span) -> torch.Tensor:
        size = self.dtype.itemsize
        return buffer[self._scale_bytes + size * span[0] : self._scale_bytes + size * span[1]].view(self.dtype)

    def _scales(self, buffer: torch.Tensor, span: Span) -> torch.Tensor:
        return buffer[4 * span[0] // _BLOCK : 4 * span[1] // _BLOCK].view(torch.float32)


class Carry:
    """Rounding errors of the last payload, added to the next: what one step loses, later ones bring."""

    def __init__(self, wire: Wire, places: Places, device: torch.device) -> None:
        self._wire, self._places, self._device = wire, places, device
        self._errors: torch.Tensor | None = None
        self._before: torch.Tensor | None = None
        """Those of the payload before, while the last one may still be taken back."""
        self._spare: torch.Tensor | None = None

    @torch.no_grad()
    def encode(self, values: torch.Tensor, buffer: torch.Tensor, spans: Sequence[Span]) -> None:
        """`values`: all of the flat part, of which the spans are sent."""
        before = self._allocated()
        errors, self._spare = torch.empty_like(before) if self._spare is None else self._spare, None
        for first, last in spans:
            torch.add(values[first:last], before[first:last], out=errors[first:last])
            self._wire.encode_(errors[first:last], buffer, (first, last))
        gap = 0
        for first, last in [*spans, (self._wire.numel, self._wire.numel)]:
            if gap < first:
                errors[gap:first].copy_(before[gap:first])
            gap = last
        self._errors, self._before = errors, before

    def take_back(self) -> None:
        """The last payload is not going to be used."""
        if self._before is not None:
            self._end(self._before, over=self._errors)

    def keep(self) -> None:
        """What was sent has been used."""
        if self._before is not None:
            self._end(self._errors, over=self._before)

    def _end(self, errors: torch.Tensor | None, *, over: torch.Tensor | None) -> None:
        self._errors, self._before = errors, None
        # Fresh host memory costs more than what is done with it; a device's allocator hands it out again.
        self._spare = over if self._device.type == "cpu" else None

    # Of one matrix

    def error_of(self, i: int) -> torch.Tensor | None:
        """None: nothing was ever sent."""
        if self._errors is None or i >= len(self._places.shapes):
            return None
        return self._places.view(i, self._errors.view(torch.uint8))

    def set_error(self, i: int, error: torch.Tensor | None) -> None:
        if error is not None:
            self._allocated()
        found = self.error_of(i)
        if found is not None:
            found.zero_() if error is None else found.copy_(error)

    def _allocated(self) -> torch.Tensor:
        if self._errors is None:
            self._errors = torch.zeros(self._wire.numel, device=self._device)
        return self._errors
