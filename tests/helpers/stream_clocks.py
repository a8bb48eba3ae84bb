"""Finds races between streams without a GPU.

Streams and events are replaced by vector clocks. Everything runs at once on the CPU, in issue order; what is checked is
that the waits which were issued order every two accesses to the same bytes, of which one writes. Threads of the host
have clocks too, and learn from one another only where one hands something over.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ds_zo import ops
from ds_zo.backends.lsp import transfers as lsp_transfers
from ds_zo.backends.lsp.groups import LSPGroups
from ds_zo.backends.lsp.scheduler import Job, ServiceOrder
from ds_zo.streaming.node import RankPartition
from ds_zo.streaming.runtime import Runtime, Slot
from ds_zo.streaming.sharded import ShardedRuntime
from ds_zo.streaming.shared_store import SharedStore
from ds_zo.streaming.units import Unit

_LOOKS_ONLY = ("view", "slice", "detach", "alias", "empty", "expand", "strided", "reshape", "transpose", "select")


class Clock:
    """A stream, or a thread of the host: what it has seen of each of them."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.seen: dict[str, int] = {}

    def tick(self) -> int:
        self.seen[self.name] = self.seen.get(self.name, 0) + 1
        return self.seen[self.name]

    def join(self, seen: dict[str, int]) -> None:
        for name, count in seen.items():
            self.seen[name] = max(self.seen.get(name, 0), count)

    def wait_event(self, event: Event) -> None:
        self.join(event.seen)

    def wait_stream(self, other: Clock) -> None:
        self.join(other.seen)


class Stream(Clock):
    """As torch makes them."""

    def __init__(self, *args: Any) -> None:
        super().__init__(f"stream {next(_numbers)}")


HOST, COMPUTE = Clock("host"), Clock("compute")
_threads = [HOST]
_streams = [COMPUTE]
_numbers = itertools.count()


class Event:
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.seen: dict[str, int] = {}
        self._has_ended = False
        """The host has waited for it. No other event is known to have ended."""

    def record(self, stream: Clock | None = None) -> None:
        self._has_ended = False
        self.seen = dict((stream or _streams[-1]).seen)
        self._know_more(_threads[-1].seen)

    def _know_more(self, seen: dict[str, int]) -> None:
        """What is issued starts after what the thread that issues it has waited for."""
        for name, count in seen.items():
            self.seen[name] = max(self.seen.get(name, 0), count)

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


@contextmanager
def in_thread(clock: Clock) -> Iterator[None]:
    """Inside, another thread of the host."""
    with _pushed(_threads, clock):
        yield


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: _pushed(_streams, stream))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: _streams[-1])
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda *args: None)
    monkeypatch.setattr(ops, "replay_perturb", _noted(ops.replay_perturb))
    make: Any = lsp_transfers.UploadBuffer
    monkeypatch.setattr(lsp_transfers, "UploadBuffer", lambda buffer: make(buffer, filled=Event(), drained=Event()))


def _noted(kernel: Callable[..., None]) -> Callable[..., None]:
    """On a CPU numpy is what reads and writes, which nothing dispatches."""

    def run(source: torch.Tensor, **arguments: Any) -> None:
        for races in Races.watching:
            for name in ("low_in", "scales_in"):
                races.note(arguments.get(name), writes=False)
            races.note(source, writes=False)
            for name in ("dst", "out", "pair", "low_out", "scales_out"):
                races.note(arguments.get(name), writes=True)
        kernel(source, **arguments)

    return run


class ClockedRuntime(Runtime):
    """The runtime as it is on CUDA, on clocks."""

    made: ClassVar[list[ClockedRuntime]] = []

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        if self._overlap:
            self._own_up, self._own_down = Clock("up"), Clock("down")  # type: ignore[assignment]
            self._own_up_low = Clock("up, low planes")  # type: ignore[assignment]
        for slot in (*self.slots, *self.low_slots):
            slot.filled, slot.drained = Event(), Event()  # type: ignore[assignment]
            slot.saved = [Event() for _ in slot.saved]  # type: ignore[misc]
        self.made.append(self)

    @property
    def _compute(self) -> Any:
        return COMPUTE

    def _on(self, stream: Any) -> AbstractContextManager[object]:
        return nullcontext() if stream is None else _pushed(_streams, stream)

    def buffers(self) -> Iterator[Buffer]:
        for unit in self.units:
            if unit.streamed:
                yield unit.name, unit.store_buffer, False
            if unit.low_streamed and unit.low_buffer is not None:
                yield f"low plane of {unit.name}", unit.low_buffer, False
        for i, slot in enumerate(self.slots):
            yield f"slot {i}", slot.buffer, True
        for slot in self.low_slots:
            yield "low slot", slot.buffer, True


class _Gathering:
    """On a stream of the library's own, which whoever waits goes on after."""

    _stream = Clock("library")

    def __init__(self, buffer: torch.Tensor) -> None:
        self._stream.wait_stream(_streams[-1])
        with _pushed(_streams, self._stream):
            buffer.add_(0)
        self._done = Event()
        self._done.record(self._stream)

    def wait(self) -> None:
        _streams[-1].wait_event(self._done)


class _OneRank(SharedStore):
    """A store that is shared with nobody: its only shard is all of it, but comes by the same way."""

    def __init__(self) -> None:
        self.partition = RankPartition(0, 1)
        self.node: Any = SimpleNamespace(
            streams=[], stream_barrier=lambda: None, gather=lambda buffer: [_Gathering(buffer)]
        )
        self._pinned = {}

    def mark_written_back(self, number: int) -> None:
        pass

    def wait(self, number: int) -> None:
        pass


class ClockedShardedRuntime(ClockedRuntime, ShardedRuntime):
    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, store=_OneRank(), **settings)
        if self._overlap:
            self._own_gathered = Clock("gathered")  # type: ignore[assignment]
        self._met = Event()  # type: ignore[assignment]

    def _upload_low(self, unit: Unit) -> Slot:
        assert not self._is_collective, "other ranks may be writing it back: it is gathered with them"
        return super()._upload_low(unit)


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


def clock_groups(groups: LSPGroups, adam: ClockedAdam) -> Callable[[], Iterator[Buffer]]:
    """Makes LSP's groups copy through streams, as on CUDA. Returns the buffers that they use."""
    groups.streams = streams = groups.make_streams()
    for group in groups.on_host:
        group.streams, group._queue = streams, adam  # type: ignore[assignment]

    def buffers() -> Iterator[Buffer]:
        for upload_buffer in streams._upload_buffers:
            yield "upload buffer", upload_buffer.buffer, True
        for group in groups.on_host:
            yield f"sums and directions of {group.name}", group.device_memory.view(torch.uint8), True
            on_host = {
                "gradients": group.adam.gradients,
                "directions": group.adam.directions,
                "norms": group.adam.whole_norms,
            }
            for what, buffer in on_host.items():
                yield f"{what} of {group.name}", buffer, False
            for moments in group.moments:
                yield f"moments of {group.name}", moments.mean, False

    return buffers


Buffer = tuple[str, torch.Tensor, bool]
"""Name, memory, and whether that is the device's. What no stream copies of the host's, a thread of it touches."""


class Races(TorchDispatchMode):
    """Inside, notes accesses to `buffers` that nothing orders."""

    watching: ClassVar[list[Races]] = []

    def __init__(self, *buffers: Callable[[], Iterable[Buffer]]) -> None:
        super().__init__()
        self.found: set[str] = set()
        self.num_writes = 0
        self._sources = buffers or (lambda: ClockedRuntime.made[-1].buffers(),)
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
