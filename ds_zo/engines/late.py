"""Numbers that the host reads late."""

from __future__ import annotations

import torch


class Late:
    """A device scalar on its way to the host. Reading waits for that copy alone, not for what has been issued since."""

    def __init__(self, value: torch.Tensor) -> None:
        value = value.detach()
        self._copied: torch.cuda.Event | None = None
        if value.is_cuda:
            self._value = torch.empty((), dtype=value.dtype, pin_memory=True)
            self._value.copy_(value, non_blocking=True)
            self._copied = torch.cuda.Event()
            self._copied.record()
        else:
            self._value = value.clone()

    def get(self) -> float:
        if self._copied is not None:
            self._copied.synchronize()
        return self._value.item()
