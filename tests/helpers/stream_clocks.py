"""Finds races between streams without a GPU.

Streams and events are replaced by vector clocks. Everything runs at once on the CPU, in issue order; what is checked is
that the waits which were issued order every two accesses to the same bytes, of which one writes. Threads of the host
have clocks too, and learn from one another only where one hands something over.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any, ClassVar
from unittest.mock import patch

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ds_zo import ops
from ds_zo.backends.lsp.groups import LSPGroups
from ds_zo.backends.lsp.scheduler import Job, ServiceOrder
from ds_zo.streaming.host_store import HostStore
from ds_zo.streaming.node import RankPartition
from ds_zo.streaming.runtime import Runtime
from ds_zo.streaming.slot import Slot
from ds_zo.streaming.streams import InlineStream, Stream, Streams, made_by
from ds_zo.streaming.transport import GatheringTransport, stored_bytes
from ds_zo.streaming.units import Unit

_LOOKS_ONLY = ("view", "slice", "detach", "alias", "empty", "expand", "strided", "reshape", "transpose", "select")


def _later(first: dict[str, int], second: dict[str, int]) -> dict[str, int]:
    return {name: max(first.get(name, 0), second.get(name, 0)) for name in first | second}


class Clock(InlineStream):
    """A stream, or a thread of the host: what it has seen of each of them."""

    deaf: ClassVar[Collection[tuple[str, str]]] = ()
    """Pairs of streams of which the first does not wait for events of the second."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.seen: dict[str, int] = {}

    def tick(self) -> int:
        self.seen[self.name] = self.seen.get(self.name, 0) + 1
        return self.seen[self.name]

    def join(self, seen: dict[str, int]) -> None:
        self.seen = _later(self.seen, seen)

    def wait(self, event: Any) -> None:
        event.wait(self)

    def wait_stream(self, other: Stream) -> None:
        self.wait(other.recorded())

    def record(self, event: Any) -> None:
        event.record(self)

    def recorded(self) -> Event:
        event = Event()
        event.record(self)
        return event

    def issuing(self) -> AbstractContextManager[None]:
        return _pushed(_streams, self)

    def synchronize(self) -> None:
        self.recorded().synchronize()


class ClockedStreams(Streams):
    """Streams on which everything runs at once, in the order of issue."""

    def __init__(self, device: torch.device, *, deaf: Collection[tuple[str, str]] = ()) -> None:
        Clock.deaf = deaf
        super().__init__(device, current=COMPUTE, overlap=True)

    def another(self, name: str) -> Clock:
        return Clock(name)

    def event(self, *, timing: bool = False) -> Event:
        return Event()


HOST, COMPUTE = Clock("host"), Clock("compute")
_threads = [HOST]
_streams = [COMPUTE]


class Event:
    def __init__(self) -> None:
        self.seen: dict[str, int] = {}
        self.recorded_on = ""
        self._has_ended = False
        """The host has waited for it. No other event is known to have ended."""

    def record(self, stream: Clock) -> None:
        self._has_ended = False
        self.recorded_on = stream.name
        self.seen = _later(stream.seen, _threads[-1].seen)  # work is issued after what its thread has waited for

    def wait(self, stream: Clock) -> None:
        if (stream.name, self.recorded_on) not in Clock.deaf:
            stream.join(self.seen)

    def synchronize(self) -> None:
        _threads[-1].join(self.seen)
        self._has_ended = True

    def query(self) -> bool:
        return self._has_ended

    def elapsed_time(self, end: Event) -> float:
        return 1.0


@contextmanager
def _pushed(stack: list[Clock], clock: Clock) -> Iterator[None]:
    stack.append(clock)
    try:
        yield
    finally:
        stack.pop()


def in_thread(clock: Clock) -> AbstractContextManager[None]:
    """Context in another thread of the host."""
    return _pushed(_threads, clock)


