"""Device slots: buffers that units pass through, with the events of their hand-offs."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Iterator
from typing import Any

import torch

from ds_zo.streaming.schedule import NUM_PIECES
from ds_zo.streaming.units import Unit


class Slot:
    """One buffer on the device. The object that owns the buffer owns its events: `filled` when its upload is done,
    `drained` when the last kernel has read it, `saved` when each piece of its download is done."""

    def __init__(self, nbytes: int, device: torch.device, *, reuse: bool = True) -> None:
        self.device = device
        self._nbytes = nbytes
        self._reuse = reuse
        self._raw: _RawBuffer | None = None
        self.buffer = torch.empty(nbytes if reuse else 0, dtype=torch.uint8, device=device)
        cuda = device.type == "cuda"
        self.filled: torch.cuda.Event | None = torch.cuda.Event() if cuda else None
        self.drained: torch.cuda.Event | None = torch.cuda.Event() if cuda else None
        self.saved: list[torch.cuda.Event | None] = [torch.cuda.Event() if cuda else None for _ in range(NUM_PIECES)]
        if self.drained is not None:  # the buffer may be memory that kernels on this stream are still to leave
            self.drained.record(torch.cuda.current_stream(device))
        self.is_saving = False
        """A download out of it was issued after its last upload, or before one that did not reach all of its pieces."""
        self.unit: Unit | None = None
        """Whose bytes it holds or awaits."""
        self.version = -1
        """How many updates those bytes include. Differs from `unit.version` once a visit has replayed into it."""

    def pieces(self, nbytes: int) -> Iterator[tuple[slice, torch.cuda.Event | None]]:
        """The pieces that the first `nbytes` reach into, the same for every unit, and the events of their downloads."""
        length = -(-self._nbytes // NUM_PIECES)
        for i, saved in enumerate(self.saved):
            if i * length < nbytes:
                yield slice(i * length, min((i + 1) * length, nbytes)), saved

    def take(self, unit: Unit) -> None:
        """An upload is about to fill it. Until it is issued whole, nothing is there to go by: it may break off."""
        self.unit, self.version = unit, -1
        if not self._reuse:
            self._reallocate()

    def invalidate(self) -> None:
        """What it holds is no longer what a unit's home holds."""
        self.unit, self.version = None, -1

    def _reallocate(self) -> None:
        """The ablation `reuse_buffers: false`: a real allocation and a real free each visit."""
        self.buffer = torch.empty(0, dtype=torch.uint8, device=self.device)
        if self.device.type != "cuda":
            self.buffer = torch.empty(self._nbytes, dtype=torch.uint8, device=self.device)
            return
        if self._raw is not None:
            self._raw.free()
        self._raw = _RawBuffer(self._nbytes, self.device)
        self.buffer = torch.as_tensor(self._raw, device=self.device)


class _RawBuffer:
    """Memory from cudaMalloc itself, past PyTorch's caching allocator."""

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
        """Now; else with the last tensor of it."""
        self._free()


def _cudart() -> ctypes.CDLL:
    assert torch.version.cuda is not None
    return ctypes.CDLL(f"libcudart.so.{torch.version.cuda.split('.')[0]}")
