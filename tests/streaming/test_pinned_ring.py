"""The pinned ring on a device that executes late: bytes, order, reuse of slices, and errors of its threads."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from queue import SimpleQueue
from typing import Any

import pytest
import torch

from ds_zo.streaming import pinned_ring
from ds_zo.streaming.host_store import HostStore
from ds_zo.streaming.pinned_ring import DeviceSide, PinnedRing
from ds_zo.streaming.streams import DeferredRecord, InlineStream


class LateEvent:
    """Set when the device reaches it."""

    def __init__(self) -> None:
        self.reached = threading.Event()
        self.reached.set()

    def record(self, device: LateDevice) -> None:
        self.reached.clear()
        device.enqueue(self.reached.set)

    def wait(self, device: LateDevice) -> None:
        device.enqueue(self.reached.wait)

    def synchronize(self) -> None:
        assert self.reached.wait(20)

    def query(self) -> bool:
        return self.reached.is_set()


class UploadEvent(DeferredRecord, LateEvent):
    pass


class LateDevice(DeviceSide):
    """A stream whose work runs in order on another thread, each item of it after a random pause."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._work: SimpleQueue[Callable[[], Any] | None] = SimpleQueue()
        self.sent: list[int] = []
        """Number of bytes of each copy, in the order of execution."""
        self.events: list[LateEvent] = []
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        for work in iter(self._work.get, None):
            time.sleep(self._random.choice((0, 0, 0.0005)))
            work()

    def enqueue(self, work: Callable[[], Any]) -> None:
        self._work.put(work)

    def now(self) -> LateEvent:
        event = LateEvent()
        self.events.append(event)
        return event

    def wait(self, event: LateEvent) -> None:
        event.wait(self)

    def send(self, target: torch.Tensor, staged: torch.Tensor) -> LateEvent:
        def copy() -> None:
            target.copy_(staged)
            self.sent.append(staged.numel())

        self.enqueue(copy)
        event = LateEvent()
        event.record(self)
        return event

    def record(self, event: UploadEvent) -> None:
        event.record(self)

    def synchronize(self) -> None:
        event = LateEvent()
        event.record(self)
        event.synchronize()

    def close(self) -> None:
        self._work.put(None)
        self._thread.join(20)


@pytest.fixture
def device() -> Iterator[LateDevice]:
    made = LateDevice(0)
    yield made
    made.close()


def ring_of(device: LateDevice, *, num_slices: int, slice_nbytes: int, num_copiers: int = 3) -> PinnedRing:
    memory = torch.full((num_slices * slice_nbytes,), 255, dtype=torch.uint8)
    return PinnedRing(memory.split(slice_nbytes), device, num_copiers=num_copiers)


