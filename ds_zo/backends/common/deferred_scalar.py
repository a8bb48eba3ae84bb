"""Scalars that are copied from the device without making the host wait."""

from __future__ import annotations

from functools import cache

import torch

from ds_zo.streaming.streams import DONE, CudaStream, Event


class DeferredScalar:
    """A device scalar that is being copied to the host. `get` waits for this copy, not for kernels that were launched
    after it. Kernels do not wait for the copy either, because it runs on a stream of its own: it may be queued behind
    the download of a block."""

    def __init__(self, value: torch.Tensor) -> None:
        value = value.detach()
        self._copied: Event = DONE
        if value.is_cuda:
            copy_stream = _copy_stream(value.device)
            copy_stream.wait_stream(CudaStream(value.device, is_current=True))
            self._value = torch.empty((), dtype=value.dtype, pin_memory=True)
            with copy_stream.issuing():
                self._value.copy_(value, non_blocking=True)
            self._copied = copy_stream.recorded()
            copy_stream.uses(value)
        else:
            self._value = value.clone()

    def has_arrived(self) -> bool:
        """Whether `get` returns without waiting."""
        return self._copied.query()

    def get(self) -> float:
        """Waits for the copy and returns the number."""
        self._copied.synchronize()
        return self._value.item()


@cache
def _copy_stream(device: torch.device) -> CudaStream:
    """The stream for copies of scalars, one per device."""
    return CudaStream(device)
