"""Uploads from pageable host memory, where the system lets little memory be pinned.

[Note: pinned ring]
Where a store cannot be pinned, its uploads go through a ring of pinned slices. Host threads copy the store's bytes to
slices. One more thread then issues the copies from slices to the device, in order, on a stream of the ring's own. A
slice is filled again when its copy to the device is done. Up to half of the slices are being filled at a time, while
the others are on their way to the device.

The thread that trains does not wait in `upload`. The ring's thread records the slot's event `filled`, an
`UploadEvent`, when it has issued the last copy. A wait for the event first waits, on the host, until then, and raises
the error of a thread that failed. A download to pageable memory blocks the host until it is done, so a store's bytes do
not change while they are copied to a slice.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any

import torch

from ds_zo.streaming.streams import DONE, CudaStream

RING_NBYTES = 256 * 2**20
"""Pinned memory of a ring. A system that refuses it is asked for half as much, and so on."""
SLICE_NBYTES = 8 * 2**20
_MOST_COPIERS = 12
"""More threads than 8 are needed to feed a link of 55 GB/s (`benchmarks/results/h200_pinned_ring.jsonl`)."""
_FEWEST_SLICES = 4


class DeviceSide:
    """The calls of a ring that go to the device, on a stream of its own."""

    def __init__(self, device: torch.device) -> None:
        self._current, self._stream = CudaStream(device, is_current=True), CudaStream(device)

    def now(self) -> Any:
        """An event after the work that the caller's current stream has now."""
        return self._current.recorded()

    def wait(self, event: Any) -> None:
        """Makes the ring's stream wait for `event`."""
        self._stream.wait(event)

    def send(self, target: torch.Tensor, staged: torch.Tensor) -> Any:
        """Issues a copy on the ring's stream, and returns an event after it."""
        with self._stream.issuing():
            target.copy_(staged, non_blocking=True)
        return self._stream.recorded()

    def record(self, event: Any) -> None:
        """Records `event` on the ring's stream."""
        self._stream.record(event)

    def synchronize(self) -> None:
        """Blocks until the ring's stream is idle."""
        self._stream.synchronize()


@dataclass(frozen=True)
class _Upload:
    target: torch.Tensor
    source: torch.Tensor
    after: Any
    """Event that the copies to the device wait for."""
    filled: Any
    done: Future[None] = field(default_factory=Future)


class PinnedRing:
    """Pinned slices, and the threads that pass uploads through them. See [Note: pinned ring]."""

    def __init__(self, slices: Sequence[torch.Tensor], device: DeviceSide, *, num_copiers: int) -> None:
        """`slices` are uint8 tensors of one size."""
        assert len(slices) >= 2 and len({chunk.numel() for chunk in slices}) == 1
        self._slices = list(slices)
        self._device = device
        self._sent: list[Any] = [DONE] * len(slices)
        """By slice: the event after its last copy to the device."""
        self._next = 0
        self._error: BaseException | None = None
        self._uploads: SimpleQueue[_Upload | None] = SimpleQueue()
        self._copiers = ThreadPoolExecutor(num_copiers, thread_name_prefix="ds_zo-ring")
        self._thread = threading.Thread(target=self._run, name="ds_zo-ring", daemon=True)
        self._thread.start()

    @property
    def nbytes(self) -> int:
        return sum(chunk.numel() for chunk in self._slices)

    def upload(self, target: torch.Tensor, source: torch.Tensor, filled: Any) -> None:
        """Copies `source` to `target`, both uint8, after the work that the current stream has now, and then records
        `filled`."""
        upload = _Upload(target, source, self._device.now(), filled)
        filled.upload = upload.done
        self._uploads.put(upload)

    def end(self) -> None:
        """Lets the threads end after the uploads that were asked for. Does not wait for them: Python's garbage
        collector may call this on one of these threads."""
        self._uploads.put(None)

    def close(self) -> None:
        """Ends the threads, and waits for them and for the uploads that were asked for."""
        self.end()
        self._thread.join()
        self._copiers.shutdown()
        self._device.synchronize()

    def _run(self) -> None:
        for upload in iter(self._uploads.get, None):
            try:
                if self._error is not None:
                    raise RuntimeError("ds_zo: an earlier upload through the pinned ring failed") from self._error
                self._make(upload)
            except BaseException as error:  # the thread that waits for the upload raises it
                self._error = self._error or error
                upload.done.set_exception(error)
            else:
                upload.done.set_result(None)
        self._copiers.shutdown(wait=False)

    def _make(self, upload: _Upload) -> None:
        self._device.wait(upload.after)
        filling: deque[tuple[Future[None], int, torch.Tensor, torch.Tensor]] = deque()
        length = self._slices[0].numel()
        for chunk, target in zip(upload.source.split(length), upload.target.split(length), strict=True):
            if len(filling) == len(self._slices) // 2:
                self._send(*filling.popleft())
            index, self._next = self._next, (self._next + 1) % len(self._slices)
            self._sent[index].synchronize()
            staged = self._slices[index][: chunk.numel()]
            filling.append((self._copiers.submit(_copy, staged, chunk), index, target, staged))
        while filling:
            self._send(*filling.popleft())
        self._device.record(upload.filled)

    def _send(self, copied: Future[None], index: int, target: torch.Tensor, staged: torch.Tensor) -> None:
        copied.result()
        self._sent[index] = self._device.send(target, staged)


def _copy(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copies bytes on this thread alone, without Python's global lock. `Tensor.copy_` would divide the copy among
    threads of its own."""
    ctypes.memmove(target.data_ptr(), source.data_ptr(), source.numel())


def make_ring(
    device: torch.device,
    *,
    nbytes: int = RING_NBYTES,
    slice_nbytes: int = SLICE_NBYTES,
    num_copiers: int | None = None,
) -> PinnedRing | None:
    """A ring of at most `nbytes` of pinned memory; None if the system refuses even a few slices."""
    memory = None
    while memory is None and nbytes >= _FEWEST_SLICES * slice_nbytes:
        try:
            memory = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
        except RuntimeError:
            nbytes //= 2
    if memory is None:
        return None
    num_copiers = num_copiers or max(1, min(_MOST_COPIERS, 3 * _num_cores() // 4))
    return PinnedRing(memory.split(slice_nbytes), DeviceSide(device), num_copiers=num_copiers)


def _num_cores() -> int:
    """The cores that this process is bound to, or else its share of the machine's, as one of the machine's ranks."""
    on_machine = os.cpu_count() or 1
    bound = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else on_machine
    return bound if bound < on_machine else max(1, on_machine // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
