"""Scratch memory of the products: a flat buffer for each thread and CUDA stream, grown to the largest request and kept.

Work of one stream runs in the order in which it was launched, so a buffer of its own needs no events. Of each thread
too: the launches of two threads (the caller's, autograd's) may mingle on one stream.
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
    """Uninitialised float32 matrices, valid until this thread's next request on this stream."""
    flat = _buffer(sum(rows * cols for rows, cols in shapes), device)
    found, start = [], 0
    for rows, cols in shapes:
        found.append(flat.as_strided((rows, cols), (cols, 1), start))  # one call: it is made for every product
        start += rows * cols
    return found


def scratch_addresses(numels: Sequence[int], *, device: torch.device) -> list[int]:
    """The same memory as addresses, each aligned."""
    sizes = [-(-numel // _ALIGNED_NUMEL) * _ALIGNED_NUMEL for numel in numels]
    first = _buffer(sum(sizes), device).data_ptr()
    return [first + 4 * start for start in accumulate(sizes[:-1], initial=0)]


def scratch_location(device: torch.device) -> tuple[int, int] | None:
    """Address and length of the scratch that there is already. They differ between threads and streams."""
    if device.type != "cuda":
        return None
    held = _buffers.by_stream.get(_key(device))
    return None if held is None else (held.data_ptr(), held.numel())


def release() -> None:
    """Give this thread's buffers back to the allocator."""
    _buffers.by_stream.clear()


def num_bytes() -> int:
    """Of this thread's buffers."""
    return sum(b.numel() * b.element_size() for b in _buffers.by_stream.values())


def _key(device: torch.device) -> tuple[torch.device, int]:
    return device, torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0


def _buffer(numel: int, device: torch.device) -> torch.Tensor:
    """Kept on a CPU too, where the interpreter is told addresses."""
    buffers, key = _buffers.by_stream, _key(device)
    if key not in buffers or buffers[key].numel() < numel:
        buffers.pop(key, None)  # before its successor is allocated
        buffers[key] = torch.empty(numel, device=device)
    return buffers[key]