@contextmanager
def clocked(*, deaf: Collection[tuple[str, str]] = ()) -> Iterator[None]:
    """Inside, engines are made with `ClockedStreams`."""
    kernel = patch.object(ops, "replay_perturb", _noted(ops.replay_perturb))
    with made_by(partial(ClockedStreams, deaf=deaf)), kernel:
        yield


def _noted(kernel: Callable[..., None]) -> Callable[..., None]:
    """On a CPU numpy is what reads and writes, which nothing dispatches."""

    def run(
        source: ops.Planes, *, store: ops.Store | None = None, copies: ops.Copies | None = None, **arguments: Any
    ) -> None:
        written = [] if copies is None else [copies.out, copies.pair]
        if store is not None and store.to is not None:
            written += vars(store.to).values()
        for races in Races.watching:
            for plane in vars(source).values():
                races.note(plane, writes=False)
            for plane in written:
                races.note(plane, writes=True)
        kernel(source, store=store, copies=copies, **arguments)

    return run


def buffers_of(runtime: Runtime) -> Iterator[Buffer]:
    """What the streams of a runtime copy."""
    for unit in runtime.units:
        if unit.streamed:
            yield unit.name, unit.store_buffer, False
        if unit.low_streamed and unit.low_buffer is not None:
            yield f"low plane of {unit.name}", unit.low_buffer, False
    for i, slot in enumerate(runtime.slots):
        yield f"slot {i}", slot.buffer, True
    for slot in runtime.low_slots:
        yield "low slot", slot.buffer, True


class _Gathering:
    """On a stream of the library's own, which whoever waits goes on after."""

    _stream = Clock("library")

    def __init__(self, buffer: torch.Tensor) -> None:
        self._stream.wait_stream(_streams[-1])
        with self._stream.issuing():
            buffer.add_(0)
        self._done = self._stream.recorded()

    def wait(self) -> None:
        _streams[-1].wait(self._done)


class OneRank(GatheringTransport):
    """Gathers from one rank alone: its only shard is the whole unit, but comes as shards do."""

    def __init__(self, streams: Streams, store: HostStore) -> None:
        node: Any = SimpleNamespace(
            streams=streams, partition=RankPartition(0, 1), gather=lambda buffer: [_Gathering(buffer)]
        )
        super().__init__(node)
        self.in_pass = False

    def _own(self, unit: Unit, *, low: bool) -> torch.Tensor:
        return stored_bytes(unit, low=low)

    def _read_whole(self, unit: Unit, slot: Slot, *, low: bool) -> None:
        assert not (low and self.in_pass), "other ranks may be writing it back: it is gathered with them"
        own = self._own(unit, low=low)
        slot.buffer[: own.numel()].copy_(own)

    def _meet(self, order: Sequence[Unit]) -> None:
        self.in_pass = True


class OneRankRuntime(Runtime):
    def finish(self) -> None:
        super().finish()
        self.transport.in_pass = False  # type: ignore[attr-defined]


