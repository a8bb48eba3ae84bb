"""The streams of an engine: CUDA's, or inline ones on the CPU.

A stream executes what is issued to it in order. An event, which a stream records, orders another stream behind that
point: `compute.wait(slot.filled)`. `streams_for` makes an engine's streams, and `made_by` lets a test make them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol

import torch


class Event(Protocol):
    """A point in the work of a stream. An event that was never recorded is done."""

    def synchronize(self) -> None:
        """Blocks the host until the event is done."""

    def query(self) -> bool:
        """Whether the event is done."""

    def elapsed_time(self, end: Any, /) -> float:
        """Milliseconds from this event to `end`, if both were made with `timing`."""


class Stream(Protocol):
    """Work that is executed in the order of its issue. The methods do not block the host, `synchronize` excepted."""

    def wait(self, event: Event) -> None:
        """Work that is issued to this stream from now on starts after the event."""

    def wait_stream(self, other: Any) -> None:
        """Work that is issued to this stream from now on starts after the work that `other` has now."""

    def record(self, event: Event) -> None:
        """The event is done when the work that this stream has now is done."""

    def recorded(self) -> Event:
        """A new event, recorded."""

    def issuing(self) -> AbstractContextManager[Any]:
        """Context whose work is issued to this stream."""

    def synchronize(self) -> None:
        """Blocks the host until the work that this stream has now is done."""

    def uses(self, tensor: torch.Tensor) -> None:
        """The memory of `tensor`, once freed, is used again after the work that this stream has then."""


class Streams:
    """The streams of an engine, and its events. Without `overlap` copies are issued to the current stream."""

    def __init__(self, device: torch.device, *, current: Stream, overlap: bool) -> None:
        self.device, self.overlaps = device, overlap
        self.compute = current
        """The caller's current stream at the time of each call."""
        self.upload, self.low_upload, self.download, self.gathered = (
            self.another(name) if overlap else current for name in ("upload", "low_upload", "download", "gathered")
        )
        # `gathered` waits for gathers, so that the next block's upload does not wait for them.

    def another(self, name: str) -> Stream:
        """A further stream."""
        raise NotImplementedError

    def event(self, *, timing: bool = False) -> Event:
        """A new event."""
        raise NotImplementedError

    def upload_event(self) -> Event:
        """An event that a pinned ring may record: see [Note: pinned ring]."""
        return self.event()


# The CPU


class InlineEvent:
    """The work before it was done when it was issued."""

    at_s = 0.0

    def wait(self, stream: Any) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: InlineEvent) -> float:
        return 1e3 * (end.at_s - self.at_s)


DONE = InlineEvent()
"""An event that is done, for every kind of stream."""


class InlineStream(Stream):
    """Executes work when it is issued."""

    def wait(self, event: Event) -> None: ...

    def wait_stream(self, other: Stream) -> None: ...

    def record(self, event: Any) -> None:
        event.at_s = time.perf_counter()

    def recorded(self) -> Event:
        return InlineEvent()

    def issuing(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def synchronize(self) -> None: ...

    def uses(self, tensor: torch.Tensor) -> None: ...


class InlineStreams(Streams):
    def __init__(self, device: torch.device, *, overlap: bool = True) -> None:
        super().__init__(device, current=InlineStream(), overlap=overlap)

    def another(self, name: str) -> Stream:
        return self.compute

    def event(self, *, timing: bool = False) -> Event:
        return InlineEvent()


# CUDA


class DeferredRecord:
    """For an event class: a ring's thread may record the event later. See [Note: pinned ring]."""

    upload: Future[None] | None = None
    """The last upload through a ring, whose thread records this event; None if there is none."""

    def wait(self, stream: Any = None) -> None:
        self._join()
        super().wait(stream)  # type: ignore[misc]

    def synchronize(self) -> None:
        self._join()
        super().synchronize()  # type: ignore[misc]

    def query(self) -> bool:
        return (self.upload is None or self.upload.done()) and bool(super().query())  # type: ignore[misc]

    def _join(self) -> None:
        if self.upload is not None:
            self.upload.result()


class UploadEvent(DeferredRecord, torch.cuda.Event):
    """The event `filled` of a slot."""


class CudaStream(Stream):
    def __init__(self, device: torch.device, *, is_current: bool = False) -> None:
        """A new stream. `is_current`: the current stream at the time of each call instead."""
        self._device = device
        self._own = None if is_current else torch.cuda.Stream(device)

    @property
    def raw(self) -> torch.cuda.Stream:
        return torch.cuda.current_stream(self._device) if self._own is None else self._own

    def wait(self, event: Any) -> None:
        event.wait(self.raw)

    def wait_stream(self, other: CudaStream) -> None:
        self.raw.wait_stream(other.raw)

    def record(self, event: Any) -> None:
        event.record(self.raw)

    def recorded(self) -> Event:
        event = torch.cuda.Event()
        event.record(self.raw)
        return event

    def issuing(self) -> AbstractContextManager[Any]:
        return torch.cuda.stream(self.raw)

    def synchronize(self) -> None:
        self.raw.synchronize()

    def uses(self, tensor: torch.Tensor) -> None:
        if tensor.is_cuda:
            tensor.record_stream(self.raw)


class CudaStreams(Streams):
    def __init__(self, device: torch.device, *, overlap: bool = True) -> None:
        super().__init__(device, current=CudaStream(device, is_current=True), overlap=overlap)

    def another(self, name: str) -> Stream:
        return CudaStream(self.device)

    def event(self, *, timing: bool = False) -> Event:
        return torch.cuda.Event(enable_timing=timing)

    def upload_event(self) -> Event:
        return UploadEvent()


# Making them


def of_device(device: torch.device, *, overlap: bool = True) -> Streams:
    """CUDA's streams, or inline ones on the CPU."""
    return (CudaStreams if device.type == "cuda" else InlineStreams)(device, overlap=overlap)


_makers: list[Callable[[torch.device], Streams]] = [of_device]
"""The last one makes streams. The others are those of outer `made_by` contexts."""


def streams_for(device: torch.device) -> Streams:
    """The streams of a new engine."""
    return _makers[-1](device)


@contextmanager
def made_by(make: Callable[[torch.device], Streams]) -> Iterator[None]:
    """Context in which `make` makes the streams of new engines."""
    _makers.append(make)
    try:
        yield
    finally:
        _makers.pop()


def current_stream(device: torch.device) -> Stream:
    """The current stream at the time of each call, for code that belongs to no engine."""
    return CudaStream(device, is_current=True) if device.type == "cuda" else InlineStream()


def current_of_thread(device: torch.device) -> Any:
    """The stream that is current now, for `make_current`. None on the CPU."""
    return torch.cuda.current_stream(device) if device.type == "cuda" else None


def make_current(stream: Any) -> None:
    """Makes a stream that `current_of_thread` returned current in this thread."""
    if stream is not None:
        torch.cuda.set_stream(stream)
