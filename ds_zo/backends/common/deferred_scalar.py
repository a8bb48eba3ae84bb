"""Numbers that the host reads late."""

from __future__ import annotations

from functools import cache

import torch


class DeferredScalar:
    """A device scalar on its way to the host. Reading waits for that copy alone, not for what has been issued since;
    nothing that is issued since waits for the copy, which may stand behind a block that is sent back."""

    def __init__(self, value: torch.Tensor) -> None:
        value = value.detach()
        self._copied: torch.cuda.Event | None = None
        if value.is_cuda:
            copy_stream = _copy_stream(value.device)
            copy_stream.wait_stream(torch.cuda.current_stream(value.device))
            self._value = torch.empty((), dtype=value.dtype, pin_memory=True)
            with torch.cuda.stream(copy_stream):
                self._value.copy_(value, non_blocking=True)
                self._copied = torch.cuda.Event()
                self._copied.record()
            value.record_stream(copy_stream)
        else:
            self._value = value.clone()

    def get(self) -> float:
        if self._copied is not None:
            self._copied.synchronize()
        return self._value.item()


@cache
def _copy_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)
