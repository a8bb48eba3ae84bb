"""Scalars that are copied from the device without making the host wait."""

from __future__ import annotations

from functools import cache

import torch


class DeferredScalar:
    """A device scalar that is being copied to the host. `get` waits for this copy, not for kernels that were launched
    after it. Kernels do not wait for the copy either, because it runs on a stream of its own: it may be queued behind
    the download of a block."""

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

    def has_arrived(self) -> bool:
        """Whether `get` returns without waiting."""
        return self._copied is None or self._copied.query()

    def get(self) -> float:
        """Waits for the copy and returns the number."""
        if self._copied is not None:
            self._copied.synchronize()
        return self._value.item()


@cache
def _copy_stream(device: torch.device) -> torch.cuda.Stream:
    """The stream for copies of scalars, one per device."""
    return torch.cuda.Stream(device)
