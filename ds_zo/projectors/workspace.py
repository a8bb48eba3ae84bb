"""Scratch memory of the products: one flat buffer for each CUDA stream, grown to the largest request and kept."""

from __future__ import annotations

import torch

_buffers: dict[tuple[torch.device, int], torch.Tensor] = {}


def scratch(rows: int, cols: int, device: torch.device) -> torch.Tensor:
    """An uninitialised float32 matrix, valid until the next request on this stream.

    Work of one stream runs in order, so a buffer a stream needs no events; two streams never share one.
    """
    if device.type != "cuda":
        return torch.empty(rows, cols, device=device)
    device = torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)
    key = (device, torch.cuda.current_stream(device).cuda_stream)
    flat = _buffers.get(key)
    if flat is None or flat.numel() < rows * cols:
        _buffers.pop(key, None)
        del flat
        flat = _buffers[key] = torch.empty(rows * cols, device=device)
    return flat[: rows * cols].view(rows, cols)


def release() -> None:
    """Give all buffers back to the allocator."""
    _buffers.clear()


def num_bytes() -> int:
    return sum(b.numel() * b.element_size() for b in _buffers.values())
