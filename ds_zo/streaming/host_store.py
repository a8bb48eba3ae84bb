"""Pinned host buffers of exactly the requested size, for streamed units."""

from __future__ import annotations

import ctypes
import sys
import weakref
from contextlib import suppress

import torch
from deepspeed.utils import logger

from ds_zo.streaming.pinned_ring import PinnedRing, make_ring
from ds_zo.streaming.streams import DeferredRecord, Event, Stream
from ds_zo.streaming.units import Unit

PAGE = 4096
_MADV_HUGEPAGE = 14


class HostStore:
    """Allocates host memory for streamed units and pins it.

    PyTorch's pinned allocator rounds each request up to a power of two, which can double the host memory of a model. So
    the store allocates ordinary memory and registers it with CUDA. If registering fails (WSL, a locked-memory limit),
    this and later buffers stay pageable, and their uploads go through a pinned ring ([Note: pinned ring]). The store
    warns about this once.
    """

    num_sharers = 1
    """Ranks that have the store's memory in common."""

    def __init__(self, device: torch.device, *, pin: bool, ring: bool = True) -> None:
        """`ring`: the buffers are uploaded with `upload`, so that a pinned ring can help."""
        self._device = device
        self._may_use_ring = ring
        self._pin = pin and device.type == "cuda"
        self._registered: list[torch.Tensor] = []
        self._ring: PinnedRing | None = None
        self._pageable: set[int] = set()
        """Addresses of the memory of buffers that are uploaded through the ring."""
        self.nbytes = 0
        self.pinned_nbytes = 0
        # Memory must be unregistered before it is freed: its next owner would otherwise get CUDA errors. Not needed at
        # the process's exit.
        weakref.finalize(self, _unregister_unused, self._registered, device).atexit = False

    def take(self, nbytes: int) -> torch.Tensor:
        """Allocates a page-aligned uint8 buffer with undefined contents."""
        if nbytes == 0:
            return torch.empty(0, dtype=torch.uint8)
        raw = torch.empty(nbytes + PAGE, dtype=torch.uint8)
        skip = -raw.data_ptr() % PAGE
        buffer = raw[skip : skip + nbytes]
        _ask_for_huge_pages(buffer)
        self.nbytes += nbytes
        if self._pin:
            buffer.zero_()  # touches the pages on all cores; registering would touch them one by one
        if self._pin and self._register(buffer):
            self.pinned_nbytes += nbytes
        elif self._ring is not None:
            self._pageable.add(_address(buffer))
        return buffer

    def upload(self, target: torch.Tensor, source: torch.Tensor, filled: Event, *, stream: Stream) -> None:
        """Copies one of the store's buffers, or a part of one, to `target` on `stream`, which is current. `filled` is
        recorded after the copy, by the ring's thread if the copy goes through the ring."""
        if self._ring is not None and _address(source) in self._pageable:
            self._ring.upload(target, source, filled)
            return
        if isinstance(filled, DeferredRecord) and filled.upload is not None:
            stream.wait(filled)  # an earlier upload to the same slot may still write to it
            filled.upload = None
        target.copy_(source, non_blocking=True)
        stream.record(filled)

    def filled(self, unit: Unit) -> None:
        """Called when a unit's weights have been stored in its buffer."""

    def copy_whole(self, target: torch.Tensor, buffer: torch.Tensor) -> None:
        """Copies one of the store's buffers to the device."""
        target.copy_(buffer)

    # Of stores that ranks have in common

    def writes(self, number: int) -> bool:
        """Whether this rank is the one that stores the values of unit `number` when one rank stores them for all."""
        return True

    def barrier(self) -> None:
        """Blocks the host until every rank that shares the store has called it."""

    def smallest(self, number: int) -> int:
        """The smallest `number` of the ranks that share the store."""
        return number

    def _register(self, buffer: torch.Tensor) -> bool:
        error = torch.cuda.cudart().cudaHostRegister(buffer.data_ptr(), buffer.numel(), 0)
        if int(error) == 0:
            self._registered.append(buffer)  # keeps the memory alive while it is registered
            return True
        _clear_error(self._device)
        if self._pin:  # once
            self._pin = False
            how = "are from pageable memory, several times slower"
            if self._may_use_ring and self._make_ring():
                assert self._ring is not None
                how = f"go through a pinned ring of {self._ring.nbytes / 2**20:.0f} MiB"
            logger.warning(
                f"ds_zo: {buffer.numel() / 2**20:.0f} MiB of host memory could not be pinned ({error}); uploads of "
                f"further blocks {how}: raise the locked-memory limit (ulimit -l unlimited) or the container's memory"
            )
        return False

    def _make_ring(self) -> bool:
        """Makes the ring, and returns whether there is memory for it. The store may have pinned all that is allowed:
        then one of its buffers becomes pageable."""
        ring = make_ring(self._device)
        _clear_error(self._device)
        if ring is None and self._registered:
            torch.cuda.synchronize(self._device)  # copies of the buffer may be under way on any stream
            buffer = self._registered[-1]
            self._unregister(buffer)
            self.pinned_nbytes -= buffer.numel()
            if (ring := make_ring(self._device)) is not None:
                self._pageable.add(_address(buffer))
            _clear_error(self._device)
        if ring is None:
            return False
        self._ring = ring
        weakref.finalize(self, ring.end).atexit = False
        return True

    @property
    def ring_nbytes(self) -> int:
        """Bytes of the pinned ring; 0 without one."""
        return 0 if self._ring is None else self._ring.nbytes

    def free(self, buffer: torch.Tensor) -> None:
        """Unpins one buffer. Call it after the buffer's last copy has finished."""
        self.nbytes -= buffer.numel()
        if self._ring is not None:
            self._pageable.discard(_address(buffer))
        if self._unregister(buffer):
            self.pinned_nbytes -= buffer.numel()

    def _unregister(self, buffer: torch.Tensor) -> bool:
        for i, registered in enumerate(self._registered):
            if registered.data_ptr() == buffer.data_ptr():
                torch.cuda.cudart().cudaHostUnregister(buffer.data_ptr())
                del self._registered[i]
                return True
        return False

    def close(self) -> None:
        """Unpins all buffers and ends the ring. Call it after the last copy has finished."""
        _unregister(self._registered)
        if self._ring is not None:
            self._ring.close()
            self._ring = None


def _address(buffer: torch.Tensor) -> int:
    return buffer.untyped_storage().data_ptr()


def _unregister(buffers: list[torch.Tensor]) -> None:
    while buffers:
        torch.cuda.cudart().cudaHostUnregister(buffers.pop().data_ptr())


def _unregister_unused(buffers: list[torch.Tensor], device: torch.device) -> None:
    """Unpins the buffers of a store that was collected without `close`. Copies may still be under way."""
    if buffers:
        with torch.cuda.device(device):  # otherwise `synchronize` may create a CUDA context on device 0
            torch.cuda.synchronize()
            _unregister(buffers)


def _clear_error(device: torch.device) -> None:
    """Clears CUDA's sticky last error, which the next kernel launch would otherwise report."""
    with suppress(RuntimeError):
        torch.zeros(1, device=device)


def _ask_for_huge_pages(buffer: torch.Tensor) -> None:
    """Asks for huge pages, before the memory is touched: fewer pages to pin, and larger chunks for the copy engine. The
    system may decline; that is no error."""
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        libc.madvise(ctypes.c_void_p(buffer.data_ptr()), ctypes.c_size_t(buffer.numel()), _MADV_HUGEPAGE)
