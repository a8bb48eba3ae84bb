"""Device memory from cudaMalloc."""

from __future__ import annotations

import ctypes
import weakref

import torch


class RawBuffer:
    """Device memory from cudaMalloc, without PyTorch's caching allocator."""

    def __init__(self, nbytes: int, device: torch.device) -> None:
        assert torch.version.cuda is not None
        cudart = ctypes.CDLL(f"libcudart.so.{torch.version.cuda.split('.')[0]}")
        address = ctypes.c_void_p()
        with torch.cuda.device(device):
            error = cudart.cudaMalloc(ctypes.byref(address), ctypes.c_size_t(nbytes))
        if error or not address.value:
            raise torch.cuda.OutOfMemoryError(f"cudaMalloc of {nbytes} bytes failed with error {error}")
        self.free = weakref.finalize(self, cudart.cudaFree, address)
        """Frees the memory now. Otherwise it is freed with the last tensor that uses it."""
        self.free.atexit = False
        data = (address.value, False)
        self.__cuda_array_interface__ = {"shape": (nbytes,), "typestr": "|u1", "data": data, "version": 3}
