"""Device memory from cudaMalloc, for the ablation `reuse_buffers: false`."""

from __future__ import annotations

import ctypes
import weakref
from typing import Any

import torch


class RawBuffer:
    """Device memory from cudaMalloc, without PyTorch's caching allocator."""

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self._cudart = _cudart()
        address = ctypes.c_void_p()
        with torch.cuda.device(device):
            error = self._cudart.cudaMalloc(ctypes.byref(address), ctypes.c_size_t(nbytes))
        if error or not address.value:
            raise torch.cuda.OutOfMemoryError(f"cudaMalloc of {nbytes} bytes failed with error {error}")
        self._free = weakref.finalize(self, self._cudart.cudaFree, address)
        self._free.atexit = False
        self.__cuda_array_interface__: dict[str, Any] = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (address.value, False),
            "version": 3,
        }

    def free(self) -> None:
        """Frees the memory now. Otherwise it is freed with the last tensor that uses it."""
        self._free()


def _cudart() -> ctypes.CDLL:
    assert torch.version.cuda is not None
    return ctypes.CDLL(f"libcudart.so.{torch.version.cuda.split('.')[0]}")
