"""Host memory for streamed blocks that the ranks of a machine share. See [Note: shared host memory]."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import Any

import torch
from deepspeed.utils import logger

from ds_zo.streaming.host_store import PAGE, HostStore
from ds_zo.streaming.node import Node, SharedMemory, world_timeout
from ds_zo.streaming.streams import Streams

_POLL_S = 0.0005


class SharedStore(HostStore):
    """Buffers in shared memory: every rank can read all of a buffer; each rank pins and writes back its own shard.

    All ranks call `take` in the same order. Each rank counts its write-backs of a unit in shared memory. From the
    counts a rank that reads a whole unit knows when all shards are of the same step.
    """

    def __init__(self, node: Node, memory: SharedMemory, *, num_units: int, device: torch.device, pin: bool) -> None:
        super().__init__(device, pin=pin, ring=False)
        self.node, self.partition, self.num_sharers = node, node.partition, node.size
        self._memory = memory
        self._timeout_s = world_timeout(device).total_seconds()
        header = _pages(8 * num_units * node.size)
        self._num_written_back = memory.tensor[: 8 * num_units * node.size].view(torch.int64).view(num_units, node.size)
        """[unit, rank]: how often the rank's shard of the unit was written back."""
        self._num_requested = [0] * num_units
        """By unit: how many write-backs this rank has issued. All ranks issue equally many."""
        self._marks = torch.zeros(num_units, dtype=torch.int64, device=device)
        self._pinned: dict[int, torch.Tensor] = {}
        """Pinned memory by the buffer's address: the whole buffer, or the pages of this rank's shard of it."""
        self._end = header
        self._meets_in_take = self._pin
        """Whether `take` zeroes this rank's shard and meets the other ranks. Equal on all ranks, as `_pin` is not: one
        rank alone may be refused pinned memory."""
        if self._pin:
            self._register(memory.tensor[:header])

    @classmethod
    def of_machine(
        cls, sizes: Sequence[int], *, num_units: int, process_group: Any, streams: Streams, pin: bool
    ) -> SharedStore | None:
        """A store for buffers of `sizes` bytes. Returns None, on every rank of this machine, if the machine has one
        rank or its ranks cannot share memory. Collective."""
        node = Node(process_group, streams=streams)
        if node.size == 1:
            return None
        memory = node.map_shared(_pages(8 * num_units * node.size) + sum(map(_pages, sizes)))
        if memory is None:
            logger.warning(
                "ds_zo: the ranks of this machine can't share memory, so each rank stores the whole model: run them in "
                "one container (zero_optimization.stage)"
            )
            return None
        return cls(node, memory, num_units=num_units, device=streams.device, pin=pin)

    def take(self, nbytes: int) -> torch.Tensor:
        if nbytes == 0:
            return torch.empty(0, dtype=torch.uint8)
        begin, self._end = self._end, self._end + _pages(nbytes)
        buffer = self._memory.tensor[begin : begin + nbytes]
        shard = self.partition.shard(nbytes)
        self.nbytes += shard.stop - shard.start
        if self._meets_in_take:
            if shard.stop > shard.start:
                buffer[shard].zero_()  # allocates the pages, on this rank's NUMA node, before they are registered
                pages = slice(begin + shard.start // PAGE * PAGE, begin + _pages(shard.stop))
                if self._pin and self._register(self._memory.tensor[pages]):
                    self._pinned[buffer.data_ptr()] = self._memory.tensor[pages]
                    self.pinned_nbytes += shard.stop - shard.start
            self.node.barrier()  # otherwise a late rank would zero values that another rank has stored
        return buffer

    def writes(self, number: int) -> bool:
        return number % self.partition.size == self.partition.index

    def barrier(self) -> None:
        self.node.barrier()

    def smallest(self, number: int) -> int:
        return self.node.smallest(number)

    def copy_whole(self, target: torch.Tensor, buffer: torch.Tensor) -> None:
        """Copies a whole buffer to the device, by this rank alone. CUDA cannot copy in one call from memory that is
        partly pinned, so the first such copy pins all of the buffer."""
        pinned = self._pinned.get(buffer.data_ptr())
        if pinned is not None and pinned.numel() < buffer.numel() and not self._pin_whole(buffer, pinned):
            target.copy_(buffer.clone())
        else:
            target.copy_(buffer, non_blocking=True)

    def _pin_whole(self, buffer: torch.Tensor, shard: torch.Tensor) -> bool:
        self.node.host_wait()  # for copies from the shard, which is about to be unpinned
        self._unregister(shard)
        for pinned in (buffer, shard) if self._pin else (shard,):
            if self._register(pinned):
                self._pinned[buffer.data_ptr()] = pinned
                return pinned is buffer
        del self._pinned[buffer.data_ptr()]
        return False

    def mark_written_back(self, number: int) -> None:
        """Records on the current stream that this rank has written back its shard of unit `number`."""
        self._num_requested[number] += 1
        mark = self._marks[number : number + 1]
        mark.fill_(self._num_requested[number])
        self._num_written_back[number, self.partition.index : self.partition.index + 1].copy_(mark, non_blocking=True)

    def wait(self, number: int) -> None:
        """Blocks the host until every rank has written back its shard of unit `number` as often as this rank has issued
        its own."""
        deadline = time.monotonic() + self._timeout_s
        while int(self._num_written_back[number].min()) < self._num_requested[number]:
            if time.monotonic() > deadline:
                raise RuntimeError(
                    f"ds_zo: a rank of this machine has not written back its shard of block {number} within "
                    f"{self._timeout_s:.0f} s, the process group's timeout: it died or stopped; start the job again "
                    "from the last checkpoint"
                )
            time.sleep(_POLL_S)

    def free(self, buffer: torch.Tensor) -> None:
        """Frees a buffer, after all ranks have called this and finished reading; each rank frees its own shard."""
        self.node.barrier()
        shard = self.partition.shard(buffer.numel())
        self.nbytes -= shard.stop - shard.start
        pinned = self._pinned.pop(buffer.data_ptr(), None)
        if pinned is not None:
            self._unregister(pinned)
            self.pinned_nbytes -= shard.stop - shard.start
        begin = buffer.data_ptr() - self._memory.tensor.data_ptr()
        self._memory.free(begin + _pages(shard.start), begin + shard.stop // PAGE * PAGE)

    def private(self, buffer: torch.Tensor) -> torch.Tensor:
        """A copy-on-write view of the buffer: this process's writes to it are seen by no other rank."""
        begin = buffer.data_ptr() - self._memory.tensor.data_ptr()
        return self._memory.private_view()[begin : begin + buffer.numel()]

    @staticmethod
    def has_room_for(nbytes: int) -> bool:
        """Whether `nbytes` are less than half of the machine's free memory."""
        return 2 * nbytes < os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")

    def close(self) -> None:
        super().close()
        self._memory.close()


def _pages(nbytes: int) -> int:
    return -(-nbytes // PAGE) * PAGE
