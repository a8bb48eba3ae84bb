"""Delays on the streams and the threads that move weights, so that a missing wait shows."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from ds_zo.backends.adapter.activations import KeptInput
from ds_zo.backends.lsp.host_adam import HostAdam
from ds_zo.backends.lsp.transfers import Copy, TransferStreams
from ds_zo.streaming.runtime import Runtime

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


def delay_streams(monkeypatch: pytest.MonkeyPatch, pause: Pause) -> None:
    """Calls `pause` on the stream of each copy of weights, directions and inputs before the copy, on the compute stream
    after each wait for a block, and in the thread of Adam before each update."""
    upload, upload_low, download = Runtime._upload, Runtime._upload_low, Runtime._download
    acquire, issue, upload_directions = Runtime.acquire, Copy.issue, TransferStreams.upload
    copy_input, update = KeptInput._copy, HostAdam.update

    def slow_upload(self: Runtime, *args: Any) -> None:
        with self._on(self._up):
            pause("uploads")
        upload(self, *args)

    def slow_upload_low(self: Runtime, *args: Any) -> Any:
        with self._on(self._up_low):
            pause("low planes")
        return upload_low(self, *args)

    def slow_download(self: Runtime, *args: Any) -> None:
        with self._on(self._down):
            pause("downloads")
        download(self, *args)

    def slow_acquire(self: Runtime, *args: Any) -> Any:
        slot = acquire(self, *args)
        pause("compute")
        return slot

    def slow_issue(self: Copy, stream: torch.cuda.Stream) -> None:
        with torch.cuda.stream(stream):
            pause("directions")
        issue(self, stream)

    def slow_upload_directions(self: TransferStreams, *args: Any) -> Any:
        with torch.cuda.stream(self.up.stream):
            pause("directions")
        return upload_directions(self, *args)

    def slow_copy_input(self: KeptInput, *args: Any) -> None:
        with self._owner.on_side_stream():
            pause("inputs")
        copy_input(self, *args)

    def slow_update(self: HostAdam, *args: Any, **options: Any) -> torch.Tensor:
        pause("Adam")
        return update(self, *args, **options)

    monkeypatch.setattr(Runtime, "_upload", slow_upload)
    monkeypatch.setattr(Runtime, "_upload_low", slow_upload_low)
    monkeypatch.setattr(Runtime, "_download", slow_download)
    monkeypatch.setattr(Runtime, "acquire", slow_acquire)
    monkeypatch.setattr(Copy, "issue", slow_issue)
    monkeypatch.setattr(TransferStreams, "upload", slow_upload_directions)
    monkeypatch.setattr(KeptInput, "_copy", slow_copy_input)
    monkeypatch.setattr(HostAdam, "update", slow_update)