def random_bytes(numel: int, seed: int) -> torch.Tensor:
    return torch.randint(0, 255, (numel,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("seed", range(6))
def test_bytes_arrive_whatever_the_sizes(seed: int, device: LateDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    """Uploads smaller and larger than the ring. Slices wrap around, and copiers finish in any order."""
    draw = random.Random(seed)
    plain = pinned_ring._copy

    def slow(target: torch.Tensor, source: torch.Tensor) -> None:
        time.sleep(draw.choice((0, 0, 0.001)))
        plain(target, source)

    monkeypatch.setattr(pinned_ring, "_copy", slow)
    num_slices, slice_nbytes = draw.randint(2, 6), draw.choice((1, 16, 100))
    ring = ring_of(device, num_slices=num_slices, slice_nbytes=slice_nbytes)
    sizes = [draw.randint(1, 3 * num_slices * slice_nbytes) for _ in range(12)]
    sources = [random_bytes(n, i) for i, n in enumerate(sizes)]
    targets = [torch.full((n,), 255, dtype=torch.uint8) for n in sizes]
    events = [UploadEvent() for _ in sizes]
    for source, target, event in zip(sources, targets, events, strict=True):
        ring.upload(target, source, event)
    for i in draw.sample(range(len(sizes)), len(sizes)):
        events[i].synchronize()
        assert events[i].query()
        assert torch.equal(targets[i], sources[i]), i
    lengths = [min(slice_nbytes, n - at) for n in sizes for at in range(0, n, slice_nbytes)]
    assert device.sent == lengths, "in the order of the uploads, and in that of the bytes"
    ring.close()


def test_an_upload_waits_for_what_its_stream_had_before(device: LateDevice) -> None:
    """The slot may still be read: nothing is written to it until the event of the caller's stream."""
    ring = ring_of(device, num_slices=4, slice_nbytes=8)
    source, target, event = random_bytes(20, 0), torch.zeros(20, dtype=torch.uint8), UploadEvent()
    blocked = LateEvent()
    blocked.reached.clear()
    device.now = lambda: blocked  # type: ignore[method-assign]
    ring.upload(target, source, event)
    time.sleep(0.05)
    assert not target.any()
    assert not event.query()
    blocked.reached.set()
    event.synchronize()
    assert torch.equal(target, source)
    ring.close()


def test_an_error_of_a_copier_reaches_who_waits(device: LateDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(target: torch.Tensor, source: torch.Tensor) -> None:
        raise OSError("no such page")

    ring = ring_of(device, num_slices=4, slice_nbytes=8)
    monkeypatch.setattr(pinned_ring, "_copy", fails)
    events = [UploadEvent(), UploadEvent()]
    for event in events:
        ring.upload(torch.zeros(20, dtype=torch.uint8), random_bytes(20, 0), event)
    with pytest.raises(OSError, match="no such page"):
        events[0].wait(device)
    with pytest.raises(RuntimeError, match="an earlier upload through the pinned ring failed"):
        events[1].synchronize()
    ring.close()


def test_memory_without_a_ring_is_copied_at_once(device: LateDevice) -> None:
    """Also to a slot whose last upload went through a ring: the copy waits for that one."""
    ring, store = ring_of(device, num_slices=2, slice_nbytes=8), HostStore(torch.device("cpu"), pin=False)
    source, target, event = random_bytes(20, 0), torch.zeros(20, dtype=torch.uint8), UploadEvent()
    ring.upload(target, source, event)
    later = store.take(20).copy_(random_bytes(20, 1))
    waited: list[object] = []

    class Waiting(InlineStream):
        def wait(self, event: Any) -> None:
            waited.append(event)
            event.synchronize()

    for _ in range(2):
        store.upload(target, later, event, stream=Waiting())
        assert waited == [event] and event.upload is None
        assert torch.equal(target, later)
    ring.close()


def test_a_garbage_collector_may_drop_a_ring_on_its_own_threads(
    device: LateDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ring makes the uploads that were asked for, and then its threads end."""
    plain = pinned_ring._copy

    def collecting(target: torch.Tensor, source: torch.Tensor) -> None:
        ring.end()
        plain(target, source)

    monkeypatch.setattr(pinned_ring, "_copy", collecting)
    ring = ring_of(device, num_slices=4, slice_nbytes=8)
    source, target, event = random_bytes(100, 0), torch.zeros(100, dtype=torch.uint8), UploadEvent()
    ring.upload(target, source, event)
    assert event.upload is not None
    event.upload.result(timeout=20)
    event.synchronize()
    assert torch.equal(target, source)
    for thread in (ring._thread, *ring._copiers._threads):
        thread.join(20)
        assert not thread.is_alive()


def test_slices_of_several_sizes_are_refused(device: LateDevice) -> None:
    """A copy of a whole slice would write behind a shorter one."""
    with pytest.raises(AssertionError):
        PinnedRing(torch.zeros(20, dtype=torch.uint8).split(8), device, num_copiers=1)


@pytest.mark.parametrize(
    ("on_machine", "bound", "ranks", "expected"), [(16, 16, "1", 16), (16, 16, "4", 4), (16, 4, "4", 4)]
)
def test_ranks_share_the_cores_unless_they_are_bound(
    on_machine: int, bound: int, ranks: str, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pinned_ring.os, "cpu_count", lambda: on_machine)
    monkeypatch.setattr(pinned_ring.os, "sched_getaffinity", lambda _: set(range(bound)), raising=False)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks)
    assert pinned_ring._num_cores() == expected
