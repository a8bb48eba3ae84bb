"""Finds races between streams without a GPU.

Streams and events are replaced by vector clocks. Everything runs at once on the CPU, in issue order; what is checked is
that the waits which were issued order every two accesses to the same bytes, of which one writes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, ClassVar

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ds_zo.streaming.runtime import Runtime

_LOOKS_ONLY = ("view", "slice", "detach", "alias", "empty", "expand", "strided", "reshape", "transpose", "select")


class Clock:
    """A stream, or the host: what it has seen of each of them."""

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


HOST, COMPUTE = Clock("host"), Clock("compute")
_current = [COMPUTE]


class Event:
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.seen: dict[str, int] = {}

    def record(self, stream: Clock) -> None:
        self.seen = dict(stream.seen)

    def synchronize(self) -> None:
        HOST.join(self.seen)


@contextmanager
def _on(stream: Clock) -> Iterator[None]:
    _current.append(stream)
    try:
        yield
    finally:
        _current.pop()


class ClockedRuntime(Runtime):
    """The runtime as it is on CUDA, on clocks."""

    made: ClassVar[list[ClockedRuntime]] = []

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        if self._overlap:
            self._own_up, self._own_down = Clock("up"), Clock("down")  # type: ignore[assignment]
        for slot in (*self.slots, *self._low_pool):
            slot.filled, slot.drained = Event(), Event()  # type: ignore[assignment]
            slot.saved = [Event() for _ in slot.saved]  # type: ignore[misc]
        self.made.append(self)

    @property
    def _compute(self) -> Any:
        return COMPUTE

    def _on(self, stream: Any) -> AbstractContextManager[object]:
        return nullcontext() if stream is None else _on(stream)


class Races(TorchDispatchMode):
    """Inside, notes accesses to slots and stored blocks that nothing orders. A stored block that is touched by no copy
    is touched by the host."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[str] = set()
        self.num_writes = 0
        self._accesses: dict[int, list[tuple[int, int, bool, str, int]]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not any(word in func.__name__ for word in _LOOKS_ONLY):
            given = [*zip(func._schema.arguments, args, strict=False)]
            given += [(a, kwargs[a.name]) for a in func._schema.arguments if kwargs and a.name in kwargs]
            for argument, value in given:
                writes = argument.alias_info is not None and argument.alias_info.is_write
                for tensor in value if isinstance(value, (list, tuple)) else (value,):
                    if isinstance(tensor, torch.Tensor) and tensor.numel():
                        self._access(tensor, writes)
        return func(*args, **(kwargs or {}))

    def _access(self, tensor: torch.Tensor, writes: bool) -> None:
        extent = sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True)) + 1
        begin, end = tensor.data_ptr(), tensor.data_ptr() + extent * tensor.element_size()
        for name, buffer in self._buffers():
            if not (begin < buffer.data_ptr() + buffer.numel() and buffer.data_ptr() < end):
                continue
            clock = HOST if _current[-1] is COMPUTE and "slot" not in name else _current[-1]
            clock.join(HOST.seen)  # what is issued now starts after what the host has waited for
            earlier = self._accesses.setdefault(buffer.data_ptr(), [])
            for other_begin, other_end, wrote, where, when in earlier:
                meet = other_begin < end and begin < other_end and (writes or wrote)
                if meet and clock.seen.get(where, 0) < when:
                    how = f"{'written' if writes else 'read'} by {clock.name}"
                    self.found.add(f"{name} {how} beside {'a write' if wrote else 'a read'} by {where}")
            earlier.append((begin, end, writes, clock.name, clock.tick()))
            self.num_writes += writes

    def _buffers(self) -> Iterator[tuple[str, torch.Tensor]]:
        runtime = ClockedRuntime.made[-1]
        for unit in runtime.units:
            if unit.streamed:
                yield unit.name, unit.home
            if unit.low_streamed and unit.low_home is not None:
                yield f"low plane of {unit.name}", unit.low_home
        for i, slot in enumerate(runtime.slots):
            yield f"slot {i}", slot.buffer
        for slot in (*runtime._low_pool, *runtime._low_of.values()):
            yield "low slot", slot.buffer
