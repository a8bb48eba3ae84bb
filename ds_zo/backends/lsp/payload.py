"""The bytes that are copied between device and host: float32 matrices, encoded in the payload's dtype.

A payload of fewer bytes makes rounding errors. They are added to the next step's values (error feedback).

[Note: flat payloads] The projected matrices of a layer are contiguous, so that a layer is encoded, decoded and
corrected in a few calls. One call for each matrix would cost more on device and host than a fast PCIe link saves
([Note: few torch calls] in `optim/subspace_adam`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

ALIGNMENT = 16
"""Alignment of matrices in buffers, in bytes."""
_BLOCK = 256
"""Number of values that share one int8 scale."""
_INT8_MAX = 127.0

Span = tuple[int, int]
"""First and last (exclusive) element of a range of the flat float32 buffer."""


class BufferLayout:
    """Places of matrices, of given shapes and dtypes, one after the other in a buffer of bytes."""

    def __init__(
        self,
        shapes: Sequence[tuple[int, ...]],
        dtypes: Sequence[torch.dtype],
        *,
        start: int = 0,
        alignment: int = ALIGNMENT,
    ) -> None:
        """`start`: offset of the first matrix in bytes."""
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
        """The ranges of the chosen float32 matrices with their padding. Adjacent matrices make one range."""
        found: list[Span] = []
        for i in sorted(chosen):
            first, last = self._starts[i] // 4, self._starts[i + 1] // 4
            if found and found[-1][1] == first:
                found[-1] = found[-1][0], last
            else:
                found.append((first, last))
        return found


class PayloadCodec:
    """Encodes `numel` float32 values as fp32, bf16 or int8 in the first `num_bytes` of a buffer; int8 scales come
    first."""

    def __init__(self, numel: int, dtype: torch.dtype) -> None:
        self.numel, self.dtype = numel, dtype
        is_int8 = dtype is torch.int8
        assert not is_int8 or numel % _BLOCK == 0
        self._scale_bytes = 4 * numel // _BLOCK if is_int8 else 0
        self.num_bytes = self._scale_bytes + numel * dtype.itemsize

    @staticmethod
    def alignment(dtype: torch.dtype) -> int:
        """Alignment of float32 matrices in bytes, such that no two matrices share a scale."""
        return 4 * _BLOCK if dtype is torch.int8 else ALIGNMENT

    def encode_(self, values: torch.Tensor, buffer: torch.Tensor, span: Span) -> None:
        """Writes the span's `values`, rounded to nearest, to the buffer. Overwrites `values` with the rounding
        errors."""
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


class ErrorFeedback:
    """Keeps the rounding errors of the last payload and adds them to the next: later steps make up for the loss."""

    def __init__(self, codec: PayloadCodec, layout: BufferLayout, device: torch.device) -> None:
        self._codec, self._layout, self._device = codec, layout, device
        self._errors: torch.Tensor | None = None
        self._errors_before: torch.Tensor | None = None
        """Errors before the last payload, while that may still be undone; otherwise None."""
        self._spare_buffer: torch.Tensor | None = None

    @torch.no_grad()
    def encode(self, values: torch.Tensor, buffer: torch.Tensor, spans: Sequence[Span]) -> None:
        """Encodes the spans of `values`, the whole flat buffer, after adding the errors of the payload before."""
        before = self._get_errors()
        errors, self._spare_buffer = (
            torch.empty_like(before) if self._spare_buffer is None else self._spare_buffer,
            None,
        )
        for first, last in spans:
            torch.add(values[first:last], before[first:last], out=errors[first:last])
            self._codec.encode_(errors[first:last], buffer, (first, last))
        gap = 0
        for first, last in [*spans, (self._codec.numel, self._codec.numel)]:
            if gap < first:
                errors[gap:first].copy_(before[gap:first])
            gap = last
        self._errors, self._errors_before = errors, before

    def undo(self) -> None:
        """Restores the errors before the last payload, which will not be used."""
        if self._errors_before is not None:
            self._finish(self._errors_before, over=self._errors)

    def commit(self) -> None:
        """Drops the errors before the last payload, which has been used."""
        if self._errors_before is not None:
            self._finish(self._errors, over=self._errors_before)

    def _finish(self, errors: torch.Tensor | None, *, over: torch.Tensor | None) -> None:
        self._errors, self._errors_before = errors, None
        # New host memory costs more than the arithmetic on it. A device's caching allocator reuses memory itself.
        self._spare_buffer = over if self._device.type == "cpu" else None

    # Errors of one matrix

    def error_of(self, i: int) -> torch.Tensor | None:
        """The errors of the i-th matrix; None: nothing has been encoded, or the parameter is not projected."""
        if self._errors is None or i >= len(self._layout.shapes):
            return None
        return self._layout.view(i, self._errors.view(torch.uint8))

    def set_error(self, i: int, error: torch.Tensor | None) -> None:
        if error is not None:
            self._get_errors()
        found = self.error_of(i)
        if found is not None:
            found.zero_() if error is None else found.copy_(error)

    def _get_errors(self) -> torch.Tensor:
        if self._errors is None:
            self._errors = torch.zeros(self._codec.numel, device=self._device)
        return self._errors
