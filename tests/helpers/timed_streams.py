"""Streams whose work takes a time that a test gives it, without a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ds_zo.streaming.streams import Event, InlineEvent, InlineStream, Streams


class Line(InlineStream):
    """A stream that knows when its work has ended. The host issues copies when the computing has got there."""

    def __init__(self, streams: TimedStreams) -> None:
        self.now_s = 0.0
        self._streams = streams

    def wait(self, event: Any) -> None:
        self.now_s = max(self.now_s, event.at_s)

    def record(self, event: Any) -> None:
        event.at_s = self.now_s

    def recorded(self) -> Event:
        event = InlineEvent()
        self.record(event)
        return event

    @contextmanager
    def issuing(self) -> Iterator[None]:
        streams = self._streams
        self.now_s = max(self.now_s, streams.computing.now_s)
        before, streams.copying = streams.copying, self
        yield
        streams.copying = before


class TimedStreams(Streams):
    """Streams on a clock. A test adds the seconds of copies to `copying`, the current stream, and those of kernels to
    `computing`."""

    def __init__(self) -> None:
        self.copying = self.computing = Line(self)
        super().__init__(torch.device("cpu"), current=self.computing, overlap=True)

    def another(self, name: str) -> Line:
        return Line(self)

    def event(self, *, timing: bool = False) -> Event:
        return InlineEvent()
