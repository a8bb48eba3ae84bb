"""Device slots: buffers that streamed units are copied into, with the events that order their use."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Iterator
from typing import Any

import torch

from ds_zo.streaming.pinned_ring import UploadEvent
from ds_zo.streaming.schedule import NUM_PIECES
from ds_zo.streaming.units import Unit


class Slot:
    """One buffer on the device and its events: `filled` when its upload is done, `drained` when the last kernel has
    used it, `saved[i]` when piece i of its download is done. Events are None without CUDA."""

    def __init__(self, nbytes: int, device: torch.device, *, reuse: bool = True) -> None:
        self.device = device
        self._nbytes = nbytes
        self._reuse = reuse
        self._raw: _RawBuffer | None = None
        self.buffer = torch.empty(nbytes if reuse else 0, dtype=torch.uint8, device=device)
        cuda = device.type == "cuda"
        self.filled: UploadEvent | None = UploadEvent() if cuda else None
        self.drained: torch.cuda.Event | None = torch.cuda.Event() if cuda else None
        self.saved: list[torch.cuda.Event | None] = [torch.cuda.Event() if cuda else None for _ in range(NUM_PIECES)]
        if self.drained is not None:  # kernels on this stream may still use this memory
            self.drained.record(torch.cuda.current_stream(device))
        self.is_saving = False
        """Whether a download of the slot may be under way that no upload has waited for. An upload of a smaller unit
        does not wait for the last pieces."""
        self.unit: Unit | None = None
        """The unit whose bytes the slot holds, or will hold once its upload is done. None: no valid contents."""
        self._version = -1
        """Number of updates that the bytes include; -1 while unknown."""

    @property
    def version(self) -> int:
        return self._version

    @property
    def is_current(self) -> bool:
        """Whether the slot holds, or will hold once its upload is done, the stored bytes of its unit. It does not once
        updates have been applied in the slot and are not sent back."""
        return self.unit is not None and self._version == self.unit.version

    def pieces(self, nbytes: int) -> Iterator[tuple[slice, torch.cuda.Event | None]]:
        """The pieces that cover the first `nbytes`, and the events of their downloads. Piece boundaries do not depend
        on the unit."""
        length = -(-self._nbytes // NUM_PIECES)
        for i, saved in enumerate(self.saved):
            if i * length < nbytes:
                yield slice(i * length, min((i + 1) * length, nbytes)), saved

    def take(self, unit: Unit) -> None:
        """Assigns the slot to `unit`, before its upload. The contents are unknown until the whole upload is issued,
        because issuing it may be interrupted."""
        self.unit, self._version = unit, -1
        if not self._reuse:
            self._reallocate()

    def uploaded(self) -> None:
        """The whole upload of the slot's unit was issued."""
        assert self.unit is not None
        self._version = self.unit.version

    def updated(self, version: int) -> None:
        """Updates were applied in the slot, which includes `version` of them."""
        self._version = version

    def expire(self) -> None:
        """The contents are not used again. Copies from or to `unit` may still be under way."""
        self._version = -1

    def invalidate(self) -> None:
        """Marks the slot's contents as different from any unit's `store_buffer`."""
        self.unit, self._version = None, -1

    def _reallocate(self) -> None:
        """For the ablation `reuse_buffers: false`: allocates and frees device memory at each use."""
        self.buffer = torch.empty(0, dtype=torch.uint8, device=self.device)
        if self.device.type != "cuda":
            self.buffer = torch.empty(self._nbytes, dtype=torch.uint8, device=self.device)
            return
        if self._raw is not None:
            self._raw.free()
        self._raw = _RawBuffer(self._nbytes, self.device)
        self.buffer = torch.as_tensor(self._raw, device=self.device)


class _RawBuffer:
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
