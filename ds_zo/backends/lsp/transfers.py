"""The two copy streams between a CUDA device and the host, and the device buffers for uploads."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from ds_zo.backends.lsp.host_group import HostGroup

NUM_UPLOAD_BUFFERS = 3
"""Layers whose directions can be on the device ahead of their application."""


@dataclass(eq=False)
class UploadBuffer:
    """Device memory for one layer's directions."""

    buffer: torch.Tensor
    filled: torch.cuda.Event = field(default_factory=lambda: torch.cuda.Event(enable_timing=True))
    drained: torch.cuda.Event = field(default_factory=torch.cuda.Event)
    group: HostGroup | None = None
    """The group whose directions are in the buffer or being copied there; None: the buffer is free."""


class TransferStreams:
    """The two copy streams between a CUDA device and the host, and the device buffers for uploads."""

    def __init__(self, device: torch.device, *, buffer_bytes: int) -> None:
        self.down = torch.cuda.Stream(device)
        self.up = torch.cuda.Stream(device)
        self._upload_buffers = [
            UploadBuffer(torch.empty(buffer_bytes, dtype=torch.uint8, device=device)) for _ in range(NUM_UPLOAD_BUFFERS)
        ]
        self.num_bytes = NUM_UPLOAD_BUFFERS * buffer_bytes

    def buffer_of(self, group: HostGroup) -> UploadBuffer | None:
        return next((upload_buffer for upload_buffer in self._upload_buffers if upload_buffer.group is group), None)

    def has_free_buffer(self) -> bool:
        return any(upload_buffer.group is None for upload_buffer in self._upload_buffers)

    def upload(self, group: HostGroup, source: torch.Tensor) -> UploadBuffer:
        """Starts an upload. If no buffer is free, the first one is overwritten, and its group has to upload again."""
        upload_buffer = next((free for free in self._upload_buffers if free.group is None), self._upload_buffers[0])
        upload_buffer.group = group
        self.up.wait_event(upload_buffer.drained)
        with torch.cuda.stream(self.up):
            upload_buffer.buffer[: source.numel()].copy_(source, non_blocking=True)
        upload_buffer.filled.record(self.up)
        return upload_buffer
