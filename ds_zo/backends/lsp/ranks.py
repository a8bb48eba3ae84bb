"""What the ranks of an LSP run tell one another, and in which order.

[Note: one order] Collectives must be issued in the same order on every rank. So one thread of each rank issues all of
them, on a process group of its own, first come, first served; and what is handed to it inside a backward pass comes in
one order too, whatever the order in which gradients do: a layer that one rank's batch does not use holds back that
rank's later layers until its backward is over, and then goes as zeros. Nobody but that thread waits for another rank,
so a rank that reads its weights, or evaluates by itself, needs no company.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from ds_zo.backends.lsp.matrices import MatrixState
from ds_zo.streaming.node import explain_lost_rank, world_timeout


class CollectiveCall:
    """Something that the communication thread was asked to do."""

    def __init__(self, work: Callable[[], None], *, after: torch.cuda.Event | None) -> None:
        self._work = work
        self._after = after
        """What it reads has been written on the device."""
        self._issued = threading.Event()
        self._error: BaseException | None = None
        self.done: torch.cuda.Event | None = None
        """On the device; on the CPU it is done when it is issued."""

    def run(self, stream: torch.cuda.Stream | None) -> None:
        try:
            if self._after is not None and stream is not None:
                stream.wait_event(self._after)
            self._work()
            if stream is not None:
                self.done = torch.cuda.Event()
                self.done.record(stream)
        except BaseException as error:  # raised where somebody waits
            self._error = error
        finally:
            self._work = _nothing
            self._issued.set()

    def wait(self) -> None:
        """What the caller does next on the device follows it."""
        self._issued.wait()
        if self._error is not None:
            raise self._error
        if self.done is not None:
            torch.cuda.current_stream().wait_event(self.done)


class CollectiveThread:
    """The ranks of a data-parallel group, and this rank's line to the others. Making one is collective."""

    def __init__(self, process_group: Any, *, device: torch.device) -> None:
        self.device = device
        self.size, self.index = dist.get_world_size(process_group), dist.get_rank(process_group)
        self._ranks = dist.get_process_group_ranks(process_group or dist.group.WORLD)
        self._group = dist.new_group(self._ranks, timeout=world_timeout(device))
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._calls: queue.SimpleQueue[CollectiveCall | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self.bytes_wire = 0
        """Handed to collectives since the start."""

    def ask(self, work: Callable[[], None]) -> CollectiveCall:
        """`work` calls `average_` and `broadcast_` below, on a stream that follows the current one."""
        after = None
        if self._stream is not None:
            after = torch.cuda.Event()
            after.record(torch.cuda.current_stream(self.device))
        call = CollectiveCall(work, after=after)
        self._calls.put(call)
        if self._thread is None:
            self._thread = threading.Thread(target=self._serve, name="ds_zo-lsp-ranks", daemon=True)
            self._thread.start()
        return call

    def average(self, value: torch.Tensor) -> torch.Tensor:
        """The mean of all ranks' `value`s, which must be the same kind of tensor everywhere. Waits for it."""
        mean = value.clone()
        self.ask(lambda: self.average_(mean)).wait()
        return mean

    def take_from_first_(self, value: torch.Tensor) -> None:
        """Overwrites it with the first rank's. Waits for it."""
        self.ask(lambda: self.broadcast_(value, 0)).wait()

    # In the communication thread

    def average_(self, value: torch.Tensor) -> None:
        self._hold(value)
        with explain_lost_rank(self.device):
            dist.all_reduce(value, group=self._group)
        value.div_(self.size)
        self.bytes_wire += value.nbytes

    def broadcast_(self, value: torch.Tensor, owner: int) -> None:
        self._hold(value)
        with explain_lost_rank(self.device):
            dist.broadcast(value, self._ranks[owner], group=self._group)
        self.bytes_wire += value.nbytes

    def _hold(self, value: torch.Tensor) -> None:
        if self._stream is not None:
            value.record_stream(self._stream)

    @torch.no_grad()
    def _serve(self) -> None:
        if self._stream is None:
            self._serve_all()
            return
        torch.cuda.set_device(self.device)
        with torch.cuda.stream(self._stream):
            self._serve_all()

    def _serve_all(self) -> None:
        while (call := self._calls.get()) is not None:
            call.run(self._stream)
            del call

    def close(self) -> None:
        """Ends the thread after what it was asked to do. Safe to call twice."""
        thread, self._thread = self._thread, None
        if thread is not None and thread is not threading.current_thread():
            self._calls.put(None)
            thread.join()


class BackwardOrder:
    """Acts on groups of parameters strictly from the last to the first, on each as soon as its gradients and those of
    all groups behind it have come. See [Note: one order]."""

    def __init__(self, groups: Sequence[Sequence[MatrixState]], act: Callable[[int], None]) -> None:
        self._groups = groups
        self._act = act
        self._missing: list[set[int]] = []
        self._next = -1
        self._index = {id(slot): i for i, group in enumerate(groups) for slot in group}

    def begin(self, trains: Callable[[MatrixState], bool]) -> None:
        """Before a backward pass that is to bring gradients of what `trains`."""
        self._missing = [{id(slot) for slot in group if trains(slot)} for group in self._groups]
        self._next = len(self._groups) - 1

    def is_over(self, slot: MatrixState) -> bool:
        return self._index[id(slot)] > self._next

    def arrived(self, slot: MatrixState) -> None:
        self._missing[self._index[id(slot)]].discard(id(slot))
        while self._next >= 0 and not self._missing[self._next]:
            self._advance()

    def finish(self) -> None:
        """The backward pass is over: what has not come will not."""
        while self._next >= 0:
            self._advance()

    def _advance(self) -> None:
        self._next -= 1
        self._act(self._next + 1)


def _nothing() -> None:
    pass
