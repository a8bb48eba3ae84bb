"""Keeps the inputs of blocks in host memory between the forward and the backward pass.

[Note: inputs on the host] Each input is copied to a pinned buffer on a side stream. Its device memory is released when
the next block's input is saved. The compute stream waits for the copy before that, so that it may reuse the memory. The
backward pass uploads the input of the block before while it recomputes a block. All copies are on one side stream, so a
buffer is not overwritten before its last upload has ended. On a CPU device the copies are made at once.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from ds_zo.streaming.host_store import HostStore
from ds_zo.streaming.streams import DONE, Event, Streams


class HostInputs:
    """Copies the inputs of blocks to host buffers, and back in the backward pass. See [Note: inputs on the host]."""

    def __init__(self, streams: Streams, *, pin: bool) -> None:
        self.streams, self.device = streams, streams.device
        self._store = HostStore(self.device, pin=pin, ring=False)  # inputs are not uploaded by `pinned_ring.upload_`
        self.stream = streams.another("inputs")
        """The side stream of all copies."""
        self._free: list[torch.Tensor] = []
        """Buffers that hold no input."""
        self._kept: weakref.WeakValueDictionary[int, KeptInput] = weakref.WeakValueDictionary()
        """Inputs that a backward may need, by their position in the order of saving."""
        self._num_saved = 0

    @property
    def nbytes(self) -> int:
        """Bytes of all host buffers."""
        return self._store.nbytes

    @contextmanager
    def saving(self, tensors: Sequence[torch.Tensor]) -> Iterator[None]:
        """Context in which autograd saves the inputs of one block. Inputs that need gradients go to the host: hidden
        states. Masks and position embeddings, which blocks share, stay on the device."""
        chosen = {t.data_ptr() for t in tensors if t.requires_grad and t.numel()}

        def pack(tensor: torch.Tensor) -> tuple[torch.Tensor, int] | KeptInput:
            return self._keep(tensor) if tensor.data_ptr() in chosen else (tensor, tensor._version)

        with torch.autograd.graph.saved_tensors_hooks(pack, _unpack):
            yield

    def _keep(self, tensor: torch.Tensor) -> KeptInput:
        if (last := self._kept.get(self._num_saved - 1)) is not None:
            last.release_device()
        kept = KeptInput(self, tensor, self._take(tensor.nbytes), self._num_saved)
        self._kept[self._num_saved] = kept
        self._num_saved += 1
        return kept

    def _take(self, nbytes: int) -> torch.Tensor:
        """The smallest free buffer of at least `nbytes`, or a new one. A new one replaces the smallest free buffer, so
        that batches of many lengths need no more buffers than those of one length."""
        by_size = sorted(range(len(self._free)), key=lambda i: self._free[i].nbytes)
        fitting = next((i for i in by_size if self._free[i].nbytes >= nbytes), None)
        if fitting is not None:
            return self._free.pop(fitting)
        if by_size:
            self.stream.synchronize()  # the buffer's last upload may be under way
            self._store.free(self._free.pop(by_size[0]))
        return self._store.take(nbytes)

    def fetch(self, kept: KeptInput) -> torch.Tensor:
        """The input on the device, for the compute stream. Starts the upload of the input that was saved before it."""
        found = kept.upload()
        kept.wait()
        kept.release_device()
        if not kept.is_intact:
            raise _changed_in_place()
        if (before := self._kept.get(kept.number - 1)) is not None:
            before.upload()
        return found

    def take_back(self, buffer: torch.Tensor) -> None:
        self._free.append(buffer)

    def close(self) -> None:
        self.stream.synchronize()
        self._store.close()


class KeptInput:
    """One saved input. It lives as long as the autograd node that saved it."""

    def __init__(self, owner: HostInputs, tensor: torch.Tensor, buffer: torch.Tensor, number: int) -> None:
        self.number = number
        self._owner = owner
        self._shape, self._dtype, self._nbytes = tensor.shape, tensor.dtype, tensor.nbytes
        self._host = buffer
        self._copied: Event = DONE
        """Recorded after the last copy of this input, to the host or back."""
        self._device: torch.Tensor | None = tensor
        """The input on the device; None while only the host has it."""
        self._version: int | None = tensor._version
        """The version of the input while `_device` is the tensor that was saved, which a user may change. None later:
        other code does not have the uploaded tensor."""
        self.is_intact = True
        """The input was not changed in place before its copy to the host had ended."""
        self._copy(self._view(), tensor)

    def _view(self) -> torch.Tensor:
        return self._host[: self._nbytes].view(self._dtype).view(self._shape)

    def _copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Comes after the work that was issued to the compute stream so far."""
        side = self._owner.stream
        side.wait_stream(self._owner.streams.compute)
        with side.issuing(), torch.no_grad():
            target.copy_(source, non_blocking=True)
        self._copied = side.recorded()

    def upload(self) -> torch.Tensor:
        """The input on the device, perhaps before its copy has ended."""
        if self._device is None:
            self._device = torch.empty(self._shape, dtype=self._dtype, device=self._owner.device)
            self._copy(self._device, self._view())
        return self._device

    def wait(self) -> None:
        """Makes the compute stream wait for the last copy."""
        self._owner.streams.compute.wait(self._copied)

    def release_device(self) -> None:
        """Drops the input on the device. Memory that is freed then is used again on the compute stream."""
        if self._device is not None:
            self.wait()
            self.is_intact = self.is_intact and self._version in (None, self._device._version)
            self._device = self._version = None

    def __del__(self) -> None:
        self.release_device()
        self._owner.take_back(self._host)


def _unpack(saved: tuple[torch.Tensor, int] | KeptInput) -> torch.Tensor:
    if isinstance(saved, KeptInput):
        return saved._owner.fetch(saved)
    tensor, version = saved
    if tensor._version != version:
        raise _changed_in_place()
    return tensor


def _changed_in_place() -> RuntimeError:
    """The error for an input that was changed after its block had run. Autograd makes this check for the tensors that
    it saves itself."""
    return RuntimeError(
        "a block is computed again from its inputs, and one of them was changed in place after the block had run: "
        "change a copy of it in the model's forward"
    )
