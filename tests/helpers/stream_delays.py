"""Delays on the streams and the threads that move weights, so that a missing wait shows."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import torch

from ds_zo.backends.lsp.host_adam import HostAdam
from ds_zo.streaming.streams import Event, Stream, Streams, made_by, of_device

Pause = Callable[[str], None]
"""Delays the current stream, or the calling thread. It is told what the stream or thread does."""


def random_pause(seed: int = 0) -> Pause:
    """A pause of random length: of the current stream on CUDA, else of the thread. "Adam" is always the thread's."""
    rng = random.Random(seed)

    def pause(what: str) -> None:
        length = rng.choice([0.0, 0.0, 0.025, 1.0])
        if torch.cuda.is_available() and what != "Adam":
            torch.cuda._sleep(int(4_000_000 * length))
        else:
            time.sleep(0.002 * length)

    return pause


class DelayedStream:
    """Pauses before what is copied on it, or after what it waits for."""

    def __init__(self, inner: Stream, name: str, pause: Pause, *, waits: bool) -> None:
        self.inner, self._name, self._pause, self._waits = inner, name, pause, waits

    def __getattr__(self, method: str) -> Any:
        return getattr(self.inner, method)

    def wait(self, event: Event) -> None:
        if self._waits:
            self.inner.wait(event)
        if self._name == "compute":
            self._pause("compute")

    def wait_stream(self, other: Any) -> None:
        if self._waits:
            self.inner.wait_stream(other.inner)

    @contextmanager
    def issuing(self) -> Iterator[None]:
        with self.inner.issuing():
            if self._name != "compute":
                self._pause(self._name)
            yield


class DelayedStreams(Streams):
    """The device's streams, with a pause before the copies of each and after each wait of the compute stream."""

    def __init__(self, device: torch.device, *, pause: Pause, waits: bool) -> None:
        self._inner = of_device(device)
        self._delayed: Any = partial(DelayedStream, pause=pause, waits=waits)
        super().__init__(device, current=self._delayed(self._inner.compute, "compute"), overlap=True)

    def another(self, name: str) -> Any:
        return self._delayed(self._inner.another(name), name)

    def event(self, *, timing: bool = False) -> Event:
        return self._inner.event(timing=timing)

    def upload_event(self) -> Event:
        return self._inner.upload_event()


@contextmanager
def delayed(pause: Pause, *, waits: bool = True) -> Iterator[None]:
    """Context whose engines have `DelayedStreams`, and whose thread of Adam pauses before each update. `waits` False:
    no stream waits for anything."""
    update = HostAdam.update

    def slow_update(self: HostAdam, *args: Any, **options: Any) -> torch.Tensor:
        pause("Adam")
        return update(self, *args, **options)

    with made_by(partial(DelayedStreams, pause=pause, waits=waits)), patch.object(HostAdam, "update", slow_update):
        yield
