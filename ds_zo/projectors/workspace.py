"""Scratch memory of the products: one flat buffer for each CUDA stream, grown to the largest request and kept."""

from __future__ import annotations

import torch

_buffers: dict[tuple[torch.device, int], torch.Tensor] = {}


def scratch(*shapes: tuple[int, int], device: torch.device) -> list[torch.Tensor]:
    """Uninitialised float32 matrices, valid until the next request on this stream.

    Work of one stream runs in order, so a buffer a stream needs no events; two streams never share one.
    """
    sizes = [rows * cols for rows, cols in shapes]
    flat = _buffer(sum(sizes), device)
    parts = flat[: sum(sizes)].split(sizes)
    return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]


def _buffer(numel: int, device: torch.device) -> torch.Tensor:
    if device.type != "cuda":
        return torch.empty(numel, device=device)
    key = (device, torch.cuda.current_stream(device).cuda_stream)
    if key not in _buffers or _buffers[key].numel() < numel:
        _buffers.pop(key, None)  # before its successor is allocated
        _buffers[key] = torch.empty(numel, device=device)
    return _buffers[key]


def release() -> None:
    """Give all buffers back to the allocator."""
    _buffers.clear()


def num_bytes() -> int:
    return sum(b.numel() * b.element_size() for b in _buffers.values())