class ClockedAdam:
    """The thread that runs Adam, which gets to a job as soon as it is there, or not before somebody waits for it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, is_slow: bool) -> None:
        self.order = ServiceOrder()
        self._clock = Clock("adam")
        self._is_slow = is_slow
        self._told: list[tuple[Job, dict[str, int]]] = []
        """Jobs that wait, and what the one who handed over each had seen."""
        self._done: dict[int, dict[str, int]] = {}
        wait, is_finished = Job.wait, vars(Job)["is_finished"].fget

        def wait_on_clocks(job: Job) -> torch.Tensor:
            while id(job) not in self._done:  # its download may wait for the end of another
                self._run(self._told[0][0])
            _threads[-1].join(self._done[id(job)])
            return wait(job)

        def look(job: Job) -> bool:
            found: bool = is_finished(job)
            if found:
                _threads[-1].join(self._done[id(job)])
            return found

        monkeypatch.setattr(Job, "wait", wait_on_clocks)
        monkeypatch.setattr(Job, "is_finished", property(look))

    def put(self, job: Job) -> None:
        self._told.append((job, dict(_threads[-1].seen)))
        if not self._is_slow and not any(thread is self._clock for thread in _threads):
            self._run(job)

    def _run(self, job: Job) -> None:
        [seen] = [seen for waiting, seen in self._told if waiting is job]
        self._told = [told for told in self._told if told[0] is not job]
        self._clock.join(seen)
        with _pushed(_threads, self._clock):
            job.run()
        self._done[id(job)] = dict(self._clock.seen)
        _kept.append(job)  # no other job is to get its id

    def close(self) -> None:
        pass


_kept: list[Any] = []


def buffers_of_groups(groups: LSPGroups) -> Iterator[Buffer]:
    """What LSP's groups copy, and what Adam reads and writes."""
    for upload_buffer in groups.transfers.upload_buffers:
        yield "upload buffer", upload_buffer.buffer, True
    for group in groups.on_host:
        assert group.adam is not None
        yield f"sums and directions of {group.name}", group.device_memory.view(torch.uint8), True
        yield f"gradients of {group.name}", group.adam.gradients, False
        yield f"directions of {group.name}", group.adam.directions, False
        yield f"norms of {group.name}", group.adam.whole_norms, False
        for moments in group.moments:
            yield f"moments of {group.name}", moments.mean, False


Buffer = tuple[str, torch.Tensor, bool]
"""Name, memory, and whether that is the device's. What no stream copies of the host's, a thread of it touches."""


class Races(TorchDispatchMode):
    """Inside, notes accesses to `buffers` that nothing orders."""

    watching: ClassVar[list[Races]] = []

    def __init__(self, *buffers: Callable[[], Iterable[Buffer]]) -> None:
        super().__init__()
        self.found: set[str] = set()
        self.num_writes = 0
        self._sources = buffers
        self._accesses: dict[int, list[tuple[int, int, bool, str, int]]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not any(word in func.__name__ for word in _LOOKS_ONLY):
            given = [*zip(func._schema.arguments, args, strict=False)]
            given += [(a, kwargs[a.name]) for a in func._schema.arguments if kwargs and a.name in kwargs]
            for argument, value in given:
                writes = argument.alias_info is not None and argument.alias_info.is_write
                for tensor in value if isinstance(value, (list, tuple)) else (value,):
                    if isinstance(tensor, torch.Tensor):
                        self.note(tensor, writes=writes)
        return func(*args, **(kwargs or {}))

    def __enter__(self) -> Races:
        self.watching.append(self)
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self.watching.remove(self)
        super().__exit__(*error)

    def note(self, tensor: torch.Tensor | None, *, writes: bool) -> None:
        if tensor is not None and tensor.numel():
            self._access(tensor, writes)

    def _access(self, tensor: torch.Tensor, writes: bool) -> None:
        extent = sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True)) + 1
        begin, end = tensor.data_ptr(), tensor.data_ptr() + extent * tensor.element_size()
        for name, buffer, on_device in itertools.chain.from_iterable(source() for source in self._sources):
            if not (begin < buffer.data_ptr() + buffer.nbytes and buffer.data_ptr() < end):
                continue
            clock = _streams[-1] if on_device or _streams[-1] is not COMPUTE else _threads[-1]
            clock.join(_threads[-1].seen)  # what is issued now starts after what the thread has waited for
            earlier = self._accesses.setdefault(buffer.data_ptr(), [])
            for other_begin, other_end, wrote, where, when in earlier:
                meet = other_begin < end and begin < other_end and (writes or wrote)
                if meet and clock.seen.get(where, 0) < when:
                    how = f"{'written' if writes else 'read'} by {clock.name}"
                    self.found.add(f"{name} {how} beside {'a write' if wrote else 'a read'} by {where}")
            earlier.append((begin, end, writes, clock.name, clock.tick()))
            self.num_writes += writes
