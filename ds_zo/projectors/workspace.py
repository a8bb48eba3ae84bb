"""Scratch memory of the products: a flat buffer for each thread and CUDA stream, which grows to the largest request.

Work of one stream runs in the order of its launches, so a buffer of its own needs no events. Each thread has its own
buffers too, because the launches of two threads (the caller's and autograd's) may interleave on one stream.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from itertools import accumulate

import torch

_ALIGNED_NUMEL = 64


class _Buffers(threading.local):
    def __init__(self) -> None:
        self.by_stream: dict[tuple[torch.device, int], torch.Tensor] = {}


_buffers = _Buffers()


def scratch(*shapes: tuple[int, int], device: torch.device) -> list[torch.Tensor]:
    """Returns uninitialised float32 matrices, which are valid until this thread's next request on this stream."""
    flat = _buffer(sum(rows * cols for rows, cols in shapes), device)
    found, start = [], 0
    for rows, cols in shapes:
        found.append(flat.as_strided((rows, cols), (cols, 1), start))  # one torch call, as products are frequent
        start += rows * cols
    return found


def scratch_addresses(numels: Sequence[int], *, device: torch.device) -> list[int]:
    """Returns aligned addresses in the same memory, one for each number of float32 elements."""
    sizes = [-(-numel // _ALIGNED_NUMEL) * _ALIGNED_NUMEL for numel in numels]
    first = _buffer(sum(sizes), device).data_ptr()
    return [first + 4 * start for start in accumulate(sizes[:-1], initial=0)]


def scratch_location(device: torch.device) -> tuple[int, int] | None:
    """Address and length of the present buffer of this thread and stream; None: there is none, or the device is a
    CPU."""
    if device.type != "cuda":
        return None
    held = _buffers.by_stream.get(_key(device))
    return None if held is None else (held.data_ptr(), held.numel())


def release() -> None:
    """Frees this thread's buffers."""
    _buffers.by_stream.clear()


def num_bytes() -> int:
    """Bytes of this thread's buffers."""
    return sum(b.numel() * b.element_size() for b in _buffers.by_stream.values())


def _key(device: torch.device) -> tuple[torch.device, int]:
    return device, torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0


def _buffer(numel: int, device: torch.device) -> torch.Tensor:
    """The buffer of this thread and stream. A CPU has one too, because Triton's interpreter is passed addresses."""
    buffers, key = _buffers.by_stream, _key(device)
    if key not in buffers or buffers[key].numel() < numel:
        buffers.pop(key, None)  # frees the old buffer before the new one is allocated
        buffers[key] = torch.empty(numel, device=device)
    return buffers[key]
