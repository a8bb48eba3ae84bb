"""Collectives of an LSP run on several ranks, and their order.

[Note: one order of collectives] Collectives must be issued in the same order on every rank. So one thread of each rank
issues all of them, first come, first served, on a process group of its own. Work from a backward pass is submitted in a
fixed order of layers, although gradients come in any order. A layer that a rank's batch does not use holds back this
rank's later layers until the end of its backward pass; then it is sent as zeros. Only this thread waits for other
ranks. So one rank alone can read its weights or evaluate.
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
from ds_zo.streaming.streams import DONE, Event, Stream, Streams


class CollectiveCall:
    """Work that was submitted to the collective thread."""

    def __init__(self, work: Callable[[], None], *, streams: Streams) -> None:
        self._work = work
        self._compute = streams.compute
        self._inputs_ready = streams.compute.recorded()
        self._issued = threading.Event()
        self._error: BaseException | None = None
        self.done: Event = DONE
        """Recorded after the work on the device."""

    def run(self, stream: Stream) -> None:
        try:
            stream.wait(self._inputs_ready)
            self._work()
            self.done = stream.recorded()
        except BaseException as error:  # `wait` raises it
            self._error = error
        finally:
            self._work = _nothing
            self._issued.set()

    def wait(self) -> None:
        """Waits until the work is issued, and makes the current stream wait for its end. Raises its error."""
        self._issued.wait()
        if self._error is not None:
            raise self._error
        self._compute.wait(self.done)


class CollectiveThread:
    """The ranks of a data-parallel group, and this rank's thread for collectives. All ranks must create it together."""

    def __init__(self, process_group: Any, *, streams: Streams) -> None:
        self.device = streams.device
        self.size, self.index = dist.get_world_size(process_group), dist.get_rank(process_group)
        self._ranks = dist.get_process_group_ranks(process_group or dist.group.WORLD)
        self._group = dist.new_group(self._ranks, timeout=world_timeout(self.device))
        self._streams, self._stream = streams, streams.another("collectives")
        self._calls: queue.SimpleQueue[CollectiveCall | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self.bytes_wire = 0
        """Bytes of all tensors that were passed to collectives."""

    def submit(self, work: Callable[[], None]) -> CollectiveCall:
        """Queues `work`, which calls `average_` and `broadcast_`. Its stream waits for the current stream's work."""
        call = CollectiveCall(work, streams=self._streams)
        self._calls.put(call)
        if self._thread is None:
            self._thread = threading.Thread(target=self._serve, name="ds_zo-lsp-ranks", daemon=True)
            self._thread.start()
        return call

    def average(self, value: torch.Tensor) -> torch.Tensor:
        """The mean of `value` over ranks, which must pass equal shapes and dtypes. Waits for it."""
        mean = value.clone()
        self.submit(lambda: self.average_(mean)).wait()
        return mean

    def broadcast_from_first_(self, value: torch.Tensor) -> None:
        """Overwrites `value` with the first rank's. Waits for it."""
        self.submit(lambda: self.broadcast_(value, 0)).wait()

    # In the collective thread

    def average_(self, value: torch.Tensor) -> None:
        self._stream.uses(value)
        with explain_lost_rank(self.device):
            dist.all_reduce(value, group=self._group)
        value.div_(self.size)
        self.bytes_wire += value.nbytes

    def broadcast_(self, value: torch.Tensor, owner: int) -> None:
        """`owner`: the index of the rank to copy from."""
        self._stream.uses(value)
        with explain_lost_rank(self.device):
            dist.broadcast(value, self._ranks[owner], group=self._group)
        self.bytes_wire += value.nbytes

    @torch.no_grad()
    def _serve(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        with self._stream.issuing():
            while (call := self._calls.get()) is not None:
                call.run(self._stream)
                del call

    def close(self) -> None:
        """Ends the thread after its queued work. Safe to call twice."""
        thread, self._thread = self._thread, None
        if thread is not None and thread is not threading.current_thread():
            self._calls.put(None)
            thread.join()


class BackwardOrder:
    """Calls `on_layer` for groups of parameters in a fixed order, from the last to the first.

    A group is next when its gradients and those of all groups behind it have come, or at the end of the backward
    pass. See [Note: one order of collectives]."""

    def __init__(self, groups: Sequence[list[MatrixState]], on_layer: Callable[[list[MatrixState]], None]) -> None:
        self._groups = groups
        self._on_layer = on_layer
        self._missing: list[set[int]] = []
        """By group: ids of the states whose gradient has not come."""
        self._next = -1
        """Index of the group that `on_layer` is called for next; -1 after the last."""
        self._index = {id(matrix): i for i, group in enumerate(groups) for matrix in group}

    def begin(self, trains: Callable[[MatrixState], bool]) -> None:
        """Starts a backward pass that is expected to make the gradients of all matrices that `trains`."""
        self._missing = [{id(matrix) for matrix in group if trains(matrix)} for group in self._groups]
        self._next = len(self._groups) - 1

    def has_passed(self, matrix: MatrixState) -> bool:
        """Whether `on_layer` has been called for the matrix's group."""
        return self._index[id(matrix)] > self._next

    def mark_arrived(self, matrix: MatrixState) -> None:
        """Records that the gradient of a matrix has come."""
        self._missing[self._index[id(matrix)]].discard(id(matrix))
        while self._next >= 0 and not self._missing[self._next]:
            self._advance()

    def finish(self) -> None:
        """Ends the backward pass: gradients that are missing will not come."""
        while self._next >= 0:
            self._advance()

    def _advance(self) -> None:
        self._next -= 1
        self._on_layer(self._groups[self._next + 1])


def _nothing() -> None:
    pass
