"""Copies between a CUDA device and the host: their streams, their order, and device buffers for large uploads.

[Note: order of copies] Layers are served in the order of LSP's Algorithm 3: downloads, Adam and uploads first come,
first served, and from the transition layer on the last to come first. CUDA executes issued copies in the order of their
issue. So only NUM_IN_FLIGHT copies of a direction are issued at a time, and the others wait in a `CopyLane`. The thread
that puts a copy issues it if it need not wait. The Adam thread issues waiting downloads, because each of its jobs
begins at the end of a download. Uploads are put by the Adam thread. Those that still wait at the end of the backward
pass are issued as the forward pass proceeds. The order changes no result: layers do not depend on one another.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from ds_zo.backends.lsp.scheduler import ServiceOrder
from ds_zo.streaming.streams import DONE, Event, Stream, Streams

NUM_IN_FLIGHT = 2
"""Copies of a direction that are issued at a time: the link does not idle while one ends and the next is issued."""
NUM_UPLOAD_BUFFERS = 3
"""Groups whose directions can be on the device ahead of their application, of those without memory of their own."""


class Copy:
    """Copies of pairs of tensors (target, source), which are issued together."""

    def __init__(
        self,
        pairs: Sequence[tuple[torch.Tensor, torch.Tensor]],
        *,
        streams: Streams,
        after: Event = DONE,
        on_issue: Callable[[], None] | None = None,
    ) -> None:
        """`after`: an event that the copies wait for. `on_issue` is called when the copies have been issued."""
        self.pairs, self.after, self.on_issue = pairs, after, on_issue
        self.is_issued = False
        self.begin, self.end = (streams.event(timing=True) for _ in range(2))

    def issue(self, stream: Stream) -> None:
        stream.wait(self.after)
        stream.record(self.begin)
        with stream.issuing():
            for target, source in self.pairs:
                target.copy_(source, non_blocking=True)
                stream.uses(source)
        stream.record(self.end)
        self.pairs, self.is_issued = (), True
        on_issue, self.on_issue = self.on_issue, None
        if on_issue is not None:
            on_issue()


class CopyLane:
    """The copies of one direction. See [Note: order of copies]. Any thread may use it."""

    def __init__(self, stream: Stream, order: ServiceOrder) -> None:
        self.stream = stream
        self._order = order
        self._waiting: deque[Copy] = deque()
        self._in_flight: deque[Copy] = deque()
        self._lock = threading.RLock()

    def put(self, copy: Copy) -> None:
        with self._lock:
            self._waiting.append(copy)
        self.advance()

    def advance(self) -> None:
        """Issues waiting copies, if issued ones have ended."""
        with self._lock:
            while self._in_flight and self._in_flight[0].end.query():
                self._in_flight.popleft()
            while self._waiting and len(self._in_flight) < NUM_IN_FLIGHT:
                self._issue(self._order.pop(self._waiting))

    def issue_now(self, copy: Copy) -> None:
        """Issues a copy before all that wait, if it waits too."""
        with self._lock:
            if not copy.is_issued:
                self._waiting.remove(copy)
                self._issue(copy)

    def _issue(self, copy: Copy) -> None:
        self._in_flight.append(copy)
        copy.issue(self.stream)


@dataclass(eq=False)
class UploadBuffer:
    """Device memory for one group's directions."""

    buffer: torch.Tensor
    filled: Event
    drained: Event
    owner: object | None = None
    """The group whose directions are in the buffer or being copied there; None: the buffer is free."""


class Transfers:
    """A lane in each direction, and buffers for groups that have no device memory for their directions."""

    def __init__(self, streams: Streams, *, order: ServiceOrder) -> None:
        self.streams = streams
        self.down, self.up = (CopyLane(streams.another(name), order) for name in ("gradients", "directions"))
        self.upload_buffers: list[UploadBuffer] = []

    def make_buffers(self, nbytes: int) -> None:
        """Makes the buffers, for directions of at most `nbytes`."""
        new, device = self.streams.event, self.streams.device
        self.upload_buffers = [
            UploadBuffer(torch.empty(nbytes, dtype=torch.uint8, device=device), new(), new())
            for _ in range(NUM_UPLOAD_BUFFERS)
        ]

    @property
    def num_bytes(self) -> int:
        return sum(upload_buffer.buffer.nbytes for upload_buffer in self.upload_buffers)

    def buffer_of(self, group: object) -> UploadBuffer | None:
        return next((upload_buffer for upload_buffer in self.upload_buffers if upload_buffer.owner is group), None)

    def has_free_buffer(self) -> bool:
        return any(upload_buffer.owner is None for upload_buffer in self.upload_buffers)

    def upload(self, group: object, source: torch.Tensor) -> UploadBuffer:
        """Starts an upload. If no buffer is free, the first one is overwritten, and its group has to upload again."""
        upload_buffer = next((free for free in self.upload_buffers if free.owner is None), self.upload_buffers[0])
        upload_buffer.owner = group
        stream = self.up.stream
        stream.wait(upload_buffer.drained)
        with stream.issuing():
            upload_buffer.buffer[: source.numel()].copy_(source, non_blocking=True)
        stream.record(upload_buffer.filled)
        return upload_buffer
