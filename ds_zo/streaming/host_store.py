"""Host buffers that the device can copy from at full speed: pinned, of exactly the size asked for."""

from __future__ import annotations

import ctypes
import sys
import weakref
from contextlib import suppress

import torch
from deepspeed.utils import logger

from ds_zo.streaming.units import Unit

PAGE = 4096
_MADV_HUGEPAGE = 14


class HostStore:
    """Takes host memory a unit at a time.

    PyTorch's pinned allocator rounds each request up to a power of two, which can double the host memory of a model.
    Ordinary memory registered with CUDA afterwards has the size it has. Where registering fails (locked-memory limit),
    the buffer stays pageable: the driver then stages every copy through a small pinned ring of its own, which is right
    but slower; warned about once.
    """

    def __init__(self, device: torch.device, *, pin: bool) -> None:
        self._device = device
        self._pin = pin and device.type == "cuda"
        self._registered: list[torch.Tensor] = []
        self.nbytes = 0
        self.pinned_nbytes = 0
        # Memory that is freed while CUDA has it for registered fails whoever gets it next. When the process ends, there
        # is nobody.
        weakref.finalize(self, _unregister_unused, self._registered, device).atexit = False

    def take(self, nbytes: int) -> torch.Tensor:
        """An uninitialised uint8 buffer, page-aligned."""
        if nbytes == 0:
            return torch.empty(0, dtype=torch.uint8)
        raw = torch.empty(nbytes + PAGE, dtype=torch.uint8)
        skip = -raw.data_ptr() % PAGE
        buffer = raw[skip : skip + nbytes]
        _ask_for_huge_pages(buffer)
        self.nbytes += nbytes
        if self._pin:
            buffer.zero_()  # on all cores: registering would touch the pages one by one
        if self._pin and self._register(buffer):
            self.pinned_nbytes += nbytes
        return buffer

    def filled(self, unit: Unit) -> None:
        """A unit's weights are in the buffer that was taken for it."""

    def _register(self, buffer: torch.Tensor) -> bool:
        error = torch.cuda.cudart().cudaHostRegister(buffer.data_ptr(), buffer.numel(), 0)
        if int(error) == 0:
            self._registered.append(buffer)  # registered memory must not be freed, so it is kept alive from here
            return True
        _clear_error(self._device)
        if self._pin:  # once
            self._pin = False
            logger.warning(
                f"ds_zo: {buffer.numel() / 2**20:.0f} MiB of host memory could not be pinned ({error}); uploads from "
                "here on go through pageable memory, several times slower: raise the locked-memory limit (ulimit -l "
                "unlimited) or the container's memory"
            )
        return False

    def free(self, buffer: torch.Tensor) -> None:
        """One buffer is no longer needed. Only after its last copy has finished."""
        self.nbytes -= buffer.numel()
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
        """Unpins. Only after the last copy has finished."""
        _unregister(self._registered)


def _unregister(buffers: list[torch.Tensor]) -> None:
    while buffers:
        torch.cuda.cudart().cudaHostUnregister(buffers.pop().data_ptr())


def _unregister_unused(buffers: list[torch.Tensor], device: torch.device) -> None:
    """Of a store that nobody closed, and whose last copies may be on their way."""
    if buffers:
        with torch.cuda.device(device):  # in whatever thread: on the first device this would make a context
            torch.cuda.synchronize()
            _unregister(buffers)


def _clear_error(device: torch.device) -> None:
    """CUDA keeps the error of a call that failed, and the next kernel would be blamed for it."""
    with suppress(RuntimeError):
        torch.zeros(1, device=device)


def _ask_for_huge_pages(buffer: torch.Tensor) -> None:
    """Before the memory is touched: fewer pages to pin, and larger pieces for the copy engine. A wish, so no error if
    unheard."""
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        libc.madvise(ctypes.c_void_p(buffer.data_ptr()), ctypes.c_size_t(buffer.numel()), _MADV_HUGEPAGE)
